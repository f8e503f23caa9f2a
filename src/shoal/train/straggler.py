"""A worker made slow on purpose, so that what a slow machine does to a job can be seen on an even one.

`shoal run --straggler 1:5x` makes rank 1 five times slower than it would be: before each step it sleeps four
times as long as its own computation since the last step took, and not counted is what it waited for others.
`1:50ms` sleeps that long instead. It reaches the worker as SHOAL_STRAGGLER=5x.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from shoal.errors import BadInput

FACTOR_MAX = 1000.0
SLEEP_MS_MAX = 60_000.0
_ALLOWED = f"a factor of 1 to {FACTOR_MAX:g}, as 5x, or 0 to {SLEEP_MS_MAX:,.0f} ms a step, as 50ms"


class Straggler:
    """Sleeps before each step of one worker. `waited` gives the seconds that it has waited for others.

    >>> Straggler("5x").factor, Straggler("50ms").sleep_s
    (5.0, 0.05)
    """

    def __init__(self, text: str, waited: Callable[[], float] = lambda: 0.0) -> None:
        number, unit = (text[:-2], "ms") if text.endswith("ms") else (text[:-1], text[-1:])
        low, high = {"x": (1.0, FACTOR_MAX), "ms": (0.0, SLEEP_MS_MAX)}.get(unit, (math.inf, 0.0))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise BadInput(f"straggler: {text!r} is no slowness; allowed: {_ALLOWED}")
        self.factor = value if unit == "x" else 1.0
        self.sleep_s = value / 1000 if unit == "ms" else 0.0
        self._waited = waited
        self.begin()

    def begin(self) -> None:
        """What follows, up to `slow_down`, is this worker's own computation."""
        self._since, self._waited_before = time.monotonic(), self._waited()

    def slow_down(self) -> None:
        """Sleep as long as a slow machine would have computed on."""
        busy_s = time.monotonic() - self._since - (self._waited() - self._waited_before)
        time.sleep(max(0.0, (self.factor - 1) * busy_s + self.sleep_s))


def parse_stragglers(text: str, workers: int) -> dict[int, str]:
    """How slow which rank is, of a text as `1:5x` or `1:5x,3:50ms`; nothing for an empty text.

    >>> parse_stragglers("1:5x,3:50ms", 4)
    {1: '5x', 3: '50ms'}
    """
    found: dict[int, str] = {}
    for part in text.split(",") if text else ():
        rank, colon, slowness = part.strip().partition(":")
        if not colon or not rank.isdecimal():
            raise BadInput(f"straggler is {part!r}; it is written rank:slowness: 1:5x or 1:50ms")
        if int(rank) >= workers:
            raise BadInput(
                f"straggler {part!r}: there are {workers} workers, so ranks are 0 to {workers - 1}"
            )
        if int(rank) in found:
            raise BadInput(f"straggler: rank {rank} is given twice in {text!r}")
        Straggler(slowness)
        found[int(rank)] = slowness
    return found
