"""Rows that somebody pulled ahead for a module's next forward."""

from __future__ import annotations

import numpy as np

from shoal.store.arrays import as_floats, as_keys
from shoal.types import ArrayLike, FloatRows, KeyArray


class Offer:
    """Keys and their rows, checked; answers whether they hold all that is wanted."""

    __slots__ = ("_dim", "_keys", "_rows")

    def __init__(self, keys: ArrayLike, rows: ArrayLike, dim: int, where: str) -> None:
        array = as_keys(keys, where)
        self._dim = dim
        self._keys = array.reshape(-1)
        self._rows = as_floats(rows, (*array.shape, dim), "rows", where).reshape(-1, dim)
        if not self._rows.flags.writeable:
            self._rows = self._rows.copy()  # what a forward returns may be written to

    def rows_of(self, wanted: KeyArray) -> FloatRows | None:
        """The rows of `wanted`, of shape wanted.shape + (dim,), or None unless all are here."""
        shape = (*wanted.shape, self._dim)
        flat = wanted.reshape(-1)
        if np.array_equal(flat, self._keys):
            return self._rows.reshape(shape)
        if not len(self._keys):
            return None if len(flat) else np.empty(shape, np.float32)
        keys, rows = self._keys, self._rows
        order = None if (keys[:-1] <= keys[1:]).all() else np.argsort(keys, kind="stable")
        places = np.searchsorted(keys, flat, sorter=order)
        np.minimum(places, len(keys) - 1, out=places)
        if order is not None:
            places = order[places]
        if not np.array_equal(keys[places], flat):
            return None
        return rows[places].reshape(shape)
