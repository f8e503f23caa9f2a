"""Several tables at once: one pull, or one push, for all the tables of a step.

This is the one place that knows how that is done. Today each table's operation is begun before any is
waited for; a request that carries all of them to a server takes its place here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.config import check_timeout
from shoal.errors import BadInput
from shoal.store.table import Table
from shoal.store.ticket import Ticket
from shoal.types import ArrayLike

if TYPE_CHECKING:
    from shoal.store.client import Client

__all__ = [
    "ManyTicket",
    "PullItem",
    "PushItem",
    "pull_many",
    "pull_many_async",
    "push_many",
    "push_many_async",
]

PullItem: TypeAlias = tuple[Table, ArrayLike]  # and its keys
PushItem: TypeAlias = tuple[
    Table, ArrayLike, ArrayLike, float | None
]  # keys, gradients, lr (None: the table's)


class ManyTicket:
    """Operations on several tables in flight, waited for as one."""

    __slots__ = ("_tickets", "_timeout_s")

    def __init__(self, tickets: list[Ticket], timeout_s: float) -> None:
        self._tickets = tickets
        self._timeout_s = timeout_s

    def done(self) -> bool:
        """Whether `wait` returns (or raises) at once."""
        return all(ticket.done() for ticket in self._tickets)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """The results in the order of the items: rows for pulls, None for pushes. May be waited for again."""
        end = time.monotonic() + (self._timeout_s if timeout is None else check_timeout(timeout))
        return [ticket._wait(max(0.0, end - time.monotonic())) for ticket in self._tickets]


def pull_many(client: Client, items: Sequence[PullItem], timeout: float | None = None) -> list[Any]:
    """The rows of each (table, keys), in that order. A table may occur more than once.

    >>> import shoal
    >>> from shoal.store.many import pull_many
    >>> client = shoal.connect("memory://")
    >>> a, b = (client.table(name, dim=2, optimizer=shoal.optim.SGD()) for name in "ab")
    >>> [rows.shape for rows in pull_many(client, [(a, [1, 2]), (b, [3])])]
    [(2, 2), (1, 2)]
    """
    return pull_many_async(client, items, timeout).wait()


def pull_many_async(client: Client, items: Sequence[PullItem], timeout: float | None = None) -> ManyTicket:
    """Begin to pull; the ticket's `wait` gives a list of rows."""
    seconds = _check(client, [table for table, _ in items], timeout)
    return ManyTicket([table.pull_async(keys, timeout=seconds) for table, keys in items], seconds)


def push_many(client: Client, items: Sequence[PushItem], step: int = 0, timeout: float | None = None) -> None:
    """Apply the gradients of each (table, keys, grads, lr); returns when all of that is done.

    >>> import numpy as np, shoal
    >>> from shoal.store.many import push_many
    >>> client = shoal.connect("memory://")
    >>> a, b = (client.table(name, dim=2, optimizer=shoal.optim.SGD(lr=1.0)) for name in "ab")
    >>> ones = np.ones((1, 2), np.float32)
    >>> push_many(client, [(a, [1], ones, None), (b, [2], ones, 0.5)])
    >>> a.pull([1]).tolist(), b.pull([2]).tolist()
    ([[-1.0, -1.0]], [[-0.5, -0.5]])
    """
    push_many_async(client, items, step, timeout).wait()


def push_many_async(
    client: Client, items: Sequence[PushItem], step: int = 0, timeout: float | None = None
) -> ManyTicket:
    """Begin to push. The arrays may be reused as soon as this returns."""
    seconds = _check(client, [item[0] for item in items], timeout)
    tickets = [table.push_async(keys, grads, lr, step, seconds) for table, keys, grads, lr in items]
    return ManyTicket(tickets, seconds)


def _check(client: Client, tables: list[Table], timeout: float | None) -> float:
    session = client._session
    strange = [table.name for table in tables if table._session is not session]
    if strange:
        raise BadInput(
            f"tables {', '.join(map(repr, strange))} were opened by another client than {client!r}; "
            f"allowed: tables of one client"
        )
    return session.deadline(timeout)
