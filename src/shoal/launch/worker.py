"""One worker as a process of the supervisor: started so that it cannot outlive it, and read line by line."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from shoal.fleet.child import stands_still
from shoal.launch.guardian import kill_session, session_members
from shoal.launch.lines import LineSplitter, StderrTail

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


def exit_code(returncode: int) -> int:
    """What a shell would call it: 128 and the signal for a process that was killed by one.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def how_ended(returncode: int) -> str:
    """The same in words.

    >>> how_ended(3), how_ended(-9)
    ('died (3)', 'was killed by SIGKILL')
    """
    return f"was killed by {signal_name(-returncode)}" if returncode < 0 else f"died ({returncode})"


def signal_name(number: int) -> str:
    """Of the real-time signals only some have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Pipe:
    """One of a worker's two outputs."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.file = file
        self.name = name
        self._splitter = LineSplitter()

    def read(self) -> tuple[list[bytes], bool]:
        """The lines that are there, and whether the other end is closed. To be called when it is readable."""
        data = os.read(self.file.fileno(), _READ_BYTES)
        return (self._splitter.feed(data), False) if data else (self._splitter.end(), True)

    def close(self) -> list[bytes]:
        """Give up reading; what was held back of a line."""
        self.file.close()
        return self._splitter.end()


class Worker:
    """A worker's process, its pipes and what it said last.

    It leads a session of its own: Ctrl-C is the supervisor's to handle, and what the worker starts (loaders)
    can be found and ended with it. The session's number is not free before `reap`.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.name = f"worker {rank}"
        self.tail = StderrTail()
        # In the child, between fork and exec. The supervisor has no other threads, so this is safe here.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self.pipes = [Pipe(self._process.stdout, "stdout"), Pipe(self._process.stderr, "stderr")]
        self.ended_fd = os.pidfd_open(self.pid)
        self.code: int | None = None

    def peek(self) -> int | None:
        """Its return code if it has ended, as `subprocess` counts; it is not reaped by that."""
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    @property
    def stopped(self) -> bool:
        """Whether it stands still by a signal (SIGSTOP); a debugger that holds it does not count."""
        return stands_still(self.pid)

    def terminate(self) -> None:
        """Ask it to end; its children are its own to end."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> bool:
        """SIGKILL for it and all that it started; whether anything was left."""
        return kill_session(self.pid)

    @property
    def left_behind(self) -> list[int]:
        """The live processes of its session."""
        return session_members(self.pid)

    def reap(self) -> None:
        """Let the system forget it, once it has ended."""
        self._process.wait()
        os.close(self.ended_fd)


def _die_with(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    killed = int(signal.SIGKILL)

    def die() -> None:
        prctl(_PR_SET_PDEATHSIG, killed, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)

    return die
