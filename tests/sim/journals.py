"""The coordinator's journal on a disk that fails: SQLite itself, its files and answers tampered with.

A crash leaves the log as it was before an append, with any prefix of what the append wrote, and zeros or
rubbish behind it. A disk is full, or an answer of the database is an error, before or after it did its work.
Judged: what `append` returned from is there after the next opening, a batch is there wholly or not at all,
and in the order in which it was made.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.fleet.decisions import ClientGranted, Decision
from shoal.fleet.journal import JournalLost
from shoal.fleet.sqlite_journal import SqliteJournal

from .ledger import Violation
from .plan import Action

NAMES = 12
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class JournalPlan:
    """One run. `detail`: decisions of the batch; where it is torn, or which call fails."""

    seed: int
    actions: tuple[Action, ...]


def make_journal_plan(seed: int) -> JournalPlan:
    rng = random.Random(f"journal {seed}")
    kinds = rng.choices(("append", "crash", "full", "error", "reopen"), (4, 3, 1, 2, 1), k=rng.randint(4, 12))
    details = [(rng.randint(1, 6), rng.randrange(1 << 16)) for _ in kinds]
    steps = enumerate(zip(kinds, details, strict=True))
    return JournalPlan(seed=seed, actions=tuple(Action(float(at), k, 0, d) for at, (k, d) in steps))


class _Failing:
    """A database of which one call fails: before it does anything, or after."""

    def __init__(self, database: sqlite3.Connection, call: int) -> None:
        self._database, self._left, self._after = database, call // 2, bool(call % 2)

    def execute(self, *arguments: Any) -> Any:
        return self._do(lambda: self._database.execute(*arguments))

    def __enter__(self) -> None:
        self._database.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._database.__exit__(kind, error, trace)
        else:
            self._do(lambda: self._database.__exit__(None, None, None))

    def close(self) -> None:
        self._database.close()

    def _do(self, work: Any) -> Any:
        self._left -= 1
        fails = self._left == 0
        done = None if fails and not self._after else work()
        if fails:
            raise sqlite3.OperationalError("disk I/O error")
        return done


class JournalWorld:
    """One run."""

    def __init__(self, plan: JournalPlan, directory: Path) -> None:
        self._plan = plan
        self._rng = random.Random(f"decisions {plan.seed}")
        self._directory = directory
        self._path = directory / "0" / "journal.db"
        self._path.parent.mkdir()
        self._journal = SqliteJournal(self._path)
        self._kept: list[Decision] = []
        self.torn = self.refused = 0

    def run(self) -> tuple[int, int]:
        """How often it was torn, and an append was refused. Raises Violation."""
        for action in self._plan.actions:
            count, at = action.detail
            before, batch = self._kept, [self._decision() for _ in range(count)]
            if action.kind == "full":
                batch.append(ClientGranted(name="large" * (1 << at % 12), client_id=1, incarnation=1))
            after = _with(before, batch)
            if action.kind == "reopen":
                self._open(before)
            elif action.kind == "crash":
                self._crash(batch, at, before, after)
            elif self._append(batch, action.kind, at):
                self._kept = after
            else:
                self.refused += 1
                self._open(before, after)
        self._open(self._kept)
        self._journal.close()
        return self.torn, self.refused

    def _decision(self) -> Decision:
        name = f"w{self._rng.randrange(NAMES)}"
        return ClientGranted(name=name, client_id=self._rng.randrange(1 << 30), incarnation=1)

    def _append(self, batch: list[Decision], kind: str, at: int) -> bool:
        journal: Any = self._journal
        if kind == "full":
            [pages] = journal._database.execute("PRAGMA page_count").fetchone()
            journal._database.execute(f"PRAGMA max_page_count={pages}")
        elif kind == "error":
            journal._database = _Failing(journal._database, 2 + at % (2 * len(batch) + 6))
        try:
            journal.append(batch)
        except JournalLost:
            return False
        finally:
            if isinstance(journal._database, _Failing):
                journal._database = journal._database._database
        return True

    def _crash(self, batch: list[Decision], at: int, before: list[Decision], after: list[Decision]) -> None:
        log = self._path.with_name(self._path.name + "-wal")
        old_log, old = log.read_bytes() if log.exists() else b"", self._path.read_bytes()
        self._journal.append(batch)
        new_log, rng = log.read_bytes(), random.Random(at)
        self._path = self._directory / f"{self._path.parent.name}1" / "journal.db"
        self._path.parent.mkdir()
        if new_log[: len(old_log)] != old_log:  # begun anew: as it was, then
            new_log = old_log
        written = rng.randint(len(old_log), len(new_log))
        rubbish = rng.choice((b"", bytes(len(new_log) - written), rng.randbytes(len(new_log) - written)))
        self._path.write_bytes(old)
        self._path.with_name(log.name).write_bytes(new_log[:written] + rubbish)
        self.torn += 1
        self._open(before, after)

    def _open(self, *allowed: list[Decision]) -> None:
        self._journal.close()
        self._journal = SqliteJournal(self._path)
        found = list(self._journal)
        if found not in allowed:
            said = " or ".join(_show(each) for each in allowed)
            raise Violation(f"the journal has {_show(found)}; it must have {said}")
        self._kept = found


def _show(decisions: list[Any]) -> str:
    return f"[{', '.join(f'{one.name[:8]}={one.client_id}' for one in decisions)}]"


def _with(kept: list[Decision], batch: list[Decision]) -> list[Decision]:
    """Decisions in force, in order: one replaces the older one of its key."""
    found: dict[Any, Decision] = {}
    for decision in [*kept, *batch]:
        found.pop(decision.key, None)
        found[decision.key] = decision
    return list(found.values())


def run_journal_plan(plan: JournalPlan) -> tuple[int, int]:
    directory = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        return JournalWorld(plan, directory).run()
    finally:
        shutil.rmtree(directory)
