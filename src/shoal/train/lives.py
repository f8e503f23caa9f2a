"""A worker that was evicted while it stood still, or was cut off, and wakes: it joins again, as a new life.

Nobody has its place, or it ends by `Fenced`. It does what another process in its place would do: pulls the
present parameters, takes new units and goes on in the current pass. What it had on its way is void: the batch
in the loop's hands, whose unit is another's by now, makes no step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from shoal.errors import Fenced

if TYPE_CHECKING:
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.worker")
# It may be evicted again while it comes back.
_TRIES = 10

T = TypeVar("T")


class Revoked(Exception):  # noqa: N818 - as the errors of shoal.errors
    """What a step was to be made of is another's by now: the gradient counts nowhere."""


class Lives:
    """Those of one worker. `void`: the gradient of the next step is of an earlier one, and counts nowhere."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.void = False
        self._growths = worker.rounds.growths  # that passes know of
        worker.client.on_fenced = self.rejoin

    def again(self, call: Callable[[], T]) -> T:
        """What `call()` gives, which may be asked again by a new life."""
        for _ in range(_TRIES):
            try:
                return call()
            except Fenced:
                self.rejoin()
        return call()

    def step(self, call: Callable[[], None]) -> None:
        """A part of a step, which no other life may go on with."""
        if self.void:
            return
        try:
            call()
        except Revoked as why:
            _log.warning("worker %d: %s", self._worker.rank, why)
            self._worker.lose_share()
            self.void = True
        except Fenced:
            self.rejoin()
            self.void = True

    def stepped(self) -> None:
        """An optimizer has stepped: where no loader says when the next batch begins, it begins here."""
        self.void = self.void and self._worker.draws

    def drew(self) -> None:
        """A batch of this life is in the loop's hands; what was accumulated before is of an earlier one."""
        if self.void:
            self.void = False
            for optimizer in self._worker.optimizers:
                optimizer.zero_grad()

    def follow_growth(self) -> None:
        """A step has ended, and with it a pass may have taken in workers: it hands out anew, too."""
        if self._worker.rounds.growths != self._growths:
            self._growths = self._worker.rounds.growths
            for passes in self._worker.passes:
                passes.anew()

    def rejoin(self) -> None:
        """Begin a new life; raises Fenced where that cannot be."""
        worker = self._worker
        if worker.policy.dense_home == "peers":
            raise Fenced(
                f"worker {worker.rank} was evicted: it gave no sign of life for a while. Under "
                f"{worker.policy} the model lies on the workers, who went on without it; start it again"
            )
        for left in reversed(range(_TRIES)):
            worker.client.rejoin()
            try:
                self._begin(worker)
                break
            except Fenced:
                if not left:
                    raise
        _log.warning(
            "worker %d was evicted: it gave no sign of life for a while. It has joined again, at step %d",
            worker.rank,
            worker.step,
        )

    def _begin(self, worker: Worker) -> None:
        before = worker.step
        worker.step = worker.rounds.open(**worker.policy.core_spec(worker.world_size), back=True)
        self.void = worker.draws
        # The script moves them with the void step, too.
        worker.schedules.missed(worker.step - before - self.void)
        worker.lose_share()
        self._growths = worker.rounds.growths
        for passes in worker.passes:
            passes.anew()
        if worker.strategy is not None:
            worker.strategy.rejoined()
