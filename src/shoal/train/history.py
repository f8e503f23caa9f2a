"""What a worker did, moment by moment, kept where `shoal compare` asks for it (SHOAL_HISTORY).

The file is `history/<rank>.jsonl` in the job's directory: a line for every `worker.report(...)` and, between
those, one about every tenth of a second in which a step was made. Lines are written at once, so that what a
worker that is killed had done is there.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

if TYPE_CHECKING:
    from shoal.train.worker import Worker

# How often the servers are asked about staleness.
_ASK_EVERY_S = 1.0
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


def open_history(job: Path, rank: int) -> BinaryIO:
    """That file, to be written; every line is there at once."""
    path = history_path(job, rank)
    path.parent.mkdir(exist_ok=True)
    return path.open("ab", buffering=0)


def write_moment(file: BinaryIO, moment: Moment) -> None:
    """Add a line."""
    file.write(msgspec.json.encode(moment) + b"\n")


def read_history(path: Path) -> list[Moment]:
    """All moments of a file in order; a last line that was cut short is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [_DECODER.decode(line) for line in lines if line.endswith(b"\n")]


class History:
    """The file of one worker, open for writing."""

    def __init__(self, worker: Worker, job: Path) -> None:
        self._worker = worker
        self._file = open_history(job, worker.rank)
        self._begun = False
        self._last = -math.inf
        self._count = 0
        self._asked = -math.inf
        self._pushes = self._stale = 0

    def begin(self) -> None:
        """A model is prepared. The first time workers wait for each other: starting up is not compared."""
        if not self._begun:
            self._begun = True
            self._worker.barrier()
            self._worker.waited_s = 0.0
            self.add()

    def beat(self) -> None:
        """A step was made: add a moment if the last is long ago."""
        if time.monotonic() >= self._last + _EVERY_S:
            self.add()

    def add(self, metrics: dict[str, float] | None = None) -> None:
        """Add this moment."""
        now = time.monotonic()
        if self._count >= _MOMENTS_MAX and now < self._last + _THEN_EVERY_S:
            return
        self._last = now
        self._count += 1
        worker = self._worker
        if now >= self._asked + _ASK_EVERY_S:
            self._asked = now
            staleness = worker.rounds.state()["staleness"]
            self._pushes, self._stale = staleness["count"], staleness["sum"]
        traffic = worker.client.stats()
        moment = Moment(
            time=time.time(),
            steps=worker.steps_made,
            samples=int(worker.samples),
            waited_s=worker.waited_s,
            dropped=worker.dropped,
            bytes_sent=traffic["bytes_sent"],
            bytes_received=traffic["bytes_received"],
            pushes=self._pushes,
            stale=self._stale,
            metrics={name: value for name, value in (metrics or {}).items() if math.isfinite(value)},
        )
        write_moment(self._file, moment)

    def close(self) -> None:
        """Add the last moment, with the servers' figures as they are now."""
        if not self._file.closed:
            self._asked = -math.inf
            self.add()
            self._file.close()
