"""`worker.mean`: each worker puts its value into a row of a table, and after a barrier all read all rows."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shoal import optim
from shoal.errors import BadInput

if TYPE_CHECKING:
    from shoal.store.table import Table
    from shoal.train.worker import Worker


class Means:
    """Those that one worker asks for."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._turn = False  # of the two rows

    def mean(self, value: float, weight: float, call: tuple[int, int]) -> float:
        """See `Worker.mean`. `call`: which one it is, in numbers that all workers have."""
        worker = self._worker
        if not 0 <= weight < math.inf:
            raise BadInput(f"worker.mean: weight is {weight!r}; it must be a finite number, at least 0")
        if worker.world_size == 1:
            return float(value) if weight else math.nan
        # Two rows for each worker, by turns: a worker can be one call ahead of another, not two.
        self._turn = not self._turn
        # Bit by bit, in whole numbers that a float32 of a row can hold.
        told = np.array([[float(value), float(weight), *call]]).view(np.uint16).astype(np.float32)
        worker.lives.again(lambda: self._table.assign([2 * worker.rank + self._turn], told))
        state = worker.lives.again(worker.rounds.state)
        everybody = range(2 * len(state["phases"]))  # also those who have come since the pass began
        worker.barrier()
        rows = worker.lives.again(lambda: self._table.pull(everybody)).astype(np.uint16).view(np.float64)
        values, weights = rows[(rows[:, 2:] == call).all(1) & (rows[:, 1] > 0), :2].T  # of this call alone
        return float((values * weights).sum() / weights.sum()) if len(weights) else math.nan

    @cached_property  # opened once: the coordinator may be away later
    def _table(self) -> Table:
        return self._worker.client.table("shoal.means", dim=16, optimizer=optim.SGD(lr=1.0))
