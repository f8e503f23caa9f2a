"""One run: a job under one word with one seed, and the figures that its workers' histories give."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.compare.options import Target
from shoal.train.history import Moment, history_path, read_history


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A metric of the job: seconds since training began, steps a worker by then, value."""

    seconds: float
    steps: float
    value: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to; None where that is not known, or was not reached."""

    word: str
    seed: int
    # Of the job; 124: it was stopped by --timeout.
    code: int
    # Why it failed.
    failure: str | None = None
    seconds: float = 0.0
    steps: float = 0.0
    samples_per_s: float | None = None
    staleness: float | None = None
    # The part of their time that workers waited for others.
    idle: float | None = None
    dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    # By metric. The value at a time is the mean over the workers of what each reported last.
    series: dict[str, list[Point]] = {}

    def reached(self, target: Target) -> Point | None:
        """The first point of the target's metric that is as good as the target."""
        return next(
            (point for point in self.series.get(target.metric, []) if target.reached(point.value)), None
        )

    def final(self, metric: str) -> float | None:
        """The last value of a metric."""
        points = self.series.get(metric)
        return points[-1].value if points else None


def read_run(job: Path, workers: int, *, word: str, seed: int, code: int, failure: str | None) -> Run:
    """The run whose job has the directory `job`."""
    histories = [read_history(history_path(job, rank)) for rank in range(workers)]
    known = [history for history in histories if history]
    if not known:
        return Run(word=word, seed=seed, code=code, failure=failure)
    begin = min(history[0].time for history in known)
    seconds = max(_trained_until(history) for history in known) - begin
    last = [history[-1] for history in known]
    newest = max(last, key=lambda moment: moment.pushes)
    return Run(
        word=word,
        seed=seed,
        code=code,
        failure=failure,
        seconds=seconds,
        steps=sum(moment.steps for moment in last) / workers,
        samples_per_s=sum(moment.samples for moment in last) / seconds if seconds > 0 else None,
        staleness=newest.stale / newest.pushes if newest.pushes else None,
        idle=sum(moment.waited_s for moment in last) / (seconds * workers) if seconds > 0 else None,
        dropped=sum(moment.dropped for moment in last),
        bytes_sent=sum(moment.bytes_sent for moment in last),
        bytes_received=sum(moment.bytes_received for moment in last),
        series=_series(known, workers, begin),
    )


def _trained_until(history: Sequence[Moment]) -> float:
    """When a worker had made its last step, or waited for the last time: what follows is no training."""
    end = history[-1]
    return next(m.time for m in history if m.steps == end.steps and math.isclose(m.waited_s, end.waited_s))


def _series(histories: Sequence[Sequence[Moment]], workers: int, begin: float) -> dict[str, list[Point]]:
    times = [[moment.time for moment in history] for history in histories]

    def steps_at(now: float) -> float:
        made = 0
        for history, seen in zip(histories, times, strict=True):
            at = bisect.bisect_right(seen, now)
            made += history[at - 1].steps if at else 0
        return made / workers

    reports = sorted(
        (
            (moment.time, rank, moment.metrics)
            for rank, h in enumerate(histories)
            for moment in h
            if moment.metrics
        ),
        key=lambda report: report[0],
    )
    latest: dict[str, dict[int, float]] = {}
    series: dict[str, list[Point]] = {}
    for now, rank, metrics in reports:
        for name, value in metrics.items():
            latest.setdefault(name, {})[rank] = value
            values = latest[name].values()
            point = Point(now - begin, steps_at(now), sum(values) / len(values))
            series.setdefault(name, []).append(point)
    return series
