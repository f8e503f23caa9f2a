"""Which number of workers a job is fastest with: `shoal run --autoscale 2:8`.

`propose` decides, from what was seen alone. A model of the job says which sizes may be better, and of which
least is known; but jobs collapse, too, where memory or a link is full, which no smooth model has in it. So
what lies between two sizes that are far apart is looked at as long as it could hold a better one, for more
workers are at most as much faster as they are more. No size above twice what was tried is tried; of sizes
that are equally fast the smallest is taken, and kept. A job that becomes another (its speed at one size
changes for long) is looked at anew. `Autoscaler` does the looking; the supervisor carries out what is
proposed, or only says it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, takewhile
from math import sqrt
from statistics import median

from shoal.config import check_count, check_duration, counted
from shoal.errors import BadInput
from shoal.launch.board import Board
from shoal.launch.throughput import Observation, fit
from shoal.sync.words import parse
from shoal.train.environment import WORKERS_MAX

# So many windows make a size known, and so many sizes are known before the model is believed.
_LOOKS, _SIZES = 2, 3
# A model that is wrong by more is not believed near the best size.
_MISFIT = 0.1
# Two known sizes are far apart where one is more than so many times the other; beside the best, so many.
_WIDE, _WIDE_BESIDE = 2.0, 1.5
# As fast with so many times fewer workers is better, too.
_FEWER = 1.25
# Expected to be better: by more than this. As fast: within this. Not to be left any more: above this.
_BETTER, _AS_FAST, _STAY, _KEEP = 1.03, 0.97, 0.95, 0.9
# The job has become another one: by so much, for so many windows.
_OTHER, _OTHER_LOOKS = 0.25, 3
_HISTORY_MAX, _STAY_MAX = 200, 10


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """The user's limits; how long a size is looked at; whether proposals are carried out."""

    low: int
    high: int
    every_s: float = 30.0
    apply: bool = False

    @staticmethod
    def parse(text: str) -> Autoscale:
        """Of a text.

        >>> Autoscale.parse("2:8,every=1m,apply")
        Autoscale(low=2, high=8, every_s=60.0, apply=True)
        """
        limits, *more = text.split(",")
        low, colon, high = limits.partition(":")
        apply = "apply" in more
        every = [part.removeprefix("every=") for part in more if part.startswith("every=")]
        plain = colon and low.isdecimal() and high.isdecimal()
        if not plain or len(every) + apply != len(more) or len(every) > 1 or int(low) > int(high):
            raise BadInput(
                f"autoscale is {text!r}; it is written LOW:HIGH workers, as in 2:8, with ,apply to carry out "
                f"what is proposed and ,every=30s for how long a size is looked at"
            )
        for name, value in (("low", low), ("high", high)):
            check_count(f"autoscale, {name}", int(value), 1, WORKERS_MAX)
        every_s = check_duration("autoscale, every", every[0]) if every else 30.0
        return Autoscale(low=int(low), high=int(high), every_s=every_s, apply=apply)


@dataclass(frozen=True)
class Proposal:
    """So many workers, and why; `settled`: to stay there, not to see how fast they are."""

    workers: int
    reason: str
    settled: bool = False


def propose(history: Sequence[Observation], limits: Autoscale) -> Proposal:
    """The size for the job of these observations, of which the last is of its present size."""
    seen = tuple(_of_this_job(history))
    now = seen[-1]
    stayed = len(list(takewhile(lambda one: _size(one) == _size(now), reversed(seen))))
    if stayed > _LOOKS:  # what was decided when it was known holds, unless it was a mistake by much
        first, known = _decide(seen[: len(seen) - stayed + _LOOKS], limits), _known(seen, limits)
        is_kept = first.settled and first.workers == now.workers
        if is_kept and known[now.workers] >= _KEEP * max(known.values()):
            return first
    return _decide(seen, limits)


