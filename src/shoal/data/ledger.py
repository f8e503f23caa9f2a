"""Who trains which units of a pass. A static ledger is a rule; a leased one asks the job's ledger as it goes.

That a unit is done is not said here: the worker says it with the step that used it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from time import monotonic
from typing import ClassVar, Protocol, TypeAlias

from shoal.data.patience import patience_s
from shoal.data.plan import Cuts, own_units
from shoal.errors import BadInput, Internal

# begin(epoch, batches) opens a pass and says how it is cut.
Begin: TypeAlias = Callable[[int, int], Cuts]
# lease(rank, epoch, want) gives ranges [begin, end) of `want` units at most; nothing: none are left just now.
Lease: TypeAlias = Callable[[int, int, int], Sequence[tuple[int, int]]]

# However fast a step is, a worker that dies takes no more units down with it than this.
LEASE_UNITS_MAX = 4096
# A unit that takes this long, and far longer than others, is late: see `shoal.data.patience`.
LATE_S = 10.0
# A worker that has held one for this part of that time asks whether it is still its own.
_BEFORE = 0.9
_SEEN_MAX = 64
# A worker asks at least so often in a pass, or the first one to measure a fast step would take all of it.
_LEASES_A_PASS = 8


class Ledger(Protocol):
    """Hands out the units of a pass to one worker. Derive from it: all but `units` has a default."""

    # Whether units come in rising order, so that the order of samples need not be kept.
    ordered: ClassVar[bool] = False
    # Whether it knows itself what was done before a restart.
    remembers: ClassVar[bool] = False
    # Grows when all that was handed out has returned: what was drawn before is nobody's any more.
    life: int = 0
    # Units that took too long: what was leased with them is left to others.
    _late: int = 0

    # How the pass that runs is cut.
    cuts: Cuts = ()

    def begin(self, epoch: int, batches: int, workers: int) -> Cuts:
        """A pass of so many batches (0: nobody knows) begins, and is cut as it gives: for `workers` unless
        that has changed.
        """
        self.cuts = ((0, workers),)
        return self.cuts

    def units(self, epoch: int, total: int) -> Iterator[int]:
        """The units that this worker shall train, of `total`; drawn one by one, some ahead of their use."""
        ...

    def _while_held(self, units: Iterable[int]) -> Iterator[int]:
        now = (self.life, self._late)
        return takewhile(lambda _: (self.life, self._late) == now, units)

    def spent(self, seconds: float) -> None:
        """A unit took the loop this long."""
        return

    def finish(self, epoch: int) -> bool:
        """All that was handed out is trained. False: units came back from others, ask `units` again."""
        return True


class StaticLedger(Ledger):
    """Worker `rank` takes every unit u with u % n == rank: in step b all workers train batch b.

    With `end(rank, epoch)` units can come back of workers that are gone for good: those are leased.

    >>> list(StaticLedger(1, 3).units(0, 9))
    [1, 4, 7]
    """

    ordered = True

    def __init__(
        self,
        rank: int,
        n: int,
        *,
        begin: Begin | None = None,
        lease: Lease | None = None,
        end: Callable[[int, int], bool] | None = None,
    ) -> None:
        _check_rank(rank, n)
        self.rank, self.cuts = rank, ((0, n),)
        self._begin, self._lease, self._end = begin, lease, end
        self._given = -1  # the pass whose own units were given
        self._done: frozenset[int] = frozenset()  # of those of its own

    def begin(self, epoch: int, batches: int, workers: int) -> Cuts:
        if self._begin is not None:
            self.cuts = self._begin(epoch, batches)
        self._given, self._done = -1, frozenset()
        return self.cuts

    def anew(self, cuts: Cuts, done: Iterable[int]) -> None:
        """The pass is cut otherwise, or this worker was evicted, and is back: of what are its own units by
        `cuts` these are done, or others' by now.
        """
        self.cuts, self._given, self._done = cuts, -1, frozenset(done)
        self.life += 1

    def units(self, epoch: int, total: int) -> Iterator[int]:
        if self._given != epoch or self._lease is None:
            self._given = epoch
            # Who has come since the pass was cut has none of its own.
            own = own_units(self.cuts, self.rank, total)
            return self._while_held(unit for unit in own if unit not in self._done)
        ranges = self._lease(self.rank, epoch, 1)
        return self._while_held(unit for begin, end in ranges for unit in range(begin, end))

    def finish(self, epoch: int) -> bool:
        return True if self._end is None else self._end(self.rank, epoch)


class LeasedLedger(Ledger):
    """Asks `lease` for about a second of work at a time, at least one unit.

    `begin` is called before the first lease of a pass; `end(rank, epoch)` when nothing is left to lease and
    all of this worker's units are trained: it waits for the others and says whether the pass is over. Where a
    unit is late, the rest of its lease is left to others: the job's ledger gets it back at the pass's end, or
    has given it to them by then.
    """

    remembers = True

    def __init__(
        self,
        rank: int,
        n: int,
        lease: Lease,
        *,
        begin: Begin | None = None,
        end: Callable[[int, int], bool] | None = None,
        lease_s: float = 1.0,
    ) -> None:
        _check_rank(rank, n)
        self.rank, self.n = rank, n
        self._lease, self._begin, self._end = lease, begin, end
        self._lease_s = lease_s
        self._unit_s: float | None = None
        self._seen: deque[float] = deque(maxlen=_SEEN_MAX)
        self._asked: dict[int, float] = {}  # when a unit was leased that is not used yet

    def begin(self, epoch: int, batches: int, workers: int) -> Cuts:
        self.cuts = ((0, self.n),) if self._begin is None else self._begin(epoch, batches)
        self.n = self.cuts[-1][1]
        self._asked.clear()
        return self.cuts

    def units(self, epoch: int, total: int) -> Iterator[int]:
        left, life = total, self.life
        while True:
            asked = monotonic()
            ranges = self._lease(self.rank, epoch, self.want(left))
            if not ranges:
                return
            # Units go in order. Leases get short towards the end: who holds the last ones trains alone.
            left = min(left, total - max(end for _, end in ranges))
            for begin, end in ranges:
                if not 0 <= begin < end <= total:
                    raise Internal(
                        f"the ledger leased units {begin} to {end} of pass {epoch}, which has {total}"
                    )
                self._asked.update(dict.fromkeys(range(begin, end), asked))
            yield from self._while_held(unit for begin, end in ranges for unit in range(begin, end))
            if self.life != life:
                return

    def rejoined(self) -> None:
        """The worker was evicted, and is back."""
        self.life += 1

    def uses(self, unit: int, ceiling_s: float) -> bool:
        """A step is about to be made of the unit. True: it was held for so long that it may be another's by
        now. Nobody takes over anything sooner, who has waited for it longer than that.
        """
        held_s = monotonic() - self._asked.pop(unit, math.inf)
        return held_s >= _BEFORE * min(LATE_S, ceiling_s)

    def want(self, left: int) -> int:
        """How many units the next lease asks for, where so many are not handed out yet."""
        if self._unit_s is None:
            return 1
        timed = self._lease_s / max(self._unit_s, 1e-9)
        return max(1, min(int(timed), left // (_LEASES_A_PASS * self.n), LEASE_UNITS_MAX))

    def spent(self, seconds: float) -> None:
        # A moving mean over about five units: follows a change of speed, forgets a single slow step.
        self._unit_s = seconds if self._unit_s is None else 0.8 * self._unit_s + 0.2 * seconds
        self._late += seconds > self.patience_s()
        self._seen.append(seconds)

    def patience_s(self, ceiling_s: float = math.inf) -> float:
        """After how long a unit is late, by those that this worker has trained."""
        return patience_s(self._seen, LATE_S, ceiling_s)

    def finish(self, epoch: int) -> bool:
        return True if self._end is None else bool(self._end(self.rank, epoch))


def _check_rank(rank: int, n: int) -> None:
    if n < 1 or not 0 <= rank < n:
        raise BadInput(f"rank is {rank} of {n} workers; it must be from 0 to n - 1")
