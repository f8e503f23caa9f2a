"""Checks of a piece's numbers. A message begins with the field, so that a word can stand before it."""

from __future__ import annotations

from typing import Any

from shoal.errors import BadInput
from shoal.settings import is_number

# Steps, gradients and blocks: more than any run has, and what fits the core's numbers.
COUNT_MAX = 1_000_000_000


def check_count(name: str, value: Any, *, low: int) -> None:
    """A whole number from `low` on."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= COUNT_MAX:
        raise BadInput(f"{name} is {value!r}; it must be a whole number from {low} to {COUNT_MAX}")


def check_fraction(name: str, value: Any) -> None:
    """A number above 0 and at most 1."""
    if not is_number(value) or not 0 < value <= 1:
        raise BadInput(f"{name} is {value!r}; it must be a number above 0 and at most 1")


def check_real(name: str, value: Any, *, low: float = 0.0, below: float | None = None) -> None:
    """A finite number from `low` on, and below `below`."""
    if not is_number(value) or value < low or (below is not None and value >= below):
        limit = "" if below is None else f" and below {below:g}"
        raise BadInput(f"{name} is {value!r}; it must be a finite number, at least {low:g}{limit}")