@lru_cache(maxsize=8)  # the same is asked with every window of a stay
def _decide(seen: tuple[Observation, ...], limits: Autoscale) -> Proposal:
    now = seen[-1]
    looks = sum(_size(one) == _size(now) for one in seen)
    if looks < _LOOKS and limits.low <= now.workers <= limits.high:
        return Proposal(now.workers, f"{counted(now.workers, 'worker')}: still being looked at")
    known = _known(seen, limits)
    best = max(known.values(), default=0.0)
    most = max(one.workers for one in seen if one.servers == now.servers)
    sizes = range(limits.low, max(limits.low, min(limits.high, 2 * most)) + 1)
    model = fit(seen)
    expected = model.expected([size for size in sizes if size not in known], now.servers)
    size = _to_try(known, expected, model.noise)
    if size is not None:
        speed, doubt = expected[size]
        return Proposal(
            size,
            f"{speed:,.0f} samples/s are expected of {counted(size, 'worker')}, give or take {doubt:.0%}; "
            f"the most seen is {best:,.0f}",
        )
    enough = _enough(known)
    if now.workers <= enough and known.get(now.workers, 0.0) >= _STAY * best:
        enough = now.workers
    speeds = ", ".join(f"{size}: {speed:,.0f}" for size, speed in sorted(known.items()))
    reason = f"the fewest that are as fast as any: {counted(enough, 'worker')} (samples/s of {speeds})"
    return Proposal(enough, reason, settled=True)


def _size(one: Observation) -> tuple[int, int]:
    return one.workers, one.servers


def _known(seen: Sequence[Observation], limits: Autoscale) -> dict[int, float]:
    """How fast the job is with so many workers, and the servers of now."""
    speeds: dict[int, list[float]] = {}
    for one in seen:
        if one.servers == seen[-1].servers and limits.low <= one.workers <= limits.high:
            speeds.setdefault(one.workers, []).append(one.speed)
    return {size: median(values) for size, values in speeds.items()}


def _enough(known: Mapping[int, float]) -> int:
    """The smallest size that is as fast as any."""
    best = max(known.values())
    return min(size for size, speed in known.items() if speed >= _AS_FAST * best)


