"""Several tables and tensors at once: one operation, one request to each server, whatever their number."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shoal import _core
from shoal.errors import BadInput
from shoal.store.arrays import as_floats, as_keys, as_out, is_torch, to_torch
from shoal.store.table import Table, check_lr
from shoal.store.tensor import Tensor
from shoal.types import ArrayLike, Codec

if TYPE_CHECKING:
    from shoal.store.client import Client, Session

Handle: TypeAlias = "Table | Tensor"
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
        self._started: list[tuple[list[int], list[tuple[int, ...]], _core.Ticket]] = []
        for codec in sorted({item[0]._codec for item in items}):
            chosen = [i for i, item in enumerate(items) if item[0]._codec == codec]
            asked = [_pull_item(items[i]) for i in chosen]
            try:
                ticket = self._session.core.pull_many(
                    [item for _, item in asked], codec=codec, timeout_s=seconds
                )
            except _core.CoreError as error:
                raise self._error(error, chosen) from None
            self._started.append((chosen, [shape for shape, _ in asked], ticket))

    def in_background(self) -> ManyPulls:
        """The same, carried on while nobody waits for it."""
        for _, _, ticket in self._started:
            ticket.leave()
        return self

    def wait(self) -> list[Any]:
        """What each item asked for, in their order."""
        results: list[Any] = [None] * len(self._items)
        for chosen, shapes, ticket in self._started:
            try:
                found: Any = ticket.wait(max(0.0, self._until - time.monotonic()))
            except _core.CoreError as error:
                raise self._error(error, chosen) from None
            arrays = [found] if len(chosen) == 1 else found  # the core's ticket of one item gives it alone
            for i, shape, array in zip(chosen, shapes, arrays, strict=True):
                results[i] = _result(self._items[i], shape, array)
        return results

    def _error(self, error: _core.CoreError, chosen: Sequence[int]) -> Exception:
        return self._session.error(error, _names([self._items[i][0] for i in chosen]))


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
        _push(session, chosen, codec, step, stage_rank, by_staleness, started + seconds)


def _push(
    session: Session,
    items: Sequence[PushItem],
    codec: Codec,
    step: int,
    stage_rank: int,
    by_staleness: bool,
    until: float,
) -> None:
    left = max(0.0, until - time.monotonic())
    try:
        ticket = session.core.push_many(
            [_push_item(item) for item in items],
            step=step,
            stage_rank=stage_rank,
            by_staleness=by_staleness,
            codec=codec,
            timeout_s=left,
        )
        ticket.wait(max(0.0, until - time.monotonic()))
    except _core.CoreError as error:
        raise session.error(error, _names([item[0] for item in items])) from None


def _pull_item(item: PullItem) -> tuple[tuple[int, ...], tuple[int, Any, Any]]:
    """(shape of the result, what the core takes)."""
    handle, out = item[0], item[2] if len(item) == 3 else None
    if isinstance(handle, Tensor):
        flat = None if out is None else as_out(out, handle.shape, handle._where).reshape(-1)
        return handle.shape, (handle._id, None, flat)
    keys = as_keys(item[1], handle._where)
    shape = (*keys.shape, handle.dim)
    memory = None if out is None else as_out(out, shape, handle._where).reshape(-1, handle.dim)
    return shape, (handle._id, keys.reshape(-1), memory)


def _result(item: PullItem, shape: tuple[int, ...], array: Any) -> Any:
    if len(item) == 3 and item[2] is not None:
        return item[2]
    torch = item[0]._torch if isinstance(item[0], Tensor) else is_torch(item[1])
    shaped = array.reshape(shape)
    return to_torch(shaped) if torch else shaped


def _push_item(item: PushItem) -> tuple[int, Any, Any, float]:
    handle, keys, grads, lr = item
    rate = math.nan if lr is None else check_lr(lr, handle._where)
    if isinstance(handle, Tensor):
        return handle._id, None, as_floats(grads, handle.shape, "grad", handle._where).reshape(-1), rate
    key_array = as_keys(keys, handle._where)
    rows = as_floats(grads, (*key_array.shape, handle.dim), "grads", handle._where)
    return handle._id, key_array.reshape(-1), np.reshape(rows, (-1, handle.dim)), rate


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
