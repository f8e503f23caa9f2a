"""What Embedding and EmbeddingBag share: a name, a handle, a binding, and the gradients of rows.

A module holds no rows. It asks for those of a batch (`_ask`), gets them by one pull or from what was offered,
and makes its output of them (`_answer`); a collection does the first and the last for many modules with one
pull in between. Sending gradients is not done here: `gradients()` hands them out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import torch

from shoal.config import check_choice, check_count, check_name
from shoal.errors import BadInput, Unbound
from shoal.init import Initializer, Normal
from shoal.nn.gradient import Owner, RowGradient
from shoal.nn.lookup import Pulled, lookup
from shoal.nn.offer import Offer
from shoal.nn.state import load_rows, save_rows
from shoal.nn.torch_threads import share_threads
from shoal.optim import FTRL, Optimizer
from shoal.store.arrays import as_keys
from shoal.store.catalogue import DIM_MAX, describe
from shoal.store.client import Client
from shoal.store.table import Table
from shoal.types import ArrayLike, Codec, FloatRows, KeyArray

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_INT64 = -(1 << 63), (1 << 63) - 1


def uncompiled(function: FunctionT) -> FunctionT:
    """`function` as it is, also in a compiled model: its graph breaks here, as a pull is not of torch."""
    return cast(FunctionT, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class Asked:
    """The rows that a forward needs: distinct or not, in order, without padding; and what to do with them."""

    __slots__ = ("array", "keys")

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys
        self.array: KeyArray = keys.numpy()


class TableModule(torch.nn.Module):
    """A module on one table; the base of `Embedding` and `EmbeddingBag`.

    `weight` is the table's handle: a Parameter of shape (0, dim) that puts the table into a param group and
    carries its gradients. Modules with the same name and dim share the table.
    """

    # Tables above this many rows do not go into a state_dict; may be set on a class or on a module.
    state_dict_rows_max: int = 1_000_000
    weight: torch.nn.Parameter
    # How `load_state_dict` assigns rows; all workers of a job call it, and one of them is to assign.
    assign_by: Callable[[Callable[[], None]], None]

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: Optimizer | None = None,
        init: Initializer | None = None,
        seed: int | None = None,
        wire: Codec = "fp32",
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.table_name = check_name("name", name)
        self.dim = check_count("dim", dim, 1, DIM_MAX)
        self.optimizer = _check_kind("optimizer", optimizer, Optimizer)
        self.init = _check_kind("init", init, Initializer)
        self.seed = None if seed is None else check_count("seed", seed, 0, (1 << 64) - 1)
        self.wire: Codec = check_choice("wire", wire, Codec)
        self.padding_idx = None if padding_idx is None else check_count("padding_idx", padding_idx, *_INT64)
        self.weight = torch.nn.Parameter(torch.empty(0, self.dim))
        self._owner = Owner(self._where)
        self._client: Client | None = None
        self._table: Table | None = None
        self._offer: Offer | None = None
        self.assign_by = _at_once

    def bind(
        self,
        client: Client,
        optimizer: Optimizer | None = None,
        *,
        seed: int | None = None,
        retune: bool = True,
    ) -> None:
        """Open the table by `client`, with the module's own optimizer and seed or else with these.

        Of a table that exists the hyper-parameters follow, unless `retune=False`. Binding again is harmless,
        and binds to the new client. What another module made of the same name must agree:
        `shoal.errors.Mismatch` shows both sides.
        """
        chosen = self.optimizer or _check_kind("optimizer", optimizer, Optimizer)
        if chosen is None:
            raise BadInput(
                f"{self._where}: no optimizer. Give the module one, as in {type(self).__name__}("
                f"{self.table_name!r}, dim={self.dim}, optimizer=shoal.optim.Adagrad(lr=0.05)); or "
                f"bind(client, optimizer=...); or a torch optimizer that holds its handle to prepare"
            )
        self._table = client.table(
            self.table_name,
            dim=self.dim,
            optimizer=chosen,
            init=self.init,
            init_if_new=None if isinstance(chosen, FTRL) else Normal(1.0),
            seed=seed if self.seed is None else self.seed,
            wire=self.wire,
            retune=retune,
        )
        self._client = client
        self._offer = None
        share_threads(client)

    @property
    def bound(self) -> bool:
        """Whether the module has its table."""
        return self._table is not None

    @property
    def table(self) -> Table:
        """The table; raises `shoal.errors.Unbound` before `bind`."""
        if self._table is None:
            raise Unbound(
                f"{self._where}: this {type(self).__name__} is not bound to a store. Hand its model to "
                f"worker.prepare(...), or call module.bind(client)"
            )
        return self._table

    @property
    def client(self) -> Client:
        """The client that it was bound by; raises `shoal.errors.Unbound` before `bind`."""
        table = self.table
        assert self._client is not None, table
        return self._client

    def gradients(self) -> tuple[KeyArray, FloatRows] | None:
        """What backward accumulated since the last zero_grad: keys (k,) and float32 gradients (k, dim).

        In order of the backward passes, one row for each occurrence of a key: keys may repeat, as
        `Table.push` takes them. None where there is nothing. The arrays are to be read only.
        """
        grad = self.weight.grad
        if not isinstance(grad, RowGradient):
            return None
        # Modules may share a handle; each hands out its own rows.
        parts = [part for part in grad.parts if part.owner is self._owner]
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0].keys, parts[0].grads.numpy()
        return (
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.grads.numpy() for part in parts]),
        )

    def offer(self, keys: ArrayLike, rows: ArrayLike) -> None:
        """Rows for the next forward: it uses them if they hold all its ids, and pulls as ever if not.

        `keys` (any shape) need not be in the forward's order; `rows` is float32 of shape keys.shape + (dim,).
        The module takes both over and may write to `rows`. An offer is for one forward, used or not; a new
        one takes its place.
        """
        self._offer = Offer(keys, rows, self.dim, self._where)

    def withdraw(self) -> None:
        """Take back what was offered and not used: the next forward pulls."""
        self._offer = None

    @abstractmethod
    def _ask(self, *inputs: Any) -> Asked:
        """What a forward on these inputs needs."""

    @abstractmethod
    def _answer(self, asked: Asked, rows: torch.Tensor) -> torch.Tensor:
        """The output of the forward, of the rows that it asked for."""

    def _run(self, *inputs: Any) -> torch.Tensor:
        table = self.table
        asked = self._ask(*inputs)
        rows = self._take_offer(asked)
        if rows is None:
            rows = self.client.reading(lambda: table.pull(asked.array))
        return self._answer(asked, *lookup([self._pulled(asked, rows)]))

    def _pulled(self, asked: Asked, rows: FloatRows) -> Pulled:
        return Pulled(self._owner, self.weight, asked.keys, rows)

    def _take_offer(self, asked: Asked) -> FloatRows | None:
        offer = self._offer
        if offer is None:
            return None
        self._offer = None
        return offer.rows_of(asked.array)

    def _keys(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids` as contiguous int64 in CPU memory: themselves, where they are that already."""
        if not isinstance(ids, torch.Tensor):
            raise BadInput(f"{self._where}: ids are a {type(ids).__name__}; allowed: a torch tensor")
        if ids.device.type != "cpu":
            ids = ids.cpu()
        if ids.dtype == torch.int64 and ids.is_contiguous():
            return ids
        return torch.from_numpy(as_keys(ids, self._where))

    @property
    def _where(self) -> str:
        return describe(self.table_name, dense=False)

    def extra_repr(self) -> str:
        """torch's: what the module is, inside the parentheses of its repr."""
        shown = [f"{self.table_name!r}", f"dim={self.dim}"]
        if self.padding_idx is not None:
            shown.append(f"padding_idx={self.padding_idx}")
        if self.optimizer is not None:
            shown.append(f"optimizer={self.optimizer}")
        return ", ".join([*shown, "bound" if self.bound else "not bound"])

    def __getstate__(self) -> dict[str, Any]:
        # A table belongs to its process: a copy keeps the name and is to be bound again.
        return self.__dict__ | {"_client": None, "_table": None, "_offer": None, "assign_by": _at_once}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._table is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            keys, values = save_rows(self._table, self.state_dict_rows_max)
            destination[f"{prefix}weight.keys"] = keys
            destination[f"{prefix}weight.values"] = values

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        found = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
        report = load_rows(found, f"{prefix}weight", self._table, self.dim, self.padding_idx, self.assign_by)
        error_msgs.extend(report.errors)
        if strict:
            missing_keys.extend(report.missing)
            unexpected_keys.extend(report.unexpected)


