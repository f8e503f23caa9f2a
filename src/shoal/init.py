"""First values of rows. A row's first value depends only on (seed, table name, key).

These are settings, like `shoal.optim`: frozen, comparable, carried by name. The numbers are made in C++,
the same on any server, in any order, in any run. Nothing is stored until a row is born by a push.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal import _core
from shoal.errors import BadInput
from shoal.settings import check_number, kind_field

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "Zeros"]


class Initializer:
    """What all initialisers have in common; make one of the classes below."""

    kind: str

    def to_core(self) -> _core.InitSpec:
        """The same settings as the core takes them."""
        numbers = [value for name, value in vars(self).items() if name != "kind"]
        return _core.InitSpec(self.kind, *numbers)


@dataclass(frozen=True)
class Zeros(Initializer):
    """Rows begin as zeros.

    >>> Zeros()
    Zeros()
    """

    kind: str = kind_field("zeros")


@dataclass(frozen=True)
class Constant(Initializer):
    """Rows begin with every element equal to `value`.

    >>> Constant(0.5)
    Constant(value=0.5)
    """

    value: float
    kind: str = kind_field("constant")

    def __post_init__(self) -> None:
        check_number(self, "value", self.value)


@dataclass(frozen=True, init=False)
class Uniform(Initializer):
    """Rows begin uniform in [low, high); `Uniform(a)` means [-a, a).

    >>> Uniform(0.01)
    Uniform(low=-0.01, high=0.01)
    >>> Uniform(0.0, 1.0)
    Uniform(low=0.0, high=1.0)
    """

    low: float
    high: float
    kind: str = kind_field("uniform")

    def __init__(self, low: float, high: float | None = None) -> None:
        check_number(self, "low", low)
        check_number(self, "high", low if high is None else high)
        if high is None:
            check_number(self, "low", -self.high)
        object.__setattr__(self, "kind", "uniform")
        if not self.low < self.high:
            shown = f"Uniform({low})" if high is None else f"Uniform({low}, {high})"
            raise BadInput(f"{shown}: low {self.low} must be below high {self.high}")


@dataclass(frozen=True, init=False)
class Normal(Initializer):
    """Rows begin normal around `mean` with standard deviation `std`; `Normal(s)` means mean 0, std s.

    >>> Normal(0.02)
    Normal(mean=0.0, std=0.02)
    >>> Normal(1.0, 0.5)
    Normal(mean=1.0, std=0.5)
    """

    mean: float
    std: float
    kind: str = kind_field("normal")

    def __init__(self, *numbers: float, mean: float | None = None, std: float | None = None) -> None:
        if len(numbers) == 2 and mean is None and std is None:
            mean, std = numbers
        elif len(numbers) == 1 and (mean is None or std is None):
            # One number is the deviation, unless that is named: Normal(1.0, std=0.5).
            mean, std = (mean, numbers[0]) if std is None else (numbers[0], std)
        elif numbers or std is None:
            raise BadInput("Normal takes (std), (mean, std), or them by name; std is needed")
        check_number(self, "mean", 0.0 if mean is None else mean)
        check_number(self, "std", std, low=0)
        object.__setattr__(self, "kind", "normal")


KINDS: dict[str, type[Initializer]] = {
    "zeros": Zeros,
    "constant": Constant,
    "uniform": Uniform,
    "normal": Normal,
}
