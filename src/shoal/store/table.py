"""Tables: rows of floats by 64-bit key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import BadInput
from shoal.init import Initializer
from shoal.placement import Range
from shoal.store.arrays import as_floats, as_keys, as_out, is_torch
from shoal.store.catalogue import TableEntry
from shoal.store.handle import Handle
from shoal.store.ticket import Ticket, Wanted
from shoal.types import ArrayLike, Codec, FloatRows, KeyArray

if TYPE_CHECKING:
    from shoal.store.client import Session


class Table(Handle):
    """Rows of `dim` floats by 64-bit key, with their optimizer, held by the servers.

    Made by `Client.table`. Keys are int64, int32 or uint64 (the same bits), of any shape: a NumPy array,
    a torch tensor or a list. torch in gives torch out. Safe from many threads; the GIL is released while
    a call waits. A push that has returned is applied exactly once, whatever was retried.

    >>> import numpy as np, shoal
    >>> client = shoal.connect("memory://")
    >>> items = client.table("items", dim=2, optimizer=shoal.optim.SGD(lr=1.0))
    >>> items.push([7, 7, 9], np.ones((3, 2), np.float32))
    >>> items.pull([7, 8, 9])[:, 0].tolist()
    [-2.0, 0.0, -1.0]
    >>> len(items)
    2
    """

    def __init__(self, session: Session, entry: TableEntry, codec: Codec) -> None:
        super().__init__(session, entry, codec)
        self._dim = entry.dim

    @property
    def dim(self) -> int:
        """Floats in a row."""
        return self._dim

    @property
    def init(self) -> Initializer:
        """How rows begin."""
        return self._entry.init

    @property
    def seed(self) -> int:
        """The seed of the rows' first values."""
        return self._entry.seed

    @property
    def placement(self) -> Range | None:
        """The key range that is cut into shards, or None where keys are hashed."""
        return self._entry.placement

    def pull(self, keys: ArrayLike, out: ArrayLike = None, timeout: float | None = None) -> Any:
        """The rows of `keys`, of shape keys.shape + (dim,). An absent key reads as its first value.

        A pull never stores anything. With `out` (float32, contiguous) the rows are written there and
        `out` is returned.
        """
        return self._begin_pull(keys, out, timeout)._rest()

    def pull_async(self, keys: ArrayLike, out: ArrayLike = None, timeout: float | None = None) -> Ticket:
        """Begin a pull; the ticket's `wait` gives the rows. `out` must be left alone until then."""
        return self._begin_pull(keys, out, timeout)._in_background()

    def push(
        self,
        keys: ArrayLike,
        grads: ArrayLike,
        lr: float | None = None,
        step: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Apply gradients by the table's optimizer; returns when that is done.

        `grads` is float32 of shape keys.shape + (dim,). Gradients of the same key are summed first. Rows
        are born here. `lr` replaces the optimizer's for this push; `step` is recorded with the rows.
        A gradient that is not finite is refused as a whole: nothing is applied.
        """
        self._begin_push(keys, grads, lr, step, timeout)._rest()

    def push_async(
        self,
        keys: ArrayLike,
        grads: ArrayLike,
        lr: float | None = None,
        step: int = 0,
        timeout: float | None = None,
    ) -> Ticket:
        """Begin a push. The arrays may be reused as soon as this returns."""
        return self._begin_push(keys, grads, lr, step, timeout)._in_background()

    def assign(self, keys: ArrayLike, values: ArrayLike, timeout: float | None = None) -> None:
        """Set rows to `values`, float32 of shape keys.shape + (dim,). Of equal keys the last one stays."""
        self._begin_assign(keys, values, timeout)._rest()

    def assign_async(self, keys: ArrayLike, values: ArrayLike, timeout: float | None = None) -> Ticket:
        """Begin an assign. The arrays may be reused as soon as this returns."""
        return self._begin_assign(keys, values, timeout)._in_background()

    def _wanted(self, keys: ArrayLike, out: ArrayLike = None) -> Wanted:
        key_array = as_keys(keys, self._where)
        shape = (*key_array.shape, self._dim)
        memory = None if out is None else as_out(out, shape, self._where).reshape(-1, self._dim)
        return Wanted((self._id, key_array.reshape(-1), memory), shape, out, is_torch(keys))

    def _given(self, keys: ArrayLike, values: ArrayLike, name: str) -> tuple[KeyArray, FloatRows]:
        key_array = as_keys(keys, self._where)
        rows = as_floats(values, (*key_array.shape, self._dim), f"{name}s", self._where)
        return key_array.reshape(-1), rows.reshape(-1, self._dim)

    def __len__(self) -> int:
        return self.stats()["rows"]

    def __bool__(self) -> bool:
        # A handle is a thing, also while its table has no rows; and truth must not ask the servers.
        return True

    def scan(
        self, batch_rows: int = 65536, timeout: float | None = None
    ) -> Iterator[tuple[KeyArray, FloatRows]]:
        """All stored rows as (keys, values) batches of at most `batch_rows`, in no particular order.

        Rows that are pushed meanwhile may be seen before or after the change. `timeout` is for each batch.
        """
        if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
            raise BadInput(f"{self._where}: batch_rows is {batch_rows!r}; it must be at least 1")
        return self._scan(batch_rows, self._session.deadline(timeout))

    def _scan(self, batch_rows: int, seconds: float) -> Iterator[tuple[KeyArray, FloatRows]]:
        parts: list[tuple[KeyArray, FloatRows]] = []
        held = 0
        for keys, values in self._scan_parts(batch_rows, seconds):
            parts.append((keys, values))
            held += len(keys)
            while held >= batch_rows:
                keys, values = _joined(parts)
                yield keys[:batch_rows], values[:batch_rows]
                held -= batch_rows
                parts = [(keys[batch_rows:], values[batch_rows:])] if held else []
        if parts:
            yield _joined(parts)

    def _scan_parts(self, rows_max: int, seconds: float) -> Iterator[tuple[KeyArray, FloatRows]]:
        """What each shard gives at a time: about `rows_max` rows, or none where its index is sparse."""
        session = self._session
        for shard in range(session.core.shards):
            cursor = 0
            while cursor != -1:
                session.check()
                keys, values, cursor = session.call(
                    self._where, session.core.scan, self._id, shard, cursor, rows_max, seconds
                )
                if len(keys):
                    yield keys, values

    def __repr__(self) -> str:
        # Without the number of rows: a repr must not ask the servers.
        state = "closed, " if self._session.closed else ""
        return f"<Table {self.name!r}: {state}dim={self._dim}, wire={self._codec}, {self.optimizer}>"


def _joined(parts: list[tuple[KeyArray, FloatRows]]) -> tuple[KeyArray, FloatRows]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([keys for keys, _ in parts]), np.concatenate([values for _, values in parts])
