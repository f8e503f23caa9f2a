"""A worker made slow on purpose, so that what a slow machine does to a job can be seen on an even one.

`shoal run --straggler 1:5x` makes rank 1 five times slower than it would be: before each step it sleeps four
times as long as its own computation since the last step took, and not counted is what it waited for others.
`1:50ms` sleeps that long instead, `1:50ms@20%` in a fifth of its steps, and `all:50ms@20%` makes every worker
so, each in steps of its own: a delay now and then, as machines have them that share what they run on. It
reaches the worker as SHOAL_STRAGGLER=5x.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from shoal.errors import BadInput

FACTOR_MAX = 1000.0
SLEEP_MS_MAX = 60_000.0
_ALLOWED = (
    f"a factor of 1 to {FACTOR_MAX:g}, as 5x, or 0 to {SLEEP_MS_MAX:,.0f} ms a step, as 50ms; behind it, if "
    f"not every step is to be so, how many: more than 0 and at most 100 %, as 50ms@20%"
)


class Straggler:
    """Sleeps before steps of one worker. `waited` gives the seconds that it has waited for others; in which
    steps it sleeps depends on `seed` and nothing else.

    >>> Straggler("5x").factor, Straggler("50ms").sleep_s, Straggler("50ms@20%").share
    (5.0, 0.05, 0.2)
    """

    def __init__(self, text: str, waited: Callable[[], float] = lambda: 0.0, seed: str = "") -> None:
        slowness, at, share = text.partition("@")
        number, unit = (slowness[:-2], "ms") if slowness.endswith("ms") else (slowness[:-1], slowness[-1:])
        low, high = {"x": (1.0, FACTOR_MAX), "ms": (0.0, SLEEP_MS_MAX)}.get(unit, (math.inf, 0.0))
        value = _number(number)
        self.share = _number(share.removesuffix("%")) / 100 if share.endswith("%") else math.nan
        if not at:
            self.share = 1.0
        if not low <= value <= high or not 0.0 < self.share <= 1.0:
            raise BadInput(f"straggler: {text!r} is no slowness; allowed: {_ALLOWED}")
        self.factor = value if unit == "x" else 1.0
        self.sleep_s = value / 1000 if unit == "ms" else 0.0
        self._waited = waited
        self._chance = random.Random(seed)
        self.begin()

    def begin(self) -> None:
        """What follows, up to `slow_down`, is this worker's own computation."""
        self._since, self._waited_before = time.monotonic(), self._waited()

    def slow_down(self) -> None:
        """Sleep as long as a slow machine would have computed on, if this is one of its slow steps."""
        if self._chance.random() >= self.share:
            return
        busy_s = time.monotonic() - self._since - (self._waited() - self._waited_before)
        time.sleep(max(0.0, (self.factor - 1) * busy_s + self.sleep_s))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse_stragglers(text: str, workers: int) -> dict[int, str]:
    """How slow which rank is, of a text as `1:5x`, `1:5x,3:50ms` or `all:50ms@20%`; nothing for no text.

    >>> parse_stragglers("1:5x,3:50ms", 4)
    {1: '5x', 3: '50ms'}
    """
    found: dict[int, str] = {}
    for part in text.split(",") if text else ():
        rank, colon, slowness = part.strip().partition(":")
        if not colon or not (rank.isdecimal() or rank == "all"):
            raise BadInput(
                f"straggler is {part!r}; it is written rank:slowness: 1:5x or 1:50ms, or for every rank "
                f"all:50ms@20%"
            )
        if rank != "all" and int(rank) >= workers:
            raise BadInput(
                f"straggler {part!r}: there are {workers} workers, so ranks are 0 to {workers - 1}"
            )
        Straggler(slowness)
        for each in range(workers) if rank == "all" else [int(rank)]:
            if each in found:
                raise BadInput(f"straggler: rank {each} is given twice in {text!r}")
            found[each] = slowness
    return found
