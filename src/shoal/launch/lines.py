"""From the bytes of a pipe to whole lines, and the end of what a worker said before it failed."""

from __future__ import annotations

from collections import deque

# A longer line is passed on in pieces.
LINE_BYTES_MAX = 1 << 16
_TAIL_LINES_MAX = 400
_WITHOUT_TRACEBACK_LINES = 10
_TRACEBACK = "Traceback (most recent call last):"
# What Python prints between the parts of a chain, which are one block.
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class LineSplitter:
    """Takes bytes as they come and gives whole lines, without their ends.

    What a carriage return overwrites (progress bars) is left out, as a terminal would.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\\ntw"), splitter.feed(b"o\\r\\n 10%\\r 20%"), splitter.end()
    ([b'one'], [b'two'], [b' 20%'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [_shown(line) for line in whole]
        # A return at the very end may be half of the end of a line.
        rest = rest[rest.rfind(b"\r", 0, max(0, len(rest) - 1)) + 1 :]
        while len(rest) > LINE_BYTES_MAX:
            lines.append(rest[:LINE_BYTES_MAX])
            rest = rest[LINE_BYTES_MAX:]
        self._rest = rest
        return lines

    def end(self) -> list[bytes]:
        """What is left when the pipe is closed: at most one line without an end."""
        rest, self._rest = _shown(self._rest), b""
        return [rest] if rest else []


def _shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class StderrTail:
    """The last lines of a worker's stderr, and the last traceback among them."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES_MAX)

    def add(self, lines: list[bytes]) -> None:
        """Take further lines."""
        self._lines.extend(line.decode(errors="replace") for line in lines)

    def reason(self) -> list[str]:
        """The last traceback with all that belongs to it; where there is none, the last few lines."""
        lines = list(self._lines)
        starts = [i for i, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
        if not starts:
            return lines[-_WITHOUT_TRACEBACK_LINES:]
        first = starts.pop()
        while starts and any(line in _CHAIN for line in lines[starts[-1] : first]):
            first = starts.pop()
        return lines[first:]


class Tracebacks:
    """Lets a traceback through once: where another worker has raised the same, a line says so.

    >>> shown, same = Tracebacks(), [_TRACEBACK.encode(), b"  File ...", b"ValueError: x"]
    >>> shown.fold(0, same) == same, shown.fold(1, [b"hm", *same])
    (True, [b'hm', b'ValueError: x (the traceback is that of worker 0)'])
    """

    def __init__(self) -> None:
        self._shown: dict[tuple[bytes, ...], int] = {}  # by whom first
        self._held: dict[int, list[bytes]] = {}  # not at its end yet

    def fold(self, rank: int, lines: list[bytes], *, ended: bool = False) -> list[bytes]:
        """What is to be shown of these lines of a worker; `ended`: there are no more."""
        shown: list[bytes] = []
        for line in lines:
            held = self._held.pop(rank, [])
            if not held and line != _TRACEBACK.encode():
                shown.append(line)
            elif not held or (line[:1] in (b" ", b"") and len(held) < _TAIL_LINES_MAX):
                self._held[rank] = [*held, line]
            else:
                whole = (*held, line)
                first = self._shown.setdefault(whole, rank)
                said = b"%b (the traceback is that of worker %d)" % (line, first)
                shown += whole if first == rank else [said]
        return shown + (self._held.pop(rank, []) if ended else [])
