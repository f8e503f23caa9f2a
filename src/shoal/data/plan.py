"""Units of one pass over the data: which part of which global batch a number stands for. Pure; no torch.

A global batch b is cut into n contiguous parts; part p of it is unit b * n + p. With whole batches (`each`) a
batch is a unit. The plan does not depend on who takes a unit: its samples are always the same. Where a pass
has taken in more workers, batches from there on are cut into more parts, and units go on counting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

from shoal.errors import BadInput

BatchMode: TypeAlias = Literal["split", "each"]
# (first unit, workers): from that unit on a pass is cut for so many; the first begins with unit 0.
Cuts: TypeAlias = tuple[tuple[int, int], ...]


def own_ranges(cuts: Cuts, rank: int, total: int) -> Iterator[range]:
    """The units of `rank` in static order, as a range for each time that the pass was cut."""
    ends = [first for first, _ in cuts[1:]] + [total]
    for (first, workers), end in zip(cuts, ends, strict=True):
        if rank < workers:
            yield range(first + rank, end, workers)


def own_units(cuts: Cuts, rank: int, total: int) -> Iterator[int]:
    """The units of `rank` in static order, rising.

    >>> list(own_units(((0, 2), (4, 3)), rank=1, total=10))
    [1, 3, 5, 8]
    """
    return chain.from_iterable(own_ranges(cuts, rank, total))


@dataclass(frozen=True)
class Plan:
    """How a pass is cut for `workers` workers, from batch `first` on; `before`: how it is before that.

    >>> plan = Plan(workers=3)
    >>> [plan.bounds(part, 8) for part in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    >>> plan.place(7)
    (2, 1)
    """

    workers: int
    batch: BatchMode = "split"
    first: int = 0
    before: Plan | None = None

    @classmethod
    def of(cls, cuts: Iterable[tuple[int, int]], batch: BatchMode) -> Plan:
        """The plan of a pass that is cut so.

        >>> plan = Plan.of([(0, 2), (6, 4)], "split")
        >>> plan.place(5), plan.place(6), plan.place(11), plan.units(5)
        ((2, 1), (3, 0), (4, 1), 14)
        """
        plan: Plan | None = None
        for unit, workers in cuts:
            plan = cls(workers, batch, 0 if plan is None else plan.place(unit)[0], plan)
        assert plan is not None
        return plan

    def __post_init__(self) -> None:
        if not isinstance(self.workers, int) or self.workers < 1:
            raise BadInput(f"the number of workers is {self.workers!r}; it must be at least 1")
        if self.batch not in ("split", "each"):
            raise BadInput(f"batch is {self.batch!r}; it must be 'split' or 'each'")

    @property
    def parts(self) -> int:
        """Units in a batch."""
        return self.workers if self.batch == "split" else 1

    def units(self, batches: int) -> int:
        """Units in a pass of that many batches."""
        before = 0 if self.before is None else self.before.units(self.first)
        return before + (batches - self.first) * self.parts

    def place(self, unit: int) -> tuple[int, int]:
        """The batch and the part of it that a unit is."""
        begin = self.units(self.first)
        if self.before is not None and unit < begin:
            return self.before.place(unit)
        batch, part = divmod(unit - begin, self.parts)
        return self.first + batch, part

    def at(self, batch: int) -> Plan:
        """The plan by which this batch is cut."""
        return self if self.before is None or batch >= self.first else self.before.at(batch)

    def ended(self, unit: int) -> int:
        """How many batches were begun everywhere with the step that this unit is for."""
        batch, _ = self.place(unit)
        at = self.at(batch)
        step = 1 if self.batch == "split" else at.workers
        return at.first + ((batch - at.first) // step + 1) * step

    def row(self, unit: int) -> int:
        """A number of the step that a unit is for, which rises with the steps, where batches go in turn."""
        batch, _ = self.place(unit)
        at = self.at(batch)
        return batch if self.batch == "split" else at.first + (batch - at.first) // at.workers

    def bounds(self, part: int, samples: int) -> tuple[int, int]:
        """Where a part of a batch begins and ends. Sizes differ by at most one, the larger ones first."""
        size, larger = divmod(samples, self.parts)
        begin = part * size + min(part, larger)
        return begin, begin + size + (part < larger)

    def idle(self, rank: int, batches: int) -> bool:
        """Whether batches taken in turn end so that others have one in the last step and `rank` has none."""
        return self.batch == "each" and 0 < (batches - self.first) % self.workers <= rank < self.workers
