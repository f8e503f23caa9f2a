"""The median and the interval of one figure over seeds, and whether two of them differ.

The interval is from the least to the greatest. Two words differ in a figure if their intervals do not touch;
else, or with one seed only, the difference is not shown. A target that was not reached is infinitely far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """One figure of one word."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """Over the seeds where the figure is known; None where it never is.

    >>> spread([3.0, 1.0, 2.5])
    Spread(median=2.5, low=1.0, high=3.0, count=3)
    >>> spread([2.0, math.inf]).median  # half of the seeds did not reach the target
    inf
    """
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def differ(one: Spread, other: Spread) -> bool:
    """Whether the seeds show a difference."""
    if min(one.count, other.count) < 2:
        return False
    return one.high < other.low or other.high < one.low
