"""Several tables and tensors at once: one operation, one request to each server, whatever their number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal import _core
from shoal.errors import BadInput
from shoal.store.handle import Handle
from shoal.store.ticket import Wanted
from shoal.types import ArrayLike

if TYPE_CHECKING:
    from shoal.store.client import Client

# A table and its keys, or a tensor and None; memory for the rows may follow.
PullItem: TypeAlias = tuple[Handle, ArrayLike] | tuple[Handle, ArrayLike, ArrayLike]
# A table and its keys, or a tensor and None; gradients; lr (None: the table's own).
PushItem: TypeAlias = tuple[Handle, ArrayLike, ArrayLike, float | None]


def pull_many(client: Client, items: Sequence[PullItem], timeout: float | None = None) -> list[Any]:
    """The rows of each (table, keys) and the values of each (tensor, None), in that order.

    >>> import shoal
    >>> from shoal.store.many import pull_many
    >>> client = shoal.connect("memory://")
    >>> a, b = (client.table(name, dim=2, optimizer=shoal.optim.SGD()) for name in "ab")
    >>> [rows.shape for rows in pull_many(client, [(a, [1, 2]), (b, [3])])]
    [(2, 2), (1, 2)]
    """
    return ManyPulls(client, items, timeout).wait()


class ManyPulls:
    """A pull of several tables and tensors under way: as many operations as wire formats, mostly one."""

    def __init__(self, client: Client, items: Sequence[PullItem], timeout: float | None = None) -> None:
        self._items = items
        self._session = client._session
        seconds = _check(client, [item[0] for item in items], timeout)
        self._until = time.monotonic() + seconds
        self._started: list[tuple[list[int], list[Wanted], _core.Ticket]] = []
        for codec in sorted({item[0]._codec for item in items}):
            chosen = [i for i, item in enumerate(items) if item[0]._codec == codec]
            wanted = [items[i][0]._wanted(*items[i][1:]) for i in chosen]
            ticket = self._session.call(
                self._names(chosen),
                self._session.core.pull_many,
                [one.item for one in wanted],
                codec=codec,
                timeout_s=seconds,
            )
            self._started.append((chosen, wanted, ticket))

    def in_background(self) -> ManyPulls:
        """The same, carried on while nobody waits for it."""
        for _, _, ticket in self._started:
            ticket.leave()
        return self

    def wait(self) -> list[Any]:
        """What each item asked for, in their order."""
        results: list[Any] = [None] * len(self._items)
        for chosen, wanted, ticket in self._started:
            left = max(0.0, self._until - time.monotonic())
            found: Any = self._session.call(self._names(chosen), ticket.wait, left)
            arrays = [found] if len(chosen) == 1 else found  # the core's ticket of one item gives it alone
            for i, one, array in zip(chosen, wanted, arrays, strict=True):
                results[i] = one.result(array)
        return results

    def _names(self, chosen: Sequence[int]) -> str:
        return _names([self._items[i][0] for i in chosen])


def push_many(
    client: Client,
    items: Sequence[PushItem],
    step: int = 0,
    timeout: float | None = None,
    *,
    stage_rank: int = -1,
    by_staleness: bool = False,
) -> None:
    """Apply the gradients of each (table, keys, grads, lr) as one push; returns when all of that is done.

    With `stage_rank` they are not applied but kept for the round that takes this worker's `step`. With
    `by_staleness` servers divide the learning rate by the updates that came between the pull and this push.

    >>> import numpy as np, shoal
    >>> from shoal.store.many import push_many
    >>> client = shoal.connect("memory://")
    >>> a, b = (client.table(name, dim=2, optimizer=shoal.optim.SGD(lr=1.0)) for name in "ab")
    >>> ones = np.ones((1, 2), np.float32)
    >>> push_many(client, [(a, [1], ones, None), (b, [2], -ones, 0.5)])
    >>> a.pull([1]).tolist(), b.pull([2]).tolist()
    ([[-1.0, -1.0]], [[0.5, 0.5]])
    """
    started, session = time.monotonic(), client._session
    seconds = _check(client, [item[0] for item in items], timeout)
    for codec in sorted({item[0]._codec for item in items}):
        chosen = [item for item in items if item[0]._codec == codec]
        where = _names([item[0] for item in chosen])
        ticket = session.call(
            where,
            session.core.push_many,
            [handle._push_item(keys, grads, lr) for handle, keys, grads, lr in chosen],
            step=step,
            stage_rank=stage_rank,
            by_staleness=by_staleness,
            codec=codec,
            timeout_s=max(0.0, started + seconds - time.monotonic()),
        )
        session.call(where, ticket.wait, max(0.0, started + seconds - time.monotonic()))


def _names(handles: Sequence[Handle]) -> str:
    """For messages: the first few."""
    more = f" and {len(handles) - 3} more" if len(handles) > 3 else ""
    return ", ".join(handle._where for handle in handles[:3]) + more


def _check(client: Client, handles: Sequence[Handle], timeout: float | None) -> float:
    session = client._session
    strange = [handle.name for handle in handles if handle._session is not session]
    if strange:
        raise BadInput(
            f"tables {', '.join(map(repr, strange))} were opened by another client than {client!r}; "
            f"allowed: tables of one client"
        )
    return session.deadline(timeout)