def table_modules(model: torch.nn.Module) -> list[tuple[str, TableModule]]:
    """The modules of `model` that are on tables, with their names, in torch's order.

    Each module once, however often the model holds it; a table once for each of its modules.

    >>> import torch, shoal
    >>> model = torch.nn.Sequential(shoal.nn.Embedding("items", dim=4), torch.nn.Linear(4, 1))
    >>> [(name, module.table_name) for name, module in table_modules(model)]
    [('0', 'items')]
    """
    return [(name, module) for name, module in model.named_modules() if isinstance(module, TableModule)]


def row_gradients(modules: Iterable[TableModule]) -> Iterator[tuple[TableModule, KeyArray, FloatRows]]:
    """What backward accumulated, for each table once, with the first of its modules that has some."""
    tables: dict[str, list[tuple[TableModule, KeyArray, FloatRows]]] = {}
    for module in modules:
        if (found := module.gradients()) is not None:
            tables.setdefault(module.table_name, []).append((module, *found))
    for parts in tables.values():
        if len(parts) == 1:
            yield parts[0]
        else:
            _, keys, grads = zip(*parts, strict=True)
            yield parts[0][0], np.concatenate(keys), np.concatenate(grads)


def _at_once(assign: Callable[[], None]) -> None:
    assign()


def _check_kind(name: str, value: Any, kind: type) -> Any:
    if value is not None and not isinstance(value, kind):
        raise BadInput(f"{name} is {value!r}; allowed: an object of shoal.{name[:5]}")
    return value
