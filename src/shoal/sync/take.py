"""Which contributions make an update. A contribution is all that one worker sends for one step or block."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.sync.checks import check_count, check_fraction


class Take:
    """What all rules of this kind have in common; take one of the classes below."""

    def core(self, n: int) -> tuple[str, int, int]:
        """The core's (take, quorum, count) for `n` workers; those that do not matter are in range."""
        return "each", n, 1


@dataclass(frozen=True)
class Each(Take):
    """Each by itself, as it comes."""


@dataclass(frozen=True)
class All(Take):
    """Those of all workers for the same step: a round.

    >>> All().core(4)
    ('round', 4, 1)
    """

    def core(self, n: int) -> tuple[str, int, int]:
        return "round", n, 1


@dataclass(frozen=True)
class First(Take):
    """The first ceil(share * n) of a round; later ones are dropped whole and counted.

    >>> First(0.75).core(4)
    ('round', 3, 1)
    """

    share: float

    def __post_init__(self) -> None:
        check_fraction("share", self.share)

    def core(self, n: int) -> tuple[str, int, int]:
        # 0.7 * 10 is a little more than 7 in floats, and ceil would make 8 of it.
        return "round", max(1, math.ceil(self.share * n - 1e-9)), 1


@dataclass(frozen=True)
class Every(Take):
    """The next `count`, of whichever workers and steps.

    >>> Every(1).core(4) == Each().core(4)
    True
    """

    count: int

    def __post_init__(self) -> None:
        check_count("count", self.count, low=1)

    def core(self, n: int) -> tuple[str, int, int]:
        return ("each", n, 1) if self.count == 1 else ("count", n, self.count)


@dataclass(frozen=True)
class Neighbours(Take):
    """One's own and those of the neighbours on a ring, by the weights of `mixing`."""
