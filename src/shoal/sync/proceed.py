"""When a worker may start step c. Step numbers begin with 0; a clock is the number of steps finished."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.sync.checks import check_count

# The core's number for a worker that waits for no one's clock.
UNBOUNDED = -1


class Proceed:
    """What all rules of this kind have in common; take one of the classes below."""

    @property
    def slack(self) -> int:
        """How many steps the fastest may be ahead of the slowest; `UNBOUNDED` where clocks do not count."""
        return UNBOUNDED


@dataclass(frozen=True)
class Always(Proceed):
    """At once: nobody waits for anybody."""


@dataclass(frozen=True)
class Bounded(Proceed):
    """When every worker has finished step c - bound - 1, so nobody is more than `bound` steps ahead.

    >>> Bounded(3).slack
    3
    """

    bound: int

    def __post_init__(self) -> None:
        check_count("bound", self.bound, low=0)

    @property
    def slack(self) -> int:
        return self.bound


@dataclass(frozen=True)
class Round(Proceed):
    """When the round of step c - 1 (or of the last block) is closed and its update is made."""


@dataclass(frozen=True)
class WithNeighbours(Proceed):
    """When the neighbours' models of step c - 1 are here."""
