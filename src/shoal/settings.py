"""What optimizers and initialisers share: frozen values, checked when made, that cross the wire by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar

from shoal.errors import BadInput

SettingT = TypeVar("SettingT")


def kind_field(name: str) -> Any:
    """A constant field. By a factory, so that it lies in the object and is encoded with it."""
    return field(default_factory=lambda: name, init=False, repr=False)


def is_number(value: object) -> bool:
    """Whether `value` is a finite number, which a bool never is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_number(owner: object, name: str, value: Any, *, low: float = -math.inf) -> None:
    """Set the field `name` of a frozen `owner` to `value`, as a float; it must be finite, at least `low`."""
    if not is_number(value) or value < low:
        limit = "" if low == -math.inf else f", at least {low:g}"
        raise BadInput(f"{type(owner).__name__}: {name} is {value!r}; it must be a finite number{limit}")
    object.__setattr__(owner, name, float(value))


def from_plain(what: str, kinds: Mapping[str, type[SettingT]], values: Mapping[str, Any]) -> SettingT:
    """The setting that a control message or the journal describes; unknown kinds and fields are errors."""
    fields = dict(values)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise BadInput(f"unknown {what} {kind!r}; known: {', '.join(sorted(kinds))}")
    try:
        return kinds[kind](**fields)
    except TypeError as error:
        raise BadInput(f"{what} {kind}: {error}") from None
