"""Passes over the data: what happens between a loader that hands out units and the job's ledger.

A loop that steps is training: its pass is opened in the ledger, each unit is done with the step that used
it, and the pass ends for all workers together. A loop that never steps (evaluation) just reads: nobody waits
for anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.data.ledger import LeasedLedger, Ledger, StaticLedger
from shoal.data.loader import NO_UNIT, ShardedLoader
from shoal.errors import Mismatch
from shoal.train.progress import PASSES_A_LOADER

if TYPE_CHECKING:
    from shoal.train.batch_rows import BatchRows
    from shoal.train.worker import Worker

__all__ = ["Passes"]

# Of the notices about loaders; models have those below.
_TOPICS, _LOADERS = 1 << 15, 1 << 14


class Passes:
    """The passes of one loader on one worker. `rows` are pulled as the loop gets batches, or one ahead."""

    def __init__(
        self, worker: Worker, loader: Any, number: int, rows: BatchRows | None = None, prefetch: int = 0
    ) -> None:
        self._worker = worker
        self._first = number * PASSES_A_LOADER
        self._topic = _TOPICS + 2 * (number % _LOADERS)
        self._name = "" if number == 0 else f" of loader {number}"
        self._shares = 0  # units of each worker in static order
        self._steps = 0  # made by the worker before this pass
        self._drawn = 0
        self._trains = False  # whether a pass over this loader was one of training
        policy = worker.policy.rows_policy if worker.policy.dense_home == "peers" else worker.policy
        ledger: Ledger
        if policy.order(worker.world_size) == "static":
            ledger = StaticLedger(
                worker.rank, worker.world_size, begin=self._begin, lease=self._lease, end=self._end
            )
        else:
            ledger = LeasedLedger(
                worker.rank, worker.world_size, self._lease, begin=self._begin, end=self._end
            )
        self._static = isinstance(ledger, StaticLedger)
        self._ended = -1
        self.loader = ShardedLoader(
            loader,
            worker.rank,
            worker.world_size,
            ledger,
            batch="each" if worker.batch == "each" else "split",
            on_unit=self._on_unit,
            on_pass=self._on_pass,
            on_over=self._on_over,
            on_batch=None if rows is None else rows.hand,
            ahead=rows.see if rows is not None and prefetch else None,
            on_first=self._on_first,
            seed=worker.seed,
        )
        # Who replaces a worker that died does not train again what is done.
        first, done = worker.rounds.resume(self._first)
        self.begins = first - self._first
        self.loader.set_start(self.begins, done)
        for epoch in range(self._first, first):
            worker.report_pass(epoch)

    def _begin(self, epoch: int, batches: int) -> int:
        worker = self._worker
        split = worker.batch != "each" and not self.loader.whole
        self._agree_on_order(epoch)
        self._steps, self._drawn = worker.steps_made, 0
        cut = worker.rounds.open_pass(self._first + epoch, batches, split=split, fixed=self._static)
        self._shares = batches if split else batches // cut
        worker.resized(cut)
        return cut

    def _agree_on_order(self, epoch: int) -> None:
        """All workers must cut the same batches, or samples are left out and others are used twice."""
        worker, prefix = self._worker, f"pass {epoch}: "
        for rank, note in worker.agree(self._topic, prefix + self.loader.order):
            if note.startswith(prefix):  # it may be in another pass
                raise Mismatch(
                    f"pass {epoch}{self._name}: workers {worker.rank} and {rank} have different data, or "
                    f"draw it in different order: {self.loader.order}, and {note.removeprefix(prefix)}. "
                    f"Give every worker the same dataset, batch_size and sampler; seed its generator alike"
                )

    def _on_first(self, batch: Any) -> None:
        """The first batch of all: workers whose batches have different keys compute different things."""
        keys = ", ".join(sorted(map(str, batch))) if isinstance(batch, Mapping) else ""
        for rank, note in self._worker.agree(self._topic + 1, keys):
            raise Mismatch(
                f"the batches{self._name} of workers {self._worker.rank} and {rank} have different keys: "
                f"{keys or 'none'}, and {note or 'none'}. Let collate_fn give the same keys on every worker"
            )

    def _lease(self, rank: int, epoch: int, want: int) -> list[tuple[int, int]]:
        return self._worker.rounds.lease(self._first + epoch, want)

    @property
    def _training(self) -> bool:
        if self._drawn == 0:  # others were faster, and took all of the pass
            return self._trains or self._worker.trains()
        return self._worker.steps_made > self._steps

    def _on_unit(self, epoch: int, unit: int, samples: int) -> None:
        worker = self._worker
        if unit != NO_UNIT:
            worker.drew(self._first + epoch, unit, samples, self.loader.global_samples)
        if samples == 0 and self._training:
            worker.abstain()
        self._drawn += 1

    def _end(self, rank: int, epoch: int) -> bool:
        """All that is this worker's, or can be leased now, is trained."""
        self._ended = epoch
        return self._finish(epoch)

    def _on_pass(self, epoch: int) -> None:
        if self._static and self._ended != epoch:  # a stream: nothing of it is in the ledger
            self._finish(epoch)
        if self._trains:  # what is only read is no epoch
            self._worker.epoch = max(self._worker.epoch, epoch + 1)

    def _on_over(self, epoch: int) -> None:
        self._worker.epoch = max(self._worker.epoch, epoch + 1)

    def _finish(self, epoch: int) -> bool:
        worker = self._worker
        if not self._training:
            worker.forget_share()
            return True
        assert worker.strategy is not None
        self._trains = True
        worker.strategy.end_pass()
        worker.finish_share()
        shares = self._shares if self._static else 0
        with worker.waiting():
            step = worker.waits.end_of_pass(self._first + epoch, f"pass {epoch}{self._name}", shares=shares)
        if step is None:
            return False
        worker.goes_on(step)
        worker.strategy.refresh()
        worker.report_pass(self._first + epoch)
        if worker.history is not None:
            worker.history.add()
        return True
