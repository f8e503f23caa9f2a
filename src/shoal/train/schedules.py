"""Learning-rate schedulers that step with the loop, on a worker whose loop had no batch to step with.

A worker with an empty part takes part in the step, but the body of its loop, and a `scheduler.step()` in it,
does not run. A scheduler that was given to `prepare` and that has moved once with every step so far is moved
here instead, so that all workers keep one learning rate. One that moves by passes is left alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

__all__ = ["Schedules"]


class Schedules:
    """The schedulers of one worker."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()  # by id of the optimizer
        self._kept: list[tuple[Any, int]] = []  # with what its count is ahead of the steps

    def add(self, scheduler: Any) -> None:
        """Look after it, if it is one that counts its steps."""
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        known = any(scheduler is one for one, _ in self._kept)
        if not plateau and not known and isinstance(getattr(scheduler, "last_epoch", None), int):
            self._kept.append((scheduler, scheduler.last_epoch - self._steps[id(scheduler.optimizer)]))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer makes a step."""
        self._steps[id(optimizer)] += 1

    def catch_up(self) -> None:
        """The step just made had no batch."""
        for scheduler, ahead in self._kept:
            before = self._steps[id(scheduler.optimizer)] - 1
            if before > 0 and scheduler.last_epoch - ahead == before:
                scheduler.step()
