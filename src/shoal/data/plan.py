"""Units of one pass over the data: which part of which global batch a number stands for. Pure; no torch.

A global batch b is cut into n contiguous parts; part p of it is unit b * n + p. With whole batches (`each`) a
batch is a unit. The plan does not depend on who takes a unit: its samples are always the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from shoal.errors import BadInput

__all__ = ["BatchMode", "Done", "Plan"]

BatchMode: TypeAlias = Literal["split", "each"]


@dataclass(frozen=True)
class Plan:
    """How a pass is cut for `workers` workers.

    >>> plan = Plan(workers=3)
    >>> [plan.bounds(part, 8) for part in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    >>> plan.place(7)
    (2, 1)
    """

    workers: int
    batch: BatchMode = "split"

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
        return batches * self.parts

    def place(self, unit: int) -> tuple[int, int]:
        """The batch and the part of it that a unit is."""
        return divmod(unit, self.parts)

    def bounds(self, part: int, samples: int) -> tuple[int, int]:
        """Where a part of a batch begins and ends. Sizes differ by at most one, the larger ones first."""
        size, larger = divmod(samples, self.parts)
        begin = part * size + min(part, larger)
        return begin, begin + size + (part < larger)

    def idle(self, rank: int, batches: int) -> bool:
        """Whether batches taken in turn end so that others have one in the last step and `rank` has none."""
        return self.batch == "each" and 0 < batches % self.workers <= rank < self.workers


class Done:
    """A set of units that stays small: a worker's units are mostly every n-th one, in order."""

    def __init__(self, stride: int, units: Iterable[int] = ()) -> None:
        self._stride = stride
        # For each remainder by the stride: ranges [begin, end) of quotients, sorted and apart.
        self._ranges: dict[int, list[list[int]]] = {}
        for unit in units:
            self.add(unit)

    def add(self, unit: int) -> None:
        """Put a unit in; once is enough."""
        at, column = divmod(unit, self._stride)
        ranges = self._ranges.setdefault(column, [])
        after = bisect.bisect_right(ranges, [at, 1 << 62])
        before = ranges[after - 1] if after else None
        if before is not None and at < before[1]:
            return
        joins_next = after < len(ranges) and ranges[after][0] == at + 1
        if before is not None and before[1] == at:
            before[1] = ranges.pop(after)[1] if joins_next else at + 1
        elif joins_next:
            ranges[after][0] = at
        else:
            ranges.insert(after, [at, at + 1])

    def __contains__(self, unit: int) -> bool:
        at, column = divmod(unit, self._stride)
        ranges = self._ranges.get(column, [])
        after = bisect.bisect_right(ranges, [at, 1 << 62])
        return after > 0 and at < ranges[after - 1][1]

    def __len__(self) -> int:
        return sum(end - begin for ranges in self._ranges.values() for begin, end in ranges)

    def copy(self) -> Done:
        """A set of its own with the same units."""
        return Done.from_plain(self._stride, self.to_plain())

    def to_plain(self) -> dict[str, list[list[int]]]:
        """For JSON: ranges of quotients by remainder.

        >>> Done(2, [0, 2, 4, 1]).to_plain()
        {'0': [[0, 3]], '1': [[0, 1]]}
        """
        return {str(column): [list(pair) for pair in ranges] for column, ranges in self._ranges.items()}

    @classmethod
    def from_plain(cls, stride: int, plain: Mapping[str, Any]) -> Done:
        """What `to_plain` gave."""
        done = cls(stride)
        done._ranges = {
            int(column): [[int(begin), int(end)] for begin, end in ranges] for column, ranges in plain.items()
        }
        return done
