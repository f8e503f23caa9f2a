"""One learning-rate scheduler: how often it has moved, and its state as values that JSON can hold, and back.

The state is what has changed since the scheduler was given to `prepare`, in it, in those that it is made of
(`SequentialLR`, `ChainedScheduler`) and in the settings of its optimizer: a chainable one computes the next
learning rate from the last, and torch's `load_state_dict` leaves the optimizer alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

_NOTHING = object()


class _EndsQuietly(torch.optim.lr_scheduler.OneCycleLR):
    """Stays where it ends. A class, not an attribute: those are in a `state_dict`."""

    def step(self, *args: Any) -> None:
        if self.last_epoch < self.total_steps:
            super().step(*args)


class KeptScheduler:
    """One that was given to `prepare`, before it moves."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.kind = type(scheduler).__name__
        # What it becomes by a metric comes of no other move.
        self._takes_metrics = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._fresh = self._plain()
        self.seen = self.count
        self.ahead = 0  # what its count is ahead of the steps of its optimizer
        self.inside = self.outside = 0  # moves within loops over loaders, and between them; of all lives
        self.rate: float | None = None  # moves within a pass for each tick of the worker's clock
        self.measured: float | None = None  # the rate in the pass that runs, so far
        self.between: int | None = None  # moves from one pass to the next that are in neither
        self.by_steps = False  # it has moved with every step

    def end_quietly(self) -> None:
        """Where data is leased a worker may make more steps than its part, and one that moves with them
        comes to its end sooner, where torch's own raises.
        """
        if type(self.scheduler) is torch.optim.lr_scheduler.OneCycleLR:
            self.scheduler.__class__ = _EndsQuietly

    @property
    def count(self) -> int:
        """Goes up by one with each move."""
        return next((one.last_epoch for one in _parts(self.scheduler) if hasattr(one, "last_epoch")), 0)

    def look(self, *, inside: bool) -> None:
        """Count what the script has moved it since the last look."""
        moved, self.seen = max(0, self.count - self.seen), self.count
        if inside:
            self.inside += moved
        else:
            self.outside += moved

    def move(self, *, inside: int = 0, outside: int = 0) -> None:
        """Instead of the script, where a move needs nothing that only the script knows."""
        if self._takes_metrics:
            return
        # One with an end (`OneCycleLR`) raises behind it: rounds that are made up for go beyond.
        with warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet
            for _ in range(inside + outside):
                self.scheduler.step()
        self.inside, self.outside = self.inside + max(0, inside), self.outside + max(0, outside)
        self.seen = self.count

    def state(self) -> dict[str, Any]:
        """As it is now."""
        changed = [
            {key: value for key, value in now.items() if value != fresh.get(key, _NOTHING)}
            for now, fresh in zip(self._plain(), self._fresh, strict=True)
        ]
        return {"inside": self.inside, "outside": self.outside, "changed": changed}

    def load(self, state: dict[str, Any]) -> None:
        """Make it what it was; what has never changed stays as the script says."""
        holders = [*(one.__dict__ for one in _parts(self.scheduler)), *self.scheduler.optimizer.param_groups]
        for holder, fresh, now, changed in zip(
            holders, self._fresh, self._plain(), state["changed"], strict=False
        ):
            for key, value in {**fresh, **changed}.items():
                if now.get(key, _NOTHING) != value:
                    _set(holder, key, value)
        self.inside, self.outside, self.seen = state["inside"], state["outside"], self.count

    def _plain(self) -> list[dict[str, Any]]:
        groups = self.scheduler.optimizer.param_groups
        found = []
        for holder in [*(one.__dict__ for one in _parts(self.scheduler)), *groups]:
            values = {key: _value(value) for key, value in holder.items() if key != "params"}
            found.append({key: value for key, value in values.items() if value is not _NOTHING})
        return found


def _parts(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for one in getattr(scheduler, "_schedulers", ()):
        yield from _parts(one)


def _value(value: Any) -> Any:
    """As JSON has it; _NOTHING if that cannot be."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        found = [_value(one) for one in value]
        return _NOTHING if any(one is _NOTHING for one in found) else found
    return value if value is None or isinstance(value, bool | int | float | str) else _NOTHING


def _set(holder: dict[str, Any], key: str, value: Any) -> None:
    before = holder.get(key)
    if isinstance(before, torch.Tensor):
        before.fill_(value)  # others hold it, too
    else:
        holder[key] = tuple(value) if isinstance(before, tuple) else value
