"""The outer rules: what servers do with the mean difference of a block, `base - model after the block`.

Each is plain SGD in the words of `torch.optim.SGD`, so the servers' own optimizer runs it. With momentum m,
velocity v and mean difference d (v starts at 0):

    v = m * v + d;   step = v, or d + m * v with Nesterov;   centre = centre - lr * step

average      lr 1, no momentum: the centre becomes the mean of the workers' models
bmuf         lr 1, momentum 1 - 1/n unless given (Chen and Huo 2016)
diloco       lr 0.7, momentum 0.9, Nesterov

Nesterov is the paper's look-ahead, written for the looked-ahead point; fairseq's `use_nbm` adds m * v twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import BadInput
from shoal.optim import SGD
from shoal.sync.checks import check_real

# With one worker bmuf's momentum is none; the velocity must lie in the rows all the same, for more may come.
_HARDLY_ANY = 1e-30


@dataclass(frozen=True)
class Outer:
    """One outer rule; called with the number of workers it gives the servers' optimizer.

    >>> Outer(momentum=None)(4)
    SGD(lr=1.0, momentum=0.75, dampening=0.0, weight_decay=0.0, nesterov=False)
    """

    lr: float = 1.0
    # None stands for 1 - 1/n: then n workers together step as far as n blocks of one.
    momentum: float | None = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_real("lr", self.lr)
        if self.momentum is not None:
            check_real("momentum", self.momentum, below=1)
        if not isinstance(self.nesterov, bool):
            raise BadInput(f"nesterov is {self.nesterov!r}; it must be True or False")

    def __call__(self, n: int) -> SGD:
        momentum = max(1 - 1 / n, _HARDLY_ANY) if self.momentum is None else self.momentum
        # Looking ahead by 0 is not looking ahead.
        return SGD(lr=self.lr, momentum=momentum, nesterov=self.nesterov and momentum > 0)


def average() -> Outer:
    """The mean of the models."""
    return Outer()


def bmuf(momentum: float | None = None, nesterov: bool = False) -> Outer:
    """Blockwise model update filtering."""
    return Outer(momentum=momentum, nesterov=nesterov)


def diloco(lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> Outer:
    """Outer Nesterov SGD on the mean difference."""
    return Outer(lr=lr, momentum=momentum, nesterov=nesterov)
