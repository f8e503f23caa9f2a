"""Optimizers that run at the servers, next to the rows. Names and defaults are those of `torch.optim`.

These are settings: frozen, comparable values that cross the wire by name. The arithmetic is C++ and
equals a `torch.optim` instance that held each row alone and was stepped only when the row was touched.
`kind` and the features that decide a row's layout (`layout`) are fixed for the life of a table; all other
hyper-parameters may be changed by opening it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal import _core
from shoal.errors import BadInput

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RowwiseAdagrad"]


class Optimizer:
    """What all optimizers have in common; make one of the classes below."""

    kind: str
    lr: float

    def layout(self) -> tuple[str, ...]:
        """The kind, and the features that add state to a row: these cannot change in a table's life.

        >>> SGD(lr=0.1, momentum=0.9).layout()
        ('sgd', 'momentum')
        """
        return (self.kind,)

    def to_core(self) -> _core.OptimizerSpec:
        """The same settings as the core takes them."""
        spec = _core.OptimizerSpec(self.kind)
        for name, value in _core_values(self).items():
            setattr(spec, name, value)
        return spec

    def _number(self, name: str, *, below: float = math.inf) -> None:
        """Check the field `name` and make it a float."""
        value = getattr(self, name)
        if not _is_number(value) or not 0 <= value < below:
            limit = "a finite number, at least 0" if below == math.inf else f"at least 0 and below {below:g}"
            raise BadInput(f"{type(self).__name__}: {name} is {value!r}; it must be {limit}")
        object.__setattr__(self, name, float(value))

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise BadInput(f"{type(self).__name__}: {name} is {value!r}; it must be True or False")

    def _betas(self) -> None:
        betas: Any = getattr(self, "betas")  # noqa: B009 - only some classes have it
        good = isinstance(betas, tuple | list) and len(betas) == 2 and all(_is_number(b) for b in betas)
        if not good or not all(0 <= b < 1 for b in betas):
            raise BadInput(f"{type(self).__name__}: betas is {betas!r}; it must be two numbers in [0, 1)")
        object.__setattr__(self, "betas", (float(betas[0]), float(betas[1])))


def _kind(name: str) -> Any:
    """A constant field. By a factory, so that it lies in the object and is encoded with it."""
    return field(default_factory=lambda: name, init=False, repr=False)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _core_values(optimizer: Optimizer) -> dict[str, Any]:
    values = {name: value for name, value in vars(optimizer).items() if name != "kind"}
    if "betas" in values:
        values["beta1"], values["beta2"] = values.pop("betas")
    if "initial_accumulator_value" in values:
        values["initial"] = values.pop("initial_accumulator_value")
    return values


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    >>> SGD(lr=0.1, momentum=0.9, nesterov=True).momentum
    0.9
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    kind: str = _kind("sgd")

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            self._number(name)
        self._number("dampening")
        self._flag("nesterov")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise BadInput(
                f"SGD: nesterov needs a momentum above 0 and dampening 0; "
                f"momentum is {self.momentum}, dampening is {self.dampening}"
            )

    def layout(self) -> tuple[str, ...]:
        features = ["momentum"] if self.momentum else []
        if self.momentum and self.dampening:
            features.append("dampening")
        return (self.kind, *features)


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad with one accumulator per element, as `torch.optim.Adagrad`.

    >>> Adagrad(lr=0.05).eps
    1e-10
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    kind: str = _kind("adagrad")

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            self._number(name)

    def layout(self) -> tuple[str, ...]:
        return (self.kind, "lr_decay") if self.lr_decay else (self.kind,)


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row: the mean of the squared gradient. Saves nearly half the memory.

    >>> RowwiseAdagrad(lr=0.05)
    RowwiseAdagrad(lr=0.05, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10)
    """

    lr: float
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    kind: str = _kind("rowwise_adagrad")

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "initial_accumulator_value", "eps"):
            self._number(name)


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam with coupled weight decay, as `torch.optim.Adam`. A row's step counts its own touches.

    >>> Adam(lr=0.001).betas
    (0.9, 0.999)
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: str = _kind("adam")

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            self._number(name)
        self._betas()


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`. A row's step counts its own touches.

    >>> AdamW(lr=0.001).weight_decay
    0.01
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    kind: str = _kind("adamw")

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            self._number(name)
        self._betas()


@dataclass(frozen=True, kw_only=True)
class FTRL(Optimizer):
    """FTRL-proximal as in "Ad Click Prediction: a View from the Trenches" (2013); `lr` is its alpha.

    >>> FTRL(lr=0.1, l1=1.0).beta
    1.0
    """

    lr: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0
    kind: str = _kind("ftrl")

    def __post_init__(self) -> None:
        for name in ("lr", "beta", "l1", "l2", "initial_accumulator_value"):
            self._number(name)
        if self.lr == 0:
            raise BadInput("FTRL: lr is 0; its update divides by lr, so it must be above 0")


_KINDS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": Adam,
    "adamw": AdamW,
    "ftrl": FTRL,
}


def from_plain(values: Mapping[str, Any]) -> Optimizer:
    """The optimizer that a control message or the journal describes; unknown kinds and fields are errors."""
    fields = dict(values)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadInput(f"unknown optimizer {kind!r}; known: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise BadInput(f"optimizer {kind}: {error}") from None
