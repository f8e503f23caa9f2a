"""Samples of a run, what is required of them, and the table that says whether it was met.

A verdict compares medians, but for what must hold always. The spread beside each is (max - min) / median over
the repetitions.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Need:
    """Shoal's figure against the best of some peers: `factor` times better at least; None only shows them."""

    peers: tuple[str, ...]
    factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure of the table: the best of `subjects` is held against each need and against `bar`."""

    metric: str
    subjects: tuple[str, ...]
    unit: str
    scale: float = 1.0  # figures are divided by it to be shown in `unit`
    lower_is_better: bool = False
    needs: tuple[Need, ...] = ()
    bar: float | None = None  # an absolute bound, in `unit`; the verdict says whether it is kept
    always: bool = False  # by each repetition, and not by their median
    goal: str = ""
    limit: str | None = None  # the metric of the machine's bound, in the same unit as this one


@dataclass
class Book:
    """Everything measured in one run."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, metric: str, contender: str, value: float) -> None:
        self.samples.setdefault(metric, {}).setdefault(contender, []).append(value)

    def skip(self, contender: str, reason: str) -> None:
        self.skipped[contender] = reason

    def median(self, metric: str, contender: str) -> float | None:
        values = self.samples.get(metric, {}).get(contender)
        return statistics.median(values) if values else None

    def worst(self, metric: str, contender: str, lower_is_better: bool) -> float:
        return (max if lower_is_better else min)(self.samples[metric][contender])

    def spread(self, metric: str, contender: str) -> float:
        values = self.samples[metric][contender]
        middle = statistics.median(values)
        return (max(values) - min(values)) / middle if middle else 0.0

    def best(self, metric: str, names: Sequence[str], lower_is_better: bool) -> str | None:
        known = {name: value for name in names if (value := self.median(metric, name)) is not None}
        if not known:
            return None
        return (min if lower_is_better else max)(known, key=lambda name: known[name])


COLUMNS = ("workload", "Shoal", "", "peer", "", "ratio", "required", "goal", "of limit", "verdict")


def table_rows(book: Book, lines: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    """Cells per line: one row for the figure itself where it has a bar or no peer, one for each peer."""
    for line in lines:
        subject = book.best(line.metric, line.subjects, line.lower_is_better)
        ours = book.median(line.metric, subject) if subject else None
        head = (line.metric, *_figure(book, line, subject))
        tail = (line.goal, _share(book, line, subject))
        worst = book.worst(line.metric, subject, line.lower_is_better) if subject and line.always else ours
        rows = [("", "", *cells) for cells in _bar_cells(line, worst)]
        rows += [(*_figure(book, line, peer), *cells) for peer, cells in _peer_cells(book, line, ours)]
        for i, row in enumerate(rows or [("", "", "", "", "")]):
            first = head if i == 0 else ("", "", "")
            yield (*first, *row[:4], *(tail if i == 0 else ("", "")), row[4])


def _bar_cells(line: Line, ours: float | None) -> Iterator[tuple[str, str, str]]:
    if line.bar is not None:
        sign = "<=" if line.lower_is_better else ">="
        kept = ours is not None and (ours / line.scale <= line.bar) == line.lower_is_better
        always = f", at worst {ours / line.scale:.4g}" if line.always and ours is not None else ""
        yield (
            "",
            f"{sign} {line.bar:g} {line.unit}{always}",
            "-" if ours is None else ("PASS" if kept else "MISS"),
        )


def _peer_cells(
    book: Book, line: Line, ours: float | None
) -> Iterator[tuple[str | None, tuple[str, str, str]]]:
    for need in line.needs:
        judged = book.best(line.metric, need.peers, line.lower_is_better)
        for peer in need.peers:
            theirs = book.median(line.metric, peer)
            if theirs is None:
                continue  # Named below the table as skipped.
            ratio = _ratio(ours, theirs, line.lower_is_better)
            shown = "" if ratio is None else f"{ratio:.2f}x"
            if peer != judged or need.factor is None:
                yield peer, (shown, "", "")
            else:
                verdict = "-" if ratio is None else ("PASS" if ratio >= need.factor else "MISS")
                yield peer, (shown, f">= {need.factor:g}x", verdict)


def _ratio(ours: float | None, theirs: float, lower_is_better: bool) -> float | None:
    if ours is None or not ours or not theirs:
        return None
    return theirs / ours if lower_is_better else ours / theirs


def _figure(book: Book, line: Line, name: str | None) -> tuple[str, str]:
    if name is None:
        return "not run", ""
    value = book.median(line.metric, name)
    assert value is not None
    return name, f"{value / line.scale:.4g} {line.unit} ±{book.spread(line.metric, name) / 2:.0%}"


def _share(book: Book, line: Line, subject: str | None) -> str:
    if subject is None or line.limit is None:
        return ""
    ours = book.median(line.metric, subject)
    # A disk's bound is measured in the same session, where the files are.
    bound = book.median(line.limit, "machine") or book.median(line.limit, subject)
    if not ours or not bound:
        return ""
    return f"{(bound / ours if line.lower_is_better else ours / bound):.0%}"


def render(book: Book, lines: Sequence[Line]) -> str:
    """The table, the machine's limits and who was skipped, as text."""
    rows = [COLUMNS, *table_rows(book, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    text.insert(1, "-" * sum(widths, 2 * (len(widths) - 1)))
    limits = {metric: book.median(metric, "machine") for metric in book.samples if metric.startswith("limit")}
    if limits:
        text += ["", "The machine, measured in this run:"]
        text += [
            f"  {metric.removeprefix('limit ')}: {value / 1e6:,.1f} M/s"
            for metric, value in limits.items()
            if value
        ]
    text += ["", *(f"SKIPPED {name}: {reason.strip()}" for name, reason in book.skipped.items())]
    return "\n".join(text)


def counts(book: Book, lines: Sequence[Line]) -> dict[str, int]:
    verdicts = [row[-1] for row in table_rows(book, lines)]
    return {word: verdicts.count(word) for word in ("PASS", "MISS", "-")}


def as_json(book: Book, lines: Sequence[Line], environment: dict[str, Any]) -> dict[str, Any]:
    return {
        "environment": environment,
        "samples": book.samples,
        "skipped": book.skipped,
        "table": [
            dict(
                zip(
                    ("workload", "shoal", "shoal_value", "peer", "peer_value", *COLUMNS[5:]), row, strict=True
                )
            )
            for row in table_rows(book, lines)
        ],
    }
