"""Where a job is shown: prefixed lines of its workers, notes of the supervisor, and its progress.

On a terminal the progress is a table that stays at the bottom; elsewhere a line every few seconds. What
workers write to stdout goes to stdout; what they write to stderr, and all notes, to stderr, unless both are a
terminal. What is shown is also written to `logs/job.log`, and each worker's lines to a log of its own.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.launch.board import Board

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_ANSI = {"cyan": 36, "magenta": 35, "green": 32, "yellow": 33, "blue": 34, "bright_red": 91, "bold": 1}
_PLAIN_EVERY_S = 5.0
_LIVE_EVERY_S = 0.25
# As much as a pipe that is said to be writable takes without blocking.
_PIPE_BYTES = 4096
_LOOK_MS = 100
# A log that reaches this ends; what follows is only shown.
_LOG_BYTES_MAX = 1 << 30


class LogFile:
    """A file that lines are added to, up to a maximum. A full disk costs the log and not the job."""

    def __init__(self, path: Path, bytes_max: int = _LOG_BYTES_MAX) -> None:
        self._file = path.open("ab", buffering=0)
        self._left = bytes_max

    def write(self, data: bytes) -> None:
        """Add whole lines."""
        if self._left <= 0:
            return
        self._left -= len(data)
        if self._left <= 0:
            data = b"[shoal] this log has reached its maximum; what follows is not in it\n"
        try:
            self._file.write(data)
        except OSError:
            self._left = 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Screen:
    """Shows one job. Not for several threads."""

    def __init__(
        self,
        log: LogFile,
        interrupted: Callable[[], bool],
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._log = log
        self._interrupted = interrupted
        self._out = _Stream(stdout or sys.stdout, interrupted)
        self._err = _Stream(stderr or sys.stderr, interrupted)
        self._live: Live | None = None
        self._shown_at = time.monotonic()
        if self._out.terminal and os.environ.get("TERM") != "dumb":
            console = Console(file=self._out.file, highlight=False)
            # No thread of its own: the supervisor starts processes and must not have any.
            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()

    def lines(self, worker: int, stream: str, lines: list[bytes]) -> None:
        """Whole lines of a worker, each with its prefix."""
        prefix = f"[worker {worker}] "
        colour = _COLOURS[worker % len(_COLOURS)]
        self._log.write(b"".join(prefix.encode() + line + b"\n" for line in lines))
        target = self._out if stream == "stdout" else self._err
        if self._live is not None and target.terminal:
            self._print([_painted(prefix, colour, line) for line in lines])
        else:
            shown = target.paint(prefix, colour)
            target.write(b"".join(shown + line + b"\n" for line in lines))

    def note(self, text: str, style: str = "bold") -> None:
        """A sentence of the supervisor's."""
        self._log.write(f"[shoal] {text}\n".encode())
        if self._live is not None and self._err.terminal:
            self._print([Text.assemble(("[shoal] ", style), text)])
        else:
            self._err.write(self._err.paint("[shoal] ", "bold") + text.encode() + b"\n")

    def plain(self, lines: list[str]) -> None:
        """Lines as they are, without a prefix."""
        data = "".join(f"{line}\n" for line in lines).encode()
        self._log.write(data)
        if self._live is not None and self._err.terminal:
            self._print([Text(line) for line in lines])
        else:
            self._err.write(data)

    def progress(self, board: Board, *, changed: bool) -> None:
        """Show how far the workers are, if it is time to."""
        now = time.monotonic()
        if self._live is not None:
            if now >= self._shown_at + _LIVE_EVERY_S:
                self._shown_at = now
                live = self._live
                self._draw(lambda: live.update(board.table(), refresh=True))
        elif changed and now >= self._shown_at + _PLAIN_EVERY_S:
            self._shown_at = now
            self.note(board.line())

    def close(self) -> None:
        """Take the progress off the screen."""
        if self._live is not None:
            self._draw(self._live.stop)
            self._live = None

    def _print(self, lines: list[Text]) -> None:
        # At once: each print draws the table anew.
        assert self._live is not None
        live = self._live
        self._draw(lambda: live.console.print(Text("\n").join(lines), soft_wrap=True))

    def _draw(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except OSError:  # the terminal is gone; SIGHUP says what that means
            self._live = None
            self._out.silence()


def _painted(prefix: str, colour: str, line: bytes) -> Text:
    return Text.assemble((prefix, colour), Text.from_ansi(line.decode(errors="replace")))


class _Stream:
    """stdout or stderr. One whose reader is gone is silent from then on: the job is worth more."""

    def __init__(self, file: TextIO, interrupted: Callable[[], bool]) -> None:
        self.file = file
        self.terminal = file.isatty()
        self._interrupted = interrupted
        self._gone = False

    def paint(self, text: str, colour: str) -> bytes:
        if not self.terminal or "NO_COLOR" in os.environ:
            return text.encode()
        return f"\x1b[{_ANSI[colour]}m{text}\x1b[0m".encode()

    def write(self, data: bytes) -> None:
        """Write all of it. If nobody reads, a signal ends the waiting, and the rest is dropped."""
        if self._gone:
            return
        try:
            self.file.flush()
            descriptor = self.file.fileno()
            poller = select.poll()
            poller.register(descriptor, select.POLLOUT)
            while data:
                if poller.poll(_LOOK_MS):
                    data = data[os.write(descriptor, data[:_PIPE_BYTES]) :]
                elif self._interrupted():
                    return
        except OSError:
            self.silence()

    def silence(self) -> None:
        """Write nothing any more."""
        self._gone = True
        # Or the interpreter would complain when it flushes at its end.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())
