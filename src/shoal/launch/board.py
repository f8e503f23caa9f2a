"""What the workers of a job have reported: read from their progress files, and said in a table or a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from shoal.config import counted
from shoal.errors import BadInput
from shoal.sync.plain import from_plain
from shoal.sync.policy import Policy
from shoal.train.progress import BETWEEN_PASSES, DataUse, Progress, progress_path, read_progress

# So many columns of what workers report fit beside the rest.
_FIGURES_MAX = 3
_COLOURS = {"training": "green", BETWEEN_PASSES: "green", "waiting": "yellow", "not joined": "red"}


@dataclass
class WorkerView:
    """The last report of one worker; no report = it has not joined."""

    rank: int
    progress: Progress | None = None
    ended: bool = False
    # It was scaled away: what it trained counts, and what it said last does not.
    departed: bool = False
    overdue: bool = False
    # When its process was started: what was reported before is of one that it replaces.
    since: float = 0.0
    _seen: tuple[int, int] = (0, 0)

    @property
    def joined(self) -> bool:
        """Whether it has called `shoal.join()`."""
        return self.progress is not None and self.progress.joined >= self.since

    @property
    def left(self) -> bool:
        """Whether it has left the job in order."""
        return self.progress is not None and self.joined and self.progress.state == "ended"

    @property
    def state(self) -> str:
        """One word or two."""
        if self.ended:
            return "ended"
        if self.progress is None or not self.joined:
            return "not joined" if self.overdue else "starting"
        return self.progress.state

    @property
    def samples_per_s(self) -> float:
        """Over the last seconds; 0 while that is not known."""
        here = self.progress is not None and self.joined and not self.ended
        return self.progress.samples_per_s if self.progress is not None and here else 0.0

    def refresh(self, path: Path) -> bool:
        """Read the file if it is another one; whether it was."""
        try:
            status = path.stat()
        except OSError:
            return False
        if (seen := (status.st_mtime_ns, status.st_ino)) == self._seen:
            return False
        progress = read_progress(path)
        if progress is None:
            return False
        self._seen, self.progress = seen, progress
        return True


class Board:
    """All workers of a job."""

    def __init__(self, directory: Path, workers: int) -> None:
        self._directory = directory
        self.views = [WorkerView(rank) for rank in range(workers)]

    @staticmethod
    def of_all(directory: Path) -> Board:
        """Of all workers that have reported, also those that are gone."""
        ranks = [int(path.stem) for path in (directory / "progress").glob("*.json")]
        return Board(directory, 1 + max(ranks, default=-1))

    def grow(self, workers: int) -> None:
        """There are at least so many."""
        self.views += [WorkerView(rank) for rank in range(len(self.views), workers)]

    def refresh(self) -> bool:
        """Read what is new; whether anything is."""
        changes = [view.refresh(progress_path(self._directory, view.rank)) for view in self.views]
        return any(changes)

    def missing(self) -> list[int]:
        """The ranks that have not joined and have not ended."""
        return [view.rank for view in self.views if not view.joined and not view.ended]

    def ending_before(self, rank: int) -> list[int]:
        """The ranks that have left the job, `rank` not before them, and have not ended."""
        ending = [view for view in self.views if view.left and not view.ended and view.rank != rank]
        mine = self.views[rank]
        until = mine.progress.time if mine.progress is not None and mine.left else math.inf
        return [view.rank for view in ending if view.progress is not None and view.progress.time <= until]

    def waiting_for(self, rank: int) -> list[int]:
        """The ranks that say that they wait for `rank`."""
        return [waiting for waiting, others in self.waits().items() if rank in others]

    def waits(self) -> dict[int, list[int]]:
        """Who waits for whom. Reports are of different moments: what is newer has ended a wait that would
        otherwise go in a circle.
        """
        here = [view.progress for view in self.views if view.joined and not view.ended and view.progress]
        waits: dict[int, list[int]] = {}
        for report in sorted(here, key=lambda report: -report.time):
            waits[report.rank] = [r for r in report.waiting_for if report.rank not in _behind(r, waits)]
        return {rank: others for rank, others in sorted(waits.items()) if others}

    def waits_for_servers(self) -> dict[int, tuple[int, ...]]:
        """Which worker waits for which servers."""
        here = [view.progress for view in self.views if view.joined and not view.ended and view.progress]
        return {said.rank: said.waiting_for_servers for said in here if said.waiting_for_servers}

    @property
    def _progress(self) -> list[Progress]:
        return [view.progress for view in self.views if view.progress is not None]

    @property
    def _here(self) -> list[Progress]:
        """The reports of who is there, or was to the end: not of who left, or died and is not back."""
        here = [view for view in self.views if view.joined and not view.departed]
        return [view.progress for view in here if view.progress is not None]

    @property
    def samples(self) -> int:
        """That were trained: of passes that have ended by the ledger's word, of others by the workers'."""
        data = self.data or DataUse()
        own = 0
        for report in self._progress:
            by_pass = (*report.over.items(), *report.open.items())
            told = sum(count for epoch, count in by_pass if data.has(epoch))
            own += report.samples - report.ended - told
        return data.samples + own

    def counters(self) -> dict[str, float | int | None]:
        """The job's numbers over all workers."""
        reports, here = self._progress, self._here
        clocks = [report.clock for report in here]
        steps = [report.step for report in here]
        # Samples are counted over all lives of a rank, and so is time.
        began = min((report.began or report.joined for report in reports), default=0.0)
        seconds = max((report.time for report in reports), default=0.0) - began
        samples = self.samples
        return {
            "samples": samples,
            "samples_per_s": sum(view.samples_per_s for view in self.views),
            "samples_per_s_mean": samples / seconds if seconds > 0 else 0.0,
            "steps": sum(report.step for report in reports),
            "step_min": min(steps, default=0),
            "step_max": max(steps, default=0),
            "clock_min": min(clocks, default=0),
            "clock_max": max(clocks, default=0),
            "loss": _mean([r.loss for r in here]),
            "staleness": _mean([r.staleness for r in here]),
        }

    @property
    def policy(self) -> Policy | None:
        """How the workers synchronise, once one of them has said it."""
        with suppress(BadInput):  # of no release of ours
            return next((from_plain(said.policy) for said in self._progress if said.policy is not None), None)
        return None

    @property
    def batch(self) -> str | None:
        """How batches are handed out, once a worker has said it."""
        return next((said.batch for said in self._progress if said.batch is not None), None)

    @property
    def data(self) -> DataUse | None:
        """How the data of the passes that have ended was used, if worker 0 has said so."""
        return next((report.data for report in self._progress if report.data is not None), None)

    def line(self) -> str:
        """All of it in one line, for where there is no terminal."""
        now = self.counters()
        parts = [
            f"step {_span(now['step_min'], now['step_max'])}",
            f"{now['samples_per_s']:,.0f} samples/s",
        ]
        parts += [f"{name} {now[name]:.4g}" for name in ("loss", "staleness") if now[name] is not None]
        missing = self.missing()
        if missing:
            parts.append(f"not joined: {_called('worker', missing)}")
        parts += [f"worker {rank} waits for {whom}" for rank, whom in self._waited_for().items()]
        return ", ".join(parts)

    def figures(self) -> dict[str, float]:
        """What else the workers reported by name, accuracy and the like: the mean over them."""
        reports = [report.metrics for report in self._here]
        names = {name: None for metrics in reports for name in metrics if name != "loss"}
        means = {name: _mean([metrics.get(name) for metrics in reports]) for name in names}
        return {name: mean for name, mean in means.items() if mean is not None}

    def summary(self, seconds: float, restored: str | None = None) -> str:
        """What a job that ended well did. `restored` is the checkpoint that it went on from, if any."""
        totals = self.counters()
        if restored is not None and not totals["steps"]:
            return f"{seconds:.1f} s, nothing left to train: checkpoint {restored} has it all"
        low, high = int(totals["step_min"] or 0), int(totals["step_max"] or 0)
        steps = counted(high, "step") if low == high else f"{low:,}-{high:,} steps"
        loss = "" if totals["loss"] is None else f", loss {totals['loss']:.4g}"
        data = "" if self.data is None or not self.data.passes else f"; {self.data}"
        if empty := sum(report.empty_steps for report in self._progress):
            data += f"; {counted(empty, 'step')} of one worker counted nothing (not finite, or refused)"
        if not high and len(self.views) > 1:
            data += "; no step was made with Shoal: each worker was alone, unless model, optimizer and "
            data += "loader came from worker.prepare(model, optimizer, loader)"
        return (
            f"{seconds:.1f} s, {steps} a worker, {counted(self.samples, 'sample')}, "
            f"{totals['samples_per_s_mean']:,.0f} samples/s{loss}{data}"
        )

    def table(self) -> Table:
        """A row for each worker."""
        table = Table("worker", "state", "epoch", box=None, pad_edge=False, header_style="bold")
        figures = list(self.figures())[:_FIGURES_MAX]
        for name in ("step", "samples/s", "loss", *map(escape, figures), "staleness"):
            table.add_column(name, justify="right")
        table.add_column("waits for")
        waits = self._waited_for()
        for view in self.views:
            if view.departed:
                continue
            said = view.progress or Progress(rank=view.rank)
            colour = _COLOURS.get(view.state, "dim")
            table.add_row(
                str(view.rank),
                f"[{colour}]{view.state}[/]",
                str(said.epoch),
                f"{said.step:,}",
                f"{view.samples_per_s:,.0f}",
                _number(said.loss),
                *(_number(said.metrics.get(name)) for name in figures),
                _number(said.staleness),
                waits.get(view.rank, ""),
            )
        return table

    def _waited_for(self) -> dict[int, str]:
        """Whom each waiting worker waits for, in words."""
        workers, servers = self.waits(), self.waits_for_servers()
        said = {rank: [_called("worker", ranks)] for rank, ranks in workers.items()}
        for rank, indexes in servers.items():
            said.setdefault(rank, []).append(_called("server", indexes))
        return {rank: ", ".join(whom) for rank, whom in sorted(said.items())}


def _behind(rank: int, waits: Mapping[int, Sequence[int]]) -> set[int]:
    """Whom a worker waits for, and whom those wait for."""
    found: set[int] = set()
    ahead = [rank]
    while ahead:
        new = set(waits.get(ahead.pop(), ())) - found
        found |= new
        ahead += new
    return found


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _span(low: float | int | None, high: float | int | None) -> str:
    return f"{high:,}" if low == high else f"{low:,}-{high:,}"


def _called(role: str, numbers: Sequence[int]) -> str:
    return f"{role} {numbers[0]}" if len(numbers) == 1 else f"{role}s {', '.join(map(str, numbers))}"
