"""Learning-rate schedulers that step with the loop, where the loop of this worker did not run.

A worker with an empty part takes part in the step, but the body of its loop, and a `scheduler.step()` in it,
does not run. And one that replaces a worker that died has not made that one's steps. A scheduler that was
given to `prepare` and that has moved once with every step so far is moved here instead, so that all workers
keep one learning rate. One that moves by passes is left alone: the loop over passes moves it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BY_PASSES = -1


@dataclass
class _Kept:
    scheduler: Any
    first: int  # its count when it was given
    ahead: int  # what its count is ahead of the steps of this worker


class Schedules:
    """The schedulers of one worker. `before`: what `moved` gave in an earlier life of its rank."""

    def __init__(self, before: Sequence[int] = ()) -> None:
        self._before = before
        self._steps: Counter[int] = Counter()  # by id of the optimizer
        self._kept: list[_Kept] = []

    def add(self, scheduler: Any) -> None:
        """Look after it, if it is one that counts its steps."""
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        known = any(scheduler is one.scheduler for one in self._kept)
        if plateau or known or not isinstance(getattr(scheduler, "last_epoch", None), int):
            return
        first = scheduler.last_epoch
        if len(self._kept) < len(self._before):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet
                for _ in range(self._before[len(self._kept)]):
                    scheduler.step()
        ahead = scheduler.last_epoch - self._steps[id(scheduler.optimizer)]
        self._kept.append(_Kept(scheduler, first, ahead))

    def moved(self) -> tuple[int, ...]:
        """How far each has moved that moves with the steps; -1 for the others."""
        return tuple(self._moved(at, one) for at, one in enumerate(self._kept))

    def _moved(self, at: int, one: _Kept) -> int:
        steps = self._steps[id(one.scheduler.optimizer)]
        if steps < 2:  # too early to say
            return self._before[at] if at < len(self._before) else _BY_PASSES
        # Within a step it has not moved with that one yet.
        by_steps = one.scheduler.last_epoch - one.ahead in (steps, steps - 1)
        return int(one.scheduler.last_epoch - one.first) if by_steps else _BY_PASSES

    def due(self) -> list[int]:
        """What `moved` will give before the next step: a script moves them behind a step."""
        found = list(self.moved())
        for at, one in enumerate(self._kept):
            steps = self._steps[id(one.scheduler.optimizer)]
            if found[at] != _BY_PASSES:
                found[at] += steps if steps < 2 else steps - (one.scheduler.last_epoch - one.ahead)
        return found

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer makes a step."""
        self._steps[id(optimizer)] += 1

    def catch_up(self) -> None:
        """The step just made had no batch."""
        for one in self._kept:
            before = self._steps[id(one.scheduler.optimizer)] - 1
            if before > 0 and one.scheduler.last_epoch - one.ahead == before:
                one.scheduler.step()
