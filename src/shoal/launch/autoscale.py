"""Which number of workers a job is fastest with: `shoal run --autoscale 2:8`.

`propose` decides, from what was seen alone: it tries sizes that may be better and of which least is known,
none above twice what was tried, until no other can be expected to be better; of sizes that are equally fast
it takes the smallest, and stays. A job that becomes another (its speed at one size changes for long) is
looked at anew. `Autoscaler` does the looking; the supervisor carries out what is proposed, or only says it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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
# Expected to be better: by more than this, within the model's doubt. As fast: within this.
_BETTER, _AS_FAST, _STAY = 1.05, 0.97, 0.95
# The job has become another one: by so much, for so many windows.
_OTHER, _OTHER_LOOKS = 0.25, 3
_HISTORY_MAX = 200


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
    seen = _of_this_job(history)
    now = seen[-1]
    speeds: dict[int, list[float]] = {}
    for one in seen:
        if one.servers == now.servers:
            speeds.setdefault(one.workers, []).append(one.speed)
    if len(speeds[now.workers]) < _LOOKS and limits.low <= now.workers <= limits.high:
        return Proposal(now.workers, f"{counted(now.workers, 'worker')}: still being looked at")
    known = {size: median(values) for size, values in speeds.items() if limits.low <= size <= limits.high}
    best = max(known.values(), default=0.0)
    model = fit(seen)
    unknown = set(range(limits.low, max(limits.low, min(limits.high, 2 * max(speeds))) + 1)) - known.keys()
    expected = {size: (model.speed(size, now.servers), model.doubt(size, now.servers)) for size in unknown}
    promising = [size for size, (speed, doubt) in expected.items() if speed * (1 + doubt) > best * _BETTER]
    if len(known) < _SIZES:
        promising = list(unknown)
    elif not promising and model.noise > _MISFIT:
        promising = _beside(max(known, key=lambda size: known[size]), known.keys(), unknown)
    if promising:
        size = max(promising, key=lambda size: (expected[size][1], -size))
        speed, doubt = expected[size]
        return Proposal(
            size,
            f"{speed:,.0f} samples/s are expected of {counted(size, 'worker')}, give or take {doubt:.0%}; "
            f"the most seen is {best:,.0f}",
        )
    enough = min(size for size, speed in known.items() if speed >= _AS_FAST * best)
    if now.workers <= enough and known.get(now.workers, 0.0) >= _STAY * best:
        enough = now.workers
    sizes = ", ".join(f"{size}: {speed:,.0f}" for size, speed in sorted(known.items()))
    reason = f"the fewest that are as fast as any: {counted(enough, 'worker')} (samples/s of {sizes})"
    return Proposal(enough, reason, settled=True)


def _beside(best: int, known: Collection[int], unknown: Collection[int]) -> list[int]:
    """The middles between the best size and its known neighbours, which the model may be wrong about."""
    above = min((size for size in known if size > best), default=best)
    below = max((size for size in known if size < best), default=best)
    return [middle for middle in ((best + above) // 2, (best + below + 1) // 2) if middle in unknown]


def _of_this_job(history: Sequence[Observation]) -> list[Observation]:
    """Without what was before the job became another: faster or slower at one size, and not for a moment."""
    kept: list[Observation] = []
    for one in history:
        kept.append(one)
        last = kept[-_OTHER_LOOKS:]
        if any((o.workers, o.servers) != (one.workers, one.servers) for o in last):
            continue
        before = [o.speed for o in kept if (o.workers, o.servers) == (one.workers, one.servers)]
        if len(before) < _LOOKS + _OTHER_LOOKS:
            continue
        changes = [o.speed / median(before[:-_OTHER_LOOKS]) - 1 for o in last]
        if min(changes) > _OTHER or max(changes) < -_OTHER:
            kept = last
    return kept


@dataclass
class _Window:
    """Since when all workers have trained at this size; what each had done then, and when it said so."""

    begin: float
    done: dict[int, tuple[float, int]]


@dataclass
class Autoscaler:
    """Looks at a job of a sync word, window by window, and tells of each new proposal once."""

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
            by_pass = fewer and parse(self.sync).order(workers) == "static"
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
        self.history = [*self.history, Observation(workers, servers, speed)][-_HISTORY_MAX:]
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
