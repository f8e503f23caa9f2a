"""What a worker did, moment by moment, kept where `shoal compare` asks for it (SHOAL_HISTORY).

The file is `history/<rank>.jsonl` in the job's directory: a line for every `worker.report(...)` and, between
those, one about every tenth of a second in which a step was made. Lines are written at once, so that what a
worker that is killed had done is there.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

__all__ = ["History", "Moment", "history_path", "read_history"]

_EVERY_S = 0.1
# Above this many lines only one a second is kept.
_MOMENTS_MAX = 1_000_000
_THEN_EVERY_S = 1.0


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker at one time (seconds since 1970): what it has done, and what it reported just then."""

    time: float
    steps: int = 0
    samples: int = 0
    waited_s: float = 0.0
    dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    # Of the whole job: pushes that were applied one by one, and the sum of their staleness.
    pushes: int = 0
    stale: int = 0
    metrics: dict[str, float] = {}


_DECODER = msgspec.json.Decoder(Moment)


def history_path(job: Path, rank: int) -> Path:
    """The file of worker `rank` of the job in the directory `job`."""
    return job / "history" / f"{rank}.jsonl"


def read_history(path: Path) -> list[Moment]:
    """All moments of a file in order; a last line that was cut short is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_DECODER.decode(line) for line in lines if line.endswith(b"\n")]


class History:
    """The file of this worker, open for writing."""

    def __init__(self, job: Path, rank: int) -> None:
        path = history_path(job, rank)
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._last = 0.0
        self._count = 0

    @property
    def due(self) -> bool:
        """Whether the last moment is so long ago that another is wanted."""
        return time.monotonic() >= self._last + _EVERY_S

    def add(self, moment: Moment) -> None:
        """Keep a moment."""
        now = time.monotonic()
        if self._count >= _MOMENTS_MAX and now < self._last + _THEN_EVERY_S:
            return
        self._last = now
        self._count += 1
        self._file.write(msgspec.json.encode(moment) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
