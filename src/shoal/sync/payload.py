"""What travels, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.errors import BadInput
from shoal.sync import outer as rules
from shoal.sync.checks import check_count
from shoal.sync.outer import Outer


class Payload:
    """What all rules of this kind have in common; take one of the classes below."""


@dataclass(frozen=True)
class Gradient(Payload):
    """The gradient, every step."""


@dataclass(frozen=True)
class GradientSum(Payload):
    """The sum of the gradients of `push_every` steps; parameters come every `fetch_every`. Steps between are
    made here, with the user's optimizer.
    """

    push_every: int
    fetch_every: int

    def __post_init__(self) -> None:
        check_count("push_every", self.push_every, low=1)
        check_count("fetch_every", self.fetch_every, low=1)


@dataclass(frozen=True)
class Difference(Payload):
    """After every block of `period` steps: what the block changed, for the servers' `outer` rule.

    >>> Difference(500, rules.diloco()).outer(8).lr
    0.7
    """

    period: int
    outer: Outer

    def __post_init__(self) -> None:
        check_count("period", self.period, low=1)
        if not isinstance(self.outer, Outer):
            raise BadInput(f"outer is {self.outer!r}; it must be a shoal.sync.Outer")


@dataclass(frozen=True)
class Parameters(Payload):
    """The model itself, every `period` steps."""

    # A mean of models is an outer step of length 1 along the mean difference.
    outer: ClassVar[Outer] = rules.average()
    period: int = 1

    def __post_init__(self) -> None:
        check_count("period", self.period, low=1)