def _to_try(
    known: Mapping[int, float], expected: Mapping[int, tuple[float, float]], misfit: float
) -> int | None:
    """Which size to look at next, of those with what is expected of them, or None: it is settled.

    First the smallest and the largest that may be; then the middle of what is far apart and could hold a
    better one; then, if the model is good, what it expects to be better, else what is beside the best.
    """
    sizes, doubts = sorted(known), {size: doubt for size, (_, doubt) in expected.items()}
    outside = [size for size in doubts if not known or not sizes[0] < size < sizes[-1]]
    if len(known) < _SIZES:
        ends = [size for size in outside if size in (min(doubts), max(doubts))]
        return _least_known(ends or doubts, doubts)
    enough, best = _enough(known), max(known.values())
    if outside and enough == sizes[0] and min(outside) < enough:
        return min(outside)
    # Smaller ones than a size that is as fast as any may be faster; larger ones are as good at best, but for
    # those up to the next that is known.
    gaps = [
        (a, b)
        for a, b in pairwise(sizes)
        if a <= enough and a + 1 < b and known[a] / a * (b - 1) > _BETTER * best
    ]
    if wide := [(a, b) for a, b in gaps if b > a * (_WIDE_BESIDE if enough in (a, b) else _WIDE)]:
        a, b = max(wide, key=lambda gap: (gap[1] / gap[0], -gap[0]))
        return min(max(round(sqrt(a * b)), a + 1), b - 1)
    if misfit > _MISFIT:
        if outside and enough == sizes[-1] < max(outside):
            return max(outside)
        steep = [(a, b) for a, b in gaps if enough in (a, b) and min(known[a], known[b]) < _KEEP * best]
        return _least_known([(a + b) // 2 for a, b in steep], doubts)
    promising = []
    for size, (speed, doubt) in expected.items():
        below = max((a for a in sizes if a < size), default=None)
        at_most = speed * (1 + doubt) if size in outside else speed
        if below is not None:
            at_most = min(at_most, known[below] / below * size)
        if at_most > _BETTER * best or (size * _FEWER < enough and speed >= best):
            promising.append(size)
    return _least_known(promising, doubts)


def _least_known(sizes: Collection[int], doubts: Mapping[int, float]) -> int | None:
    return max(sizes, key=lambda size: (doubts[size], -size), default=None)


def _of_this_job(history: Sequence[Observation]) -> list[Observation]:
    """Without what was before the job became another: faster or slower at one size, and not for a moment."""
    kept: list[Observation] = []
    for one in history:
        kept.append(one)
        last = kept[-_OTHER_LOOKS:]
        if any(_size(o) != _size(one) for o in last):
            continue
        before = [o.speed for o in kept if _size(o) == _size(one)]
        if len(before) < _LOOKS + _OTHER_LOOKS:
            continue
        changes = [o.speed / median(before[:-_OTHER_LOOKS]) - 1 for o in last]
        if min(changes) > _OTHER or max(changes) < -_OTHER:
            kept = last
    return kept


def shortened(history: list[Observation]) -> list[Observation]:
    """Without the middle of a long stay: what was seen at other sizes is not forgotten over it."""
    last = history[-_STAY_MAX - 1 :]
    if len(last) > _STAY_MAX and len(set(map(_size, last))) == 1:
        del history[-_STAY_MAX + _LOOKS]
    return history[-_HISTORY_MAX:]


@dataclass
class _Window:
    """Since when all workers have trained at this size; what each had done then, and when it said so."""

    begin: float
    done: dict[int, tuple[float, int]]


@dataclass
class Autoscaler:
    """Looks at a job, window by window, and tells of each new proposal once. `sync` is its word, unless
    workers say another.
    """

    limits: Autoscale
    sync: str
    history: list[Observation] = field(default_factory=list)
    _size: tuple[int, tuple[float, ...]] | None = None
    _steps: list[int] = field(default_factory=list)  # of each worker when the size became this one
    _epoch: int = -1
    _window: _Window | None = None
    _said: tuple[int, bool] | None = None

    @staticmethod
    def of(limits: str, sync: str) -> Autoscaler:
        """For a job of these options."""
        return Autoscaler(Autoscale.parse(limits), sync)

    def look(self, board: Board, workers: int, servers: int, now: float) -> tuple[str, int | None] | None:
        """What to say if there is news, and the size to go on with if it is to be changed."""
        reports = [view.progress for view in board.views[:workers] if view.joined and not view.ended]
        said = [report for report in reports if report is not None]
        if len(said) < workers:
            self._size = None
            return None
        size = (servers, tuple(report.joined for report in said))
        steps = [report.step for report in said]
        if size != self._size:  # also if a worker was replaced
            # In static order fewer workers have the whole of a batch from the next pass on.
            fewer = self._size is not None and workers < len(self._size[1])
            by_pass = fewer and (board.policy or parse(self.sync)).order(workers) == "static"
            self._size, self._steps, self._window = size, steps, None
            self._epoch = max(report.epoch for report in said) if by_pass else -1
        done = {r.rank: (r.time, r.samples or r.step) for r in said}
        if self._window is None:
            new_pass = min(report.epoch for report in said) > self._epoch
            if new_pass and all(a > b for a, b in zip(steps, self._steps, strict=True)):
                self._window = _Window(now, done)
            return None
        if now < self._window.begin + self.limits.every_s:
            return None
        speed = sum(_rate(self._window.done[rank], done[rank]) for rank in done)
        self._window = _Window(now, done)
        if speed <= 0:  # nothing was trained: an evaluation, or everybody waits
            return None
        self.history = shortened([*self.history, Observation(workers, servers, speed)])
        proposal = propose(self.history, self.limits)
        if (news := (proposal.workers, proposal.settled)) in (self._said, (workers, False)):
            return None
        self._said = news
        verb = "stay with" if proposal.workers == workers else "go to"
        so_many = counted(proposal.workers, "worker")
        if not self.limits.apply:
            return f"autoscale would {verb} {so_many} (dry run): {proposal.reason}", None
        text = f"autoscale: {verb} {so_many}: {proposal.reason}"
        return text, proposal.workers if proposal.workers != workers else None


def _rate(then: tuple[float, int], now: tuple[float, int]) -> float:
    return (now[1] - then[1]) / (now[0] - then[0]) if now[0] > then[0] else 0.0
