"""`shoal compare`: runs the comparison and shows it. The figures are `shoal.compare`'s."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from shoal.compare.options import RESULTS, CompareOptions, Target
from shoal.compare.plot import draw, write_png
from shoal.compare.run import Run
from shoal.compare.runner import Stopped, run_all
from shoal.compare.table import figures, summary, table
from shoal.config import counted
from shoal.errors import BadInput

_CODE_FAILED, _CODE_MISUSE = 1, 2
# Where there is no terminal; the table of all figures needs about that.
_WIDTH = 180
_PLOT_WIDTH_MAX = 100


def compare(
    *, command: Sequence[str], target: str | None, out: Path | None, json: Path | None, **options: Any
) -> int:
    """Compare and show; the exit code: 0, 1 if a run failed, 2 if nothing could be compared."""
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        stem = Path(command[-1] if list(command[:1]) == ["-m"] else command[0] if command else "").stem
        directory = out or Path(f"compare-{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        wanted = None if target is None else Target.parse(target)
        checked = CompareOptions(command=tuple(command), target=wanted, directory=directory, **options)
        _make_room(directory, json)
        runs = _run(checked, notes)
        return _show(checked, runs, json, notes)
    except BadInput as error:
        notes.print("error:", str(error), markup=False)
        return _CODE_MISUSE
    except Stopped as stopped:
        notes.print(f"stopped; what the finished runs did is in {directory}", markup=False)
        return stopped.code


def _make_room(directory: Path, json: Path | None) -> None:
    """Before hours of running, not after: is there a place for what comes of it?"""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if json is not None:
            json.touch()
    except OSError as error:
        raise BadInput(f"cannot write {error.filename}: {error.strerror}") from None


def _run(options: CompareOptions, notes: Console) -> list[Run]:
    total = options.seeds * len(options.words)
    runs: list[Run] = []
    for run in run_all(options):
        runs.append(run)
        head = f"[{len(runs)}/{total}] {run.word}, seed {run.seed}:"
        if run.failure is not None:
            notes.print(head, run.failure, style="red", markup=False)
            continue
        late = ", stopped by --timeout" if run.code else ""
        metric = _metric(options, runs)
        final = run.final(metric)
        said = f"no {metric}" if final is None else f"{metric} {final:.4g}"
        notes.print(f"{head} {run.seconds:.1f} s, {said}{late}", markup=False)
    return runs


def _metric(options: CompareOptions, runs: list[Run]) -> str:
    """What is plotted: the target's, else the loss, else what is first by name."""
    reported = sorted({name for run in runs for name in run.series})
    if options.target is not None:
        return options.target.metric
    return "loss" if "loss" in reported else reported[0]


def _show(options: CompareOptions, runs: list[Run], json: Path | None, notes: Console) -> int:
    metric = _metric(options, runs)
    columns = figures(runs, metric, options.target)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(table(runs, columns))
    seeds = counted(options.seeds, "seed")
    seeds = f"median of {seeds}, least to greatest, difference from {options.words[0]}"
    why = "the intervals overlap" if options.seeds > 1 else "one seed shows none"
    console.print(f"{seeds}; 'not shown': {why}", style="dim", markup=False)
    console.print(draw(runs, metric, options.target, width=min(console.width, _PLOT_WIDTH_MAX)))
    for word in _alike(runs, metric):
        notes.print(
            f"{word} ended with the same {metric} for every seed: does the script use worker.seed, or "
            "{seed} in its arguments?",
            style="yellow",
            markup=False,
        )
    results = _results(options, runs, summary(runs, columns))
    for path in (options.directory / RESULTS, *([json] if json is not None else [])):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    try:
        write_png(options.directory / "compare.png", runs, metric, options.target)
    except BadInput as error:
        notes.print(str(error), style="yellow", markup=False)
    notes.print(f"results.json, the plot and the logs are in {options.directory}", markup=False)
    return _CODE_FAILED if any(run.failure is not None for run in runs) else 0


def _alike(runs: list[Run], metric: str) -> list[str]:
    """The words that ended alike with every seed."""
    finals: dict[str, list[float | None]] = {}
    for run in (run for run in runs if run.failure is None):
        finals.setdefault(run.word, []).append(run.final(metric))
    return [word for word, values in finals.items() if len(values) > 1 and len(set(values)) == 1]


def _results(options: CompareOptions, runs: list[Run], words: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": options.command,
        "workers": options.workers,
        "servers": options.servers,
        "batch": options.batch,
        "straggler": options.straggler or None,
        "target": None if options.target is None else str(options.target),
        "words": words,
        "runs": runs,
    }
