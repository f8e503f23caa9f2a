"""Processes of a cluster on this machine: started so that they end with their parent, and ended together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import Unavailable
from shoal.fleet.process import ERROR

_STOP_S = 5.0
_LOG_CHARS_SHOWN = 2000


@dataclass(frozen=True)
class Child:
    """One process that was started here."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path
    started: float

    def check(self) -> None:
        """Raise if it has ended: with the reason that it gave, or with the end of its log."""
        code = self.process.poll()
        if code is not None:
            raise Unavailable(f"the {self.role} ended with code {code} while starting: {self.why_ended()}")

    def why_ended(self) -> str:
        """What it said at last."""
        text = self.log.read_text(errors="replace").strip()
        last = text.rpartition("\n")[2]
        said = last.startswith(ERROR)
        return last.removeprefix(ERROR) if said else text[-_LOG_CHARS_SHOWN:] or "no output"


def start_child(
    directory: Path,
    role: str,
    module: str,
    arguments: Sequence[str],
    descriptors: Sequence[int] = (),
    stdout: int = subprocess.DEVNULL,
) -> Child:
    """Start `python -m shoal.fleet.{module}_process`, which watches its stdin; its log is in `directory`."""
    log = directory / f"{role.replace(' ', '-')}.log"
    with log.open("ab") as output:
        # -P: a file in the user's directory must not stand in for a module. A session of its own: Ctrl-C
        # is for the user's program, which closes the cluster when it is done.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"shoal.fleet.{module}_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=output,
            pass_fds=descriptors,
            # Without this NumPy starts threads for linear algebra, a third of a server's starting time.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return Child(role, process, log, time.monotonic())


def stop_children(children: Sequence[Child], *, by_stdin: bool = False) -> None:
    """End and reap them all. `by_stdin`: as if their parent had ended, not by a signal."""
    for child in children:
        if by_stdin:
            close_stdin(child)
        else:
            child.process.terminate()
    end = time.monotonic() + _STOP_S
    for child in children:
        try:
            child.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        close_stdin(child)


def stands_still(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP); a debugger that holds it does not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it has ended
        return False
    return stat[stat.rindex(b")") + 2 :].startswith(b"T ")  # the name before it may hold anything


def close_stdin(child: Child) -> None:
    """Let go of the pipe by whose end it knows of ours."""
    if child.process.stdin is not None:
        with suppress(OSError):
            child.process.stdin.close()
