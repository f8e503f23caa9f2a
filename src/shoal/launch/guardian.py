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

# What ends by itself when its worker does, cleaning up behind it, is given this time.
GRACE_S = 1.0
_GIVE_UP_S = 10.0
_LOOK_EVERY_S = 0.05


def process_stat(pid: int) -> list[bytes]:
    """State, ppid, pgrp, session and so on of a live process, as /proc has them; nothing if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # pid (name) state ppid ...; the name may hold anything, brackets too.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return [] if fields[0] in (b"Z", b"X") else fields


def session_members(session: int) -> list[int]:
    """The pids of the live processes of a session, its leader included."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if process_stat(pid)[3:4] == [str(session).encode()]]


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
