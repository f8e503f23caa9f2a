"""First values of rows. A row's first value depends only on (seed, table name, key).

These are settings, like `shoal.optim`: frozen, comparable, carried by name. The numbers are made in C++,
the same on any server, in any order, in any run. Nothing is stored until a row is born by a push.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal import _core
from shoal.errors import BadInput

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "Zeros"]


class Initializer:
    """What all initialisers have in common; make one of the classes below."""

    kind: str

    def to_core(self) -> _core.InitSpec:
        """The same settings as the core takes them."""
        numbers = [value for name, value in vars(self).items() if name != "kind"]
        return _core.InitSpec(self.kind, *numbers)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not good:
                raise BadInput(f"{type(self).__name__}: {name} is {value!r}; it must be a finite number")
            object.__setattr__(self, name, float(value))


def _kind(name: str) -> Any:
    """A constant field. By a factory, so that it lies in the object and is encoded with it."""
    return field(default_factory=lambda: name, init=False, repr=False)


@dataclass(frozen=True)
class Zeros(Initializer):
    """Rows begin as zeros.

    >>> Zeros()
    Zeros()
    """

    kind: str = _kind("zeros")


@dataclass(frozen=True)
class Constant(Initializer):
    """Rows begin with every element equal to `value`.

    >>> Constant(0.5)
    Constant(value=0.5)
    """

    value: float
    kind: str = _kind("constant")

    def __post_init__(self) -> None:
        self._set(value=self.value)


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
    kind: str = _kind("uniform")

    def __init__(self, low: float, high: float | None = None) -> None:
        self._set(low=low, high=low if high is None else high)
        if high is None:
            self._set(low=-self.high, high=self.high)
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
    kind: str = _kind("normal")

    def __init__(self, *numbers: float, mean: float | None = None, std: float | None = None) -> None:
        if len(numbers) == 2 and mean is None and std is None:
            mean, std = numbers
        elif len(numbers) == 1 and (mean is None or std is None):
            # One number is the deviation, unless that is named: Normal(1.0, std=0.5).
            mean, std = (mean, numbers[0]) if std is None else (numbers[0], std)
        elif numbers or std is None:
            raise BadInput("Normal takes (std), (mean, std), or them by name; std is needed")
        self._set(mean=0.0 if mean is None else mean, std=0.0 if std is None else std)
        object.__setattr__(self, "kind", "normal")
        if self.std < 0:
            raise BadInput(f"Normal: std is {self.std}; it must be at least 0")


_KINDS: dict[str, type[Initializer]] = {
    "zeros": Zeros,
    "constant": Constant,
    "uniform": Uniform,
    "normal": Normal,
}


def from_plain(values: Mapping[str, Any]) -> Initializer:
    """The initialiser that a control message or the journal describes; unknown kinds are errors."""
    fields = dict(values)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadInput(f"unknown initialiser {kind!r}; known: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise BadInput(f"initialiser {kind}: {error}") from None
