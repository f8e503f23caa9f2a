"""Optimizers that run at the servers, next to the rows. Names and defaults are those of `torch.optim`; `lr`
may be given by position.

These are settings: frozen, comparable values that cross the wire by name. The arithmetic is C++ and
equals a `torch.optim` instance that held each row alone and was stepped only when the row was touched.
`kind` and the features that decide a row's layout (`layout`) are fixed for the life of a table; all other
hyper-parameters may be changed by opening it again.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from shoal import _core
from shoal.errors import BadInput
from shoal.settings import check_number, is_number, kind_field

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

    def __str__(self) -> str:
        """For people: lr, and what differs from its default."""
        shown = (
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name == "lr" or value != getattr(type(self), name, value)
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def __post_init__(self) -> None:
        """Check every field by its type; numbers become floats."""
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is one
            name, kind, value = field.name, field.type, getattr(self, field.name)
            if kind in ("float", float):  # a class of one's own may have either
                check_number(self, name, value, low=0)
            elif kind in ("bool", bool) and not isinstance(value, bool):
                raise BadInput(f"{type(self).__name__}: {name} is {value!r}; it must be True or False")
            elif name == "betas":
                self._check_betas(value)

    def _check_betas(self, betas: Any) -> None:
        good = isinstance(betas, tuple | list) and len(betas) == 2 and all(is_number(b) for b in betas)
        if not good or not all(0 <= b < 1 for b in betas):
            raise BadInput(f"{type(self).__name__}: betas is {betas!r}; it must be two numbers in [0, 1)")
        object.__setattr__(self, "betas", (float(betas[0]), float(betas[1])))


def _core_values(optimizer: Optimizer) -> dict[str, Any]:
    values = {name: value for name, value in vars(optimizer).items() if name != "kind"}
    if "betas" in values:
        values["beta1"], values["beta2"] = values.pop("betas")
    if "initial_accumulator_value" in values:
        values["initial"] = values.pop("initial_accumulator_value")
    return values


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    >>> SGD(lr=0.1, momentum=0.9, nesterov=True).momentum
    0.9
    """

    lr: float = 1e-3
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    kind: str = kind_field("sgd")

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad with one accumulator per element, as `torch.optim.Adagrad`.

    >>> Adagrad(lr=0.05).eps
    1e-10
    """

    lr: float = 1e-2
    _: KW_ONLY
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    kind: str = kind_field("adagrad")

    def layout(self) -> tuple[str, ...]:
        return (self.kind, "lr_decay") if self.lr_decay else (self.kind,)


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row: the mean of the squared gradient. Saves nearly half the memory.

    >>> RowwiseAdagrad(lr=0.05)
    RowwiseAdagrad(lr=0.05, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10)
    """

    lr: float
    _: KW_ONLY
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    kind: str = kind_field("rowwise_adagrad")


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with coupled weight decay, as `torch.optim.Adam`. A row's step counts its own touches.

    >>> Adam(lr=0.001).betas
    (0.9, 0.999)
    """

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    kind: str = kind_field("adam")


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`. A row's step counts its own touches.

    >>> AdamW(lr=0.001).weight_decay
    0.01
    """

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    kind: str = kind_field("adamw")


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-proximal as in "Ad Click Prediction: a View from the Trenches" (2013); `lr` is its alpha.

    >>> FTRL(lr=0.1, l1=1.0).beta
    1.0
    """

    lr: float
    _: KW_ONLY
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0
    kind: str = kind_field("ftrl")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr == 0:
            raise BadInput("FTRL: lr is 0; its update divides by lr, so it must be above 0")


KINDS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": Adam,
    "adamw": AdamW,
    "ftrl": FTRL,
}
