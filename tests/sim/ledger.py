"""What the rows may show, and what they must: the judge of a simulated run.

SGD(lr=1) on rows of zeros, gradients of -1: every push has a column of its own, so a row counts how often
each push was applied to it. Then

1. an acknowledged push shows on each of its keys, exactly once, in every read begun after its ack;
2. a push is wholly visible within a shard or not at all, in every read, acknowledged or not;
3. what was read once is never unread (reads are monotone across clients);
4. nothing shows that was not begun, and never twice;
5. once a newer incarnation's session is open at a server, the older one's pushes change nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal import _core

from .plan import KEYS, Plan

Rows = NDArray[np.float32]
KEY_ARRAY = np.array(KEYS, np.int64)


class Violation(AssertionError):  # noqa: N818 - it reads as what happened
    """The system did something that no schedule allows."""


@dataclass
class Push:
    """A push that a client has begun."""

    who: int
    incarnation: int
    table: int
    column: int
    weights: Rows  # by key: how often it stands in the push
    seq: int  # of its life
    acked: bool = False


@dataclass
class Read:
    """A pull that a client has begun, with what it must at least show."""

    table: int
    keys: NDArray[np.intp]
    floor: Rows


class Ledger:
    """One run's pushes and reads."""

    def __init__(self, plan: Plan, server_of_shard: list[int]) -> None:
        self.shard_of_key = _core.protocol.key_shards(KEY_ARRAY, plan.shards).astype(np.intp)
        self.server_of_key = np.array(server_of_shard)[self.shard_of_key]
        shapes = [(len(KEYS), max(1, columns)) for columns in plan.columns]
        self._floor = [np.zeros(shape, np.float32) for shape in shapes]  # known to be applied
        self._whole = [np.zeros(shape, np.float32) for shape in shapes]  # begun, if applied wholly
        self._frozen: list[tuple[int, int, NDArray[np.bool_], Rows]] = []
        self.pushes: list[Push] = []

    def begin_push(self, push: Push) -> None:
        self.pushes.append(push)
        self._whole[push.table][:, push.column] = push.weights

    def ack(self, push: Push) -> None:
        push.acked = True
        self._floor[push.table][:, push.column] = push.weights

    def begin_read(self, table: int, keys: NDArray[np.intp]) -> Read:
        return Read(table, keys, self._floor[table][keys])

    def end_read(self, read: Read, rows: Rows) -> None:
        whole = self._whole[read.table][read.keys]
        self._require(read, (rows == 0) | (rows == whole), rows, "not applied once or not at all")
        self._require(read, rows >= read.floor, rows, "an applied push is missing")
        self._require_whole(read, rows, whole)
        np.maximum.at(self._floor[read.table], read.keys, rows)

    def _require(self, read: Read, fine: NDArray[np.bool_], rows: Rows, what: str) -> None:
        if not fine.all():
            row, column = np.argwhere(~fine)[0]
            raise Violation(
                f"table {read.table}, key {KEYS[read.keys[row]]}, push {column}: {what}; read "
                f"{rows[row, column]:g}, at least {read.floor[row, column]:g} and either 0 or "
                f"{self._whole[read.table][read.keys[row], column]:g} expected"
            )

    def _require_whole(self, read: Read, rows: Rows, whole: Rows) -> None:
        shards = self.shard_of_key[read.keys]
        for shard in set(shards.tolist()):
            applied, expected = rows[shards == shard] > 0, whole[shards == shard] > 0
            torn = applied.any(0) & (applied != expected).any(0)
            if torn.any():
                column = int(np.argmax(torn))
                raise Violation(f"table {read.table}, push {column}: half of it shows in shard {shard}")

    def freeze(self, server: int, who: int, incarnation: int, tables: list[Rows]) -> None:
        """A newer incarnation of `who` was welcomed by `server`, where `tables` is what there is now."""
        here = self.server_of_key == server
        for push in self.pushes:
            if push.who == who and push.incarnation < incarnation and not push.acked:
                now = tables[push.table][here, push.column].copy()
                self._frozen.append((push.table, push.column, here, now))

    def judge(self, tables: list[Rows]) -> None:
        """The end: every row of every table."""
        for table, rows in enumerate(tables):
            everything = np.arange(len(KEYS))
            self.end_read(self.begin_read(table, everything), rows)
        for table, column, here, before in self._frozen:
            if not np.array_equal(tables[table][here, column], before):
                raise Violation(f"table {table}, push {column}: applied after its client was fenced")
