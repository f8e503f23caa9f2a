"""The journal of a single coordinator: one SQLite file in WAL mode.

`append` returns when the decisions are on the disk, all or none of them. One process at a time: a second one
that opens the same file is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.errors import BadInput, Unavailable
from shoal.fleet.decisions import Decision, decode, encode
from shoal.fleet.journal import JournalLost

_FORMAT = 1
_LOCK_WAIT_S = 5.0


class SqliteJournal:
    """The journal in the file `path`, made if it does not exist."""

    holds = True  # the file is locked while it is open

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._database = sqlite3.connect(path, timeout=_LOCK_WAIT_S, isolation_level=None)
        except sqlite3.Error as error:
            raise BadInput(f"cannot open the journal {path}: {error}") from None
        try:
            self._prepare()
        except sqlite3.OperationalError as error:
            self._database.close()
            raise Unavailable(f"the journal {path} is held by another coordinator: {error}") from None
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise BadInput(f"{path} is not a journal of Shoal: {error}") from None
        except BadInput:
            self._database.close()
            raise

    def _prepare(self) -> None:
        run = self._database.execute
        # EXCLUSIVE, set before WAL, needs no shared memory and keeps other coordinators out.
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        found = run("PRAGMA user_version").fetchone()[0]
        if found not in (0, _FORMAT):
            raise BadInput(f"the journal {self._path} has format {found}; this release reads {_FORMAT}")
        run("BEGIN EXCLUSIVE")
        run("CREATE TABLE IF NOT EXISTS decisions (key TEXT PRIMARY KEY, seq INTEGER, body BLOB)")
        run(f"PRAGMA user_version={_FORMAT}")
        self._seq: int = run("SELECT COALESCE(MAX(seq), 0) FROM decisions").fetchone()[0]
        run("COMMIT")

    def append(self, decisions: Sequence[Decision]) -> None:
        """Make the decisions durable. One of the same key as an older one replaces it."""
        if not decisions:
            return
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for decision in decisions:
                    self._seq += 1
                    row = (decision.key, self._seq, encode(decision))
                    self._database.execute(
                        "INSERT OR REPLACE INTO decisions (key, seq, body) VALUES (?, ?, ?)", row
                    )
        except (sqlite3.Error, OSError) as error:
            raise JournalLost(f"cannot write the journal {self._path}: {error}") from None

    def __iter__(self) -> Iterator[Decision]:
        """All decisions that are in force, in the order in which they were made."""
        for (body,) in self._database.execute("SELECT body FROM decisions ORDER BY seq"):
            try:
                yield decode(body)
            except msgspec.MsgspecError as error:
                raise BadInput(f"the journal {self._path} is damaged: {error}") from None

    def close(self) -> None:
        """Close the file. Twice is harmless."""
        self._database.close()
