"""By what a contribution is scaled before it makes an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.errors import BadInput
from shoal.sync.checks import check_fraction, check_real


class Scale:
    """What all rules of this kind have in common; take one of the classes below."""

    # Whether servers divide the learning rate by the staleness.
    by_staleness: ClassVar[bool] = False

    def factor(self, samples: float, global_samples: float) -> float:
        """What the worker multiplies its gradient by; `global_samples` are those of the whole batch."""
        return 1.0


@dataclass(frozen=True)
class Mean(Scale):
    """The mean over the samples of all that is taken; servers weigh when they know who is in."""


@dataclass(frozen=True)
class Share(Scale):
    """Its samples divided by those of the global batch: n workers together step as far as one process.

    >>> Share().factor(8, 32)
    0.25
    """

    def factor(self, samples: float, global_samples: float) -> float:
        return samples / global_samples if global_samples else 0.0


@dataclass(frozen=True)
class One(Scale):
    """Unscaled, as the literature has it: n workers step n times as far. Where several gradients make an
    update: their mean.
    """


@dataclass(frozen=True)
class Staleness(Scale):
    """1 / the updates since the pull, its own included. Where several gradients make an update, each by its
    own, then the mean.
    """

    by_staleness = True


@dataclass(frozen=True)
class Compensate(Scale):
    """DC-ASGD: the server adds strength * g * g * (w_now - w_pulled) to a gradient scaled by `over`.

    >>> Compensate(0.04).factor(8, 32)
    0.25
    """

    strength: float
    over: Scale = Share()

    def __post_init__(self) -> None:
        check_real("strength", self.strength)
        if not isinstance(self.over, Share | One):
            raise BadInput(f"over is {self.over!r}; it must be Share() or One()")

    def factor(self, samples: float, global_samples: float) -> float:
        return self.over.factor(samples, global_samples)


@dataclass(frozen=True)
class Elastic(Scale):
    """EASGD: worker and centre each move by alpha times their difference; None stands for 0.9 / n.

    >>> Elastic().value(n=2)
    0.45
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check_fraction("alpha", self.alpha)

    def value(self, n: int) -> float:
        """alpha for `n` workers. Above 1 / n the centre would be pulled past the mean of the workers."""
        return 0.9 / n if self.alpha is None else self.alpha
