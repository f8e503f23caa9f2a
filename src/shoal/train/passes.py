"""Passes over the data: what happens between a loader that hands out units and the job's ledger.

A loop that steps is training: its pass is opened in the ledger, each unit is done with the step that used
it, and
the pass ends for all workers together. A loop that never steps (evaluation) just reads: nobody waits for
anybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.data.ledger import LeasedLedger, Ledger, StaticLedger
from shoal.data.loader import NO_UNIT, ShardedLoader

if TYPE_CHECKING:
    from shoal.train.worker import Worker

__all__ = ["Passes"]

# Loaders have passes of their own: the n-th loader's pass e is pass n * this + e of the ledger.
_PASSES_A_LOADER = 1 << 32


class Passes:
    """The passes of one loader on one worker."""

    def __init__(self, worker: Worker, loader: Any, number: int) -> None:
        self._worker = worker
        self._first = number * _PASSES_A_LOADER
        self._steps = 0  # made by the worker before this pass
        self._drawn = 0
        policy = worker.policy.rows_policy if worker.policy.dense_home == "peers" else worker.policy
        ledger: Ledger
        if policy.order(worker.world_size) == "static":
            ledger = StaticLedger(worker.rank, worker.world_size, open=self._open)
        else:
            ledger = LeasedLedger(worker.rank, worker.world_size, self._lease, open=self._open, end=self._end)
        self._static = isinstance(ledger, StaticLedger)
        self.loader = ShardedLoader(
            loader,
            worker.rank,
            worker.world_size,
            ledger,
            batch="each" if worker.batch == "each" else "split",
            on_unit=self._on_unit,
            on_pass=self._on_pass,
            seed=worker.seed,
        )

    def _open(self, epoch: int, units: int) -> None:
        self._steps, self._drawn = self._worker.steps_made, 0
        self._worker.rounds.open_pass(self._first + epoch, units)

    def _lease(self, rank: int, epoch: int, want: int) -> list[tuple[int, int]]:
        return self._worker.rounds.lease(self._first + epoch, want)

    @property
    def _training(self) -> bool:
        return self._worker.steps_made > self._steps

    def _on_unit(self, epoch: int, unit: int, samples: int) -> None:
        worker = self._worker
        if unit != NO_UNIT:
            worker.drew(self._first + epoch, unit, samples, self.loader.global_samples)
        if samples == 0 and (self._training or (self._drawn == 0 and worker.trains())):
            worker.abstain()
        self._drawn += 1

    def _end(self, rank: int, epoch: int) -> bool:
        """Leased order: all that can be leased now is trained."""
        return self._finish(epoch)

    def _on_pass(self, epoch: int) -> None:
        if self._static and not self._finish(epoch):
            raise AssertionError("units of a static pass cannot come back")
        self._worker.epoch = max(self._worker.epoch, epoch + 1)

    def _finish(self, epoch: int) -> bool:
        worker = self._worker
        if not self._training:
            worker.forget_share()
            return True
        assert worker.strategy is not None
        worker.strategy.end_pass()
        with worker.waiting():
            step = worker.rounds.end_pass(self._first + epoch)
        if step is None:
            return False
        worker.step = step
        worker.strategy.refresh()
        if worker.history is not None:
            worker.history.add()
        return True
