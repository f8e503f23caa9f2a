"""How long is too long: deadlines that follow from what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_DEVIATIONS = 8.0
_TIMES = 3.0


def mad(values: Sequence[float]) -> float:
    """The median absolute deviation: a spread that a single odd value does not change."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def patience_s(seen: Sequence[float], floor_s: float, ceiling_s: float) -> float:
    """What takes far longer than the `seen` seconds: three times their median and eight MAD, within bounds.

    >>> patience_s([2.0, 2.0, 9.0], 1.0, 100.0), patience_s([], 10.0, 100.0), patience_s([50.0], 10.0, 100.0)
    (6.0, 10.0, 100.0)
    """
    usual = _TIMES * median(seen) + _DEVIATIONS * mad(seen) if seen else 0.0
    return min(max(usual, floor_s), ceiling_s)
