"""A metric against time, a line for each run and a colour for each word: in the terminal, and as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from shoal.compare.options import Target
from shoal.compare.run import Run
from shoal.errors import BadInput

_COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan", "bright_red", "white")
# The same in matplotlib's words, dark enough on white.
_INKS = ("tab:blue", "tab:red", "tab:green", "tab:purple", "tab:orange", "tab:cyan", "tab:brown", "black")
# The dots of a braille character by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_MARGIN = 9


def draw(runs: Sequence[Run], metric: str, target: Target | None, *, width: int, height: int = 16) -> Text:
    """A plot of `width` by `height` characters, with axes and a legend."""
    lines = _lines(runs, metric)
    if not lines:
        return Text(f"no {metric} to draw: none was finite")
    seconds = [x for _, points in lines for x, _ in points]
    values = [y for _, points in lines for _, y in points]
    if target is not None:
        values.append(target.value)
    left, right, low, high = 0.0, max(seconds), min(values), max(values)
    columns = max(8, width - _MARGIN - 1)
    canvas = _Canvas(columns, height, (left, right or 1.0), (low, high if high > low else low + 1.0))
    words = list(dict.fromkeys(run.word for run in runs))
    if target is not None:
        canvas.line([(left, target.value), (right, target.value)], "dim", every=3)
    for word, points in lines:
        canvas.line(points, _COLOURS[words.index(word) % len(_COLOURS)])
    shown = Text(no_wrap=True)
    for number, row in enumerate(canvas.rows()):
        label = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}.get(number, metric if number == 1 else "")
        shown.append(f"{label[:_MARGIN]:>{_MARGIN}}│").append(row).append("\n")
    shown.append(
        f"{'':>{_MARGIN}}└{'─' * columns}\n{'':>{_MARGIN}} 0{f'{right:.3g} seconds':>{columns - 1}}\n"
    )
    shown.append(" " * (_MARGIN + 1))
    for number, word in enumerate(words):
        shown.append("━━ ", _COLOURS[number % len(_COLOURS)]).append(f"{word}   ")
    return shown


def write_png(path: Path, runs: Sequence[Run], metric: str, target: Target | None) -> None:
    """The same as a picture; BadInput where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput(f"no {path.name}: matplotlib is not installed; pip install 'shoal[plot]'") from None
    figure = Figure(figsize=(7.5, 4.2), dpi=100, layout="constrained")
    axes: Any = figure.add_subplot()
    words = list(dict.fromkeys(run.word for run in runs))
    named: set[str] = set()
    for word, points in _lines(runs, metric):
        label = None if word in named else word
        named.add(word)
        ink = _INKS[words.index(word) % len(_INKS)]
        axes.plot(*zip(*points, strict=True), color=ink, linewidth=1.2, alpha=0.8, label=label)
    if target is not None:
        axes.axhline(target.value, color="grey", linestyle="--", linewidth=0.8)
    axes.set_xlabel("seconds")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.25)
    if named:
        axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))


def _lines(runs: Sequence[Run], metric: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """(word, points) of each run that has any; a value that is not finite has no place in a plot."""
    found = []
    for run in runs:
        points = [(p.seconds, p.value) for p in run.series.get(metric, []) if math.isfinite(p.value)]
        if points:
            found.append((run.word, points))
    return found


class _Canvas:
    """Characters of two by four dots each; the last colour that touches one is the whole character's."""

    def __init__(
        self, columns: int, rows: int, across: tuple[float, float], upward: tuple[float, float]
    ) -> None:
        self._cells = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]
        self._across, self._upward = across, upward

    def line(self, points: Sequence[tuple[float, float]], style: str, every: int = 1) -> None:
        """Join the points, with every so-many-th dot."""
        dots = [self._dot(point) for point in points]
        for (x0, y0), (x1, y1) in zip(dots, [*dots[1:], dots[-1]], strict=True):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(0, steps + 1, every):
                self._set(x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps), style)

    def rows(self) -> list[Text]:
        """The lines from the top."""
        return [
            Text.assemble(*((chr(_BLANK + cell), style) for cell, style in zip(cells, styles, strict=True)))
            for cells, styles in zip(self._cells, self._styles, strict=True)
        ]

    def _dot(self, point: tuple[float, float]) -> tuple[int, int]:
        (left, right), (low, high) = self._across, self._upward
        wide, tall = 2 * len(self._cells[0]) - 1, 4 * len(self._cells) - 1
        return round((point[0] - left) / (right - left) * wide), round(
            (high - point[1]) / (high - low) * tall
        )

    def _set(self, x: int, y: int, style: str) -> None:
        self._cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        self._styles[y // 4][x // 2] = style
