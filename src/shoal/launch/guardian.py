"""Ends what a job has started when nobody else can: after the supervisor itself was killed.

A process of its own, run as a file and without Shoal, so that it starts in no time and needs nothing. It
reads `+PID` and `-PID` lines: sessions that are to be watched, and those that have ended. When its stdin
ends, so has the supervisor, and what is left of those sessions is killed. (The workers themselves are killed
by the kernel at that moment; this is for what they had started.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

__all__ = ["kill_session", "main", "session_members"]

# What ends by itself when its worker does, cleaning up behind it, is given this time.
GRACE_S = 1.0
_GIVE_UP_S = 10.0
_LOOK_EVERY_S = 0.05


def session_members(session: int) -> list[int]:
    """The pids of the live processes of a session, its leader included."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # pid (name) state ppid pgrp session ...; the name may hold anything, brackets too.
        state, _, _, sid = stat[stat.rindex(b")") + 2 :].split()[:4]
        if int(sid) == session and state not in (b"Z", b"X"):
            members.append(int(entry.name))
    return members


def kill_session(session: int) -> bool:
    """SIGKILL for all that is left of a session; whether there was anything."""
    members = session_members(session)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(members)


def _watch() -> set[int]:
    """The sessions that are open when stdin ends."""
    sessions: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        if line[0] == "+":
            sessions.add(pid)
        else:
            sessions.discard(pid)
    return sessions


def main() -> None:
    """Watch until stdin ends, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions = _watch()
    start = time.monotonic()
    while sessions and time.monotonic() < start + _GIVE_UP_S:
        if time.monotonic() < start + GRACE_S:
            sessions = {session for session in sessions if session_members(session)}
        else:
            sessions = {session for session in sessions if kill_session(session)}
        time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    main()
