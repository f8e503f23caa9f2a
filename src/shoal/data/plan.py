"""Units of one pass over the data: which part of which global batch a number stands for. Pure; no torch.

A global batch b is cut into n contiguous parts; part p of it is unit b * n + p. With whole batches (`each`) a
batch is a unit. The plan does not depend on who takes a unit: its samples are always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.errors import BadInput

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
