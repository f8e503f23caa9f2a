"""The supervisor's end of `shoal.launch.guardian`, which is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from shoal.launch import guardian


class GuardianProcess:
    """The process that cleans up after a supervisor that was killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """Watch the session of this process."""
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """It has ended, with all that was in it."""
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line.encode())

    def __enter__(self) -> GuardianProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
