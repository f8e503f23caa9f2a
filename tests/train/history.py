"""G4: what a recorded run under `ssp:s` must be. Every worker adds 1 to a column of its own in each step, on
all keys, so a read shows which steps of whom it holds.

1. Nobody starts step c before all have finished step c - s - 1.
2. A read in step c holds every update of steps <= c - s - 1,
3. all of one's own, none of later steps than anybody may have begun, and the same of oneself on every shard.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class UnboundedError(AssertionError):
    """The history of a run that was not bounded."""


class History:
    """What workers did, in order. `now` gives numbers that grow, for all workers alike."""

    def __init__(self, workers: int, now: Callable[[], float] | None = None) -> None:
        count = itertools.count()
        self.workers = workers
        self._now = now or (lambda: next(count))
        self._lock = threading.Lock()
        self.started: dict[tuple[int, int], float] = {}
        self.finished: dict[tuple[int, int], float] = {}
        self.reads: list[
            tuple[int, int, list[int], list[int]]
        ] = []  # rank, step, least and most of each column

    def start(self, rank: int, step: int) -> None:
        """Once it may."""
        with self._lock:
            self.started[rank, step] = self._now()

    def finish(self, rank: int, step: int) -> None:
        """Before it says so: whoever is let go by that begins later, so no lead is seen that is none."""
        with self._lock:
            self.finished[rank, step] = self._now()

    def read(self, rank: int, step: int, rows: Any) -> None:
        """Rows of keys of many shards, a column for each worker."""
        low, high = (np.rint(part).astype(int).tolist() for part in (rows.min(axis=0), rows.max(axis=0)))
        with self._lock:
            self.reads.append((rank, step, low, high))

    def largest_lead(self) -> int:
        """By how many steps a worker that began one was ahead of the slowest."""
        return max(
            step - sum(self.finished.get((other, c), np.inf) <= at for c in range(step))
            for (_, step), at in self.started.items()
            for other in range(self.workers)
        )

    def text(self) -> str:
        events = [[[*name, at] for name, at in events.items()] for events in (self.started, self.finished)]
        return json.dumps([*events, self.reads])

    def add(self, text: str) -> None:
        """What another process has recorded, by the same clock."""
        started, finished, reads = json.loads(text)
        self.started |= {(rank, step): at for rank, step, at in started}
        self.finished |= {(rank, step): at for rank, step, at in finished}
        self.reads += [tuple(read) for read in reads]


def check(history: History, bound: int) -> None:
    """Raises UnboundedError unless the history is one of `ssp:bound`."""
    if not history.reads:
        raise UnboundedError("nothing was read")
    for (rank, step), at in history.started.items():
        needed = step - bound - 1
        for other in range(history.workers):
            if needed >= 0 and not history.finished.get((other, needed), np.inf) <= at:
                raise UnboundedError(
                    f"worker {rank} started step {step} before worker {other} finished {needed}"
                )
    for rank, step, low, high in history.reads:
        if low[rank] != step or high[rank] != step:
            raise UnboundedError(
                f"worker {rank} in step {step} reads {low[rank]} to {high[rank]} of its own updates"
            )
        for other in range(history.workers):
            if low[other] < step - bound:
                raise UnboundedError(
                    f"worker {rank} in step {step} reads {low[other]} updates of worker {other}"
                )
            if high[other] > step + bound + 1:
                raise UnboundedError(
                    f"worker {rank} in step {step} reads {high[other]} updates of worker {other}"
                )
