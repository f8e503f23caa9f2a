"""The table of a comparison: a row for each word, a column for each figure, and what the seeds show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal.compare.options import Target
from shoal.compare.run import Run
from shoal.compare.spread import Spread, differ, spread

NOT_SHOWN = "not shown"
NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Figure:
    """A column: what is taken of a run, and how it is written. Differences are ratios, or else absolute."""

    name: str
    of: Callable[[Run], float | None]
    form: Callable[[float], str]
    ratio: bool = True

    def text(self, value: float) -> str:
        """A value; one that is infinite was not reached."""
        return NOT_REACHED if math.isinf(value) else self.form(value)

    def difference(self, one: Spread, first: Spread) -> str:
        """How `one` differs from `first`, if the seeds show that it does."""
        if not differ(one, first):
            return NOT_SHOWN
        if math.isinf(one.median) or math.isinf(first.median):
            return "differs"
        if self.ratio:
            return f"x {one.median / first.median:.3g}" if first.median else "differs"
        change = one.median - first.median
        return ("+" if change >= 0 else "-") + self.form(abs(change))


def figures(runs: Sequence[Run], metric: str, target: Target | None) -> list[Figure]:
    """The columns, those left out of which nothing is known."""
    found: list[Figure] = []
    if target is not None:
        found += [
            Figure(f"seconds to {target}", lambda run: _reached(run, target, "seconds"), _number),
            Figure(f"steps a worker to {target}", lambda run: _reached(run, target, "steps"), _whole),
        ]
    found += [
        Figure(f"final {metric}", lambda run: run.final(metric), lambda value: f"{value:.4g}", ratio=False),
        Figure("seconds of training", lambda run: run.seconds or None, _number),
        Figure("samples/s", lambda run: run.samples_per_s, _whole),
        Figure("staleness", lambda run: run.staleness, lambda value: f"{value:.2f}", ratio=False),
        Figure("waiting", lambda run: run.idle, lambda value: f"{value:.0%}", ratio=False),
        Figure("sent by sockets", lambda run: float(run.bytes_sent) or None, _bytes),
        Figure("dropped", lambda run: float(run.dropped) or None, _whole, ratio=False),
    ]
    whole = [run for run in runs if run.failure is None]
    return [figure for figure in found if any(figure.of(run) is not None for run in whole)]


def _reached(run: Run, target: Target, what: str) -> float:
    point = run.reached(target)
    return math.inf if point is None else float(getattr(point, what))


def summary(runs: Sequence[Run], columns: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """By word and figure: median, least, greatest, and the difference from the first word.

    A run that failed counts in none: what it came to is no figure of the word.
    """
    whole = [run for run in runs if run.failure is None]
    spreads = {
        word: {
            figure.name: spread([figure.of(run) for run in whole if run.word == word]) for figure in columns
        }
        for word in dict.fromkeys(run.word for run in runs)
    }
    first = next(iter(spreads))
    found: dict[str, dict[str, Any]] = {}
    for word, row in spreads.items():
        found[word] = {}
        for figure in columns:
            one, base = row[figure.name], spreads[first][figure.name]
            if one is None:
                continue
            known = {"median": one.median, "low": one.low, "high": one.high, "seeds": one.count}
            difference = None if word == first or base is None else figure.difference(one, base)
            found[word][figure.name] = {**known, "difference": difference}
    return found


def table(runs: Sequence[Run], columns: Sequence[Figure]) -> Table:
    """Three lines a word: the median, the interval, and the difference from the first word."""
    shown = Table("sync", pad_edge=False, show_lines=True)
    for figure in columns:
        shown.add_column(figure.name, justify="right")
    for word, row in summary(runs, columns).items():
        cells = []
        for figure in columns:
            said = row.get(figure.name)
            cells.append(Text("") if said is None else _cell(figure, said))
        failed = sum(run.word == word and run.failure is not None for run in runs)
        name = Text(word, "bold")
        if failed:
            name.append(f"\n{failed} failed", "red")
        shown.add_row(name, *cells)
    return shown


def _cell(figure: Figure, said: dict[str, Any]) -> Text:
    cell = Text(figure.text(said["median"]))
    if said["seeds"] > 1:
        low, high = figure.text(said["low"]), figure.text(said["high"])
        cell.append(f"\n{low}" if low == high else f"\n{low} to {high}", "dim")
    if said["difference"] is not None:
        cell.append(f"\n{said['difference']}", "dim" if said["difference"] == NOT_SHOWN else "cyan")
    return cell


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
