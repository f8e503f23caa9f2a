"""The rows of a batch: one request to each server for all tables, a batch ahead where that is wanted.

`prepare(..., keys=)` says which ids of which tables a batch needs. They are pulled when the loop gets the
batch and offered to the modules, whose forwards then pull nothing. With `prefetch=1` they are pulled while
the batch before computes: they may lack what others pushed since, one step's worth, but never what this
worker pushed itself, since those rows are pulled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shoal.errors import BadInput
from shoal.nn.module import TableModule, table_modules
from shoal.store.arrays import as_keys
from shoal.store.client import Client
from shoal.store.many import ManyPulls, PushItem, pull_many
from shoal.store.table import Table
from shoal.sync import Policy, Round
from shoal.types import KeyArray

# A batch in; ids by module, name of a module, or name of a table out. A tuple's first entry is taken, so that
# what an EmbeddingCollection gets will do.
BatchKeys: TypeAlias = Callable[[Any], Mapping[Any, Any]]


def check_prefetch(prefetch: int, keys: BatchKeys | None, policy: Policy) -> None:
    """Raise unless rows may be pulled that early under this policy."""
    if prefetch not in (0, 1) or isinstance(prefetch, bool):
        raise BadInput(f"prepare: prefetch is {prefetch!r}; allowed: 0, or 1 batch ahead")
    if not prefetch:
        return
    if keys is None:
        raise BadInput(
            "prepare: prefetch=1 without keys=; say which ids a batch needs, as "
            "keys=lambda batch: {'items': batch[0]}"
        )
    rows = policy.rows_policy
    if isinstance(rows.proceed, Round):
        raise BadInput(
            f"prepare: prefetch=1 under {policy}: its rows are those of a round, and rows pulled before its "
            f"end are older. Take prefetch=0, or a word whose rows need no rounds, such as asp or ssp:3"
        )
    if rows.by_staleness:
        raise BadInput(
            f"prepare: prefetch=1 under {policy}: staleness counts from a worker's last pull, which would be "
            f"that of another batch. Take prefetch=0, or scale=share"
        )


@dataclass
class _Pulling:
    """Rows on their way for one batch: per entry its modules, table and keys."""

    batch: Any
    entries: list[tuple[list[TableModule], Table, KeyArray]]
    pulls: ManyPulls


class BatchRows:
    """What one worker pulls for the batches of its loaders."""

    def __init__(self, client: Client, models: Iterable[torch.nn.Module], keys: BatchKeys) -> None:
        self._client = client
        self._keys = keys
        self._modules: dict[Any, list[TableModule]] = {}
        for model in models:
            for name, module in table_modules(model):
                for key in {name, module.table_name, module}:
                    self._modules.setdefault(key, []).append(module)
        self._offered: list[TableModule] = []
        self._touched = _Touched()
        self._coming: Any = None
        self._ahead: _Pulling | None = None

    def see(self, batch: Any) -> None:
        """The loop will get this batch after the next one."""
        self._coming = batch

    def pushed(self, pushes: Iterable[PushItem]) -> None:
        """This worker changes rows; what was pulled before is out of date in them."""
        self._withdraw()  # a step between drawing a batch and its forward
        if self._ahead is not None:
            for table, keys, _, _ in pushes:
                self._touched.add(table._id, as_keys(keys, table._where))

    def forget(self) -> None:
        """What was pulled so far is out of date, whatever it is: rows were assigned, or loaded from a
        checkpoint; the loop was left; the worker was evicted, and is back.
        """
        self._withdraw()
        self._ahead = None

    def _withdraw(self) -> None:
        for module in self._offered:
            module.withdraw()
        self._offered = []

    def hand(self, batch: Any) -> None:
        """The loop gets `batch` now: have its rows at hand, and begin with those of the one to come."""
        self._client.reading(lambda: self._hand(batch))

    def _hand(self, batch: Any) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.batch is not batch:
            self._touched.clear()
            ahead = self._begin(batch)
        rows = ahead.pulls.wait()
        self._renew(ahead, rows)
        self._offered = [module for modules, _, _ in ahead.entries for module in modules]
        for (modules, _, keys), found in zip(ahead.entries, rows, strict=True):
            for module in modules:
                # A forward may hand them out and have them written to: each module gets its own.
                module.offer(keys, found if module is modules[0] else found.copy())
        coming, self._coming = self._coming, None
        if coming is not None and coming is not batch:
            self._ahead = self._begin(coming)
            self._ahead.pulls.in_background()

    def _begin(self, batch: Any) -> _Pulling:
        wanted = self._keys(batch)
        if not isinstance(wanted, Mapping):
            raise BadInput(
                f"prepare: keys= gave a {type(wanted).__name__}; it must give a dict: table -> ids"
            )
        entries = []
        for name, ids in wanted.items():
            modules = self._modules.get(name)
            if modules is None:
                known = sorted(key for key in self._modules if isinstance(key, str))
                raise BadInput(f"prepare: keys= names {name!r}; there are {', '.join(map(repr, known))}")
            table = modules[0].table
            keys = as_keys(ids[0] if isinstance(ids, tuple) else ids, table._where).reshape(-1)
            padding = modules[0].padding_idx
            if padding is not None and len({module.padding_idx for module in modules}) == 1:
                keys = keys[keys != padding]
            entries.append((modules, table, keys))
        return _Pulling(
            batch, entries, ManyPulls(self._client, [(table, keys) for _, table, keys in entries])
        )

    def _renew(self, ahead: _Pulling, rows: list[Any]) -> None:
        """Pull again what this worker pushed to since."""
        if not self._touched:
            return
        masks = [self._touched.among(table._id, keys) for _, table, keys in ahead.entries]
        old = [i for i, mask in enumerate(masks) if mask.any()]
        again = [(ahead.entries[i][1], ahead.entries[i][2][masks[i]]) for i in old]
        for i, fresh in zip(old, pull_many(self._client, again), strict=True):
            rows[i][masks[i]] = fresh
        self._touched.clear()


class _Touched:
    """A set of (table, key) that may hold a little too much: hashes in one array, whatever the tables."""

    _BITS = 22

    def __init__(self) -> None:
        self._marks = np.zeros(0, np.bool_)
        self._set: list[npt.NDArray[np.uint64]] = []

    def __bool__(self) -> bool:
        return bool(self._set)

    def add(self, table: int, keys: KeyArray) -> None:
        if not len(self._marks):
            self._marks = np.zeros(1 << self._BITS, np.bool_)
        places = self._places(table, keys)
        self._marks[places] = True
        self._set.append(places)

    def among(self, table: int, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """Which of `keys` are in the set, or look as if they were."""
        return self._marks[self._places(table, keys)]

    def clear(self) -> None:
        for places in self._set:
            self._marks[places] = False
        self._set = []

    def _places(self, table: int, keys: KeyArray) -> npt.NDArray[np.uint64]:
        mixed = (keys.reshape(-1).view(np.uint64) + np.uint64(table << 40)) * np.uint64(0x9E3779B97F4A7C15)
        mixed >>= np.uint64(64 - self._BITS)
        return mixed
