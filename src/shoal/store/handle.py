"""What tables and tensors have in common: a client's end of something that the servers hold."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from shoal.errors import BadInput
from shoal.optim import Optimizer
from shoal.store.catalogue import TableEntry
from shoal.store.ticket import Ticket, Wanted
from shoal.types import ArrayLike, Codec, FloatRows, KeyArray

if TYPE_CHECKING:
    from shoal.store.client import Session


class Handle:
    """The base of `Table` and `Tensor`, which say how keys and values look to the core."""

    def __init__(self, session: Session, entry: TableEntry, codec: Codec) -> None:
        self._session = session
        self._entry = entry
        self._id = entry.id
        self._codec = codec
        self._where = entry.what

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._entry.name

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, as of when this handle was opened."""
        return self._entry.optimizer

    @property
    def wire(self) -> Codec:
        """How values travel between this client and the servers."""
        return self._codec

    def stats(self, timeout: float | None = None) -> dict[str, int]:
        """Figures over all servers: rows, value_bytes, state_bytes, memory_bytes, pushes, pulls."""
        session = self._session
        seconds = session.deadline(timeout)
        return dict(session.call(self._where, session.core.table_stats, self._id, seconds))

    # What the two do differently. A tensor has no keys: they are None.

    def _wanted(self, keys: ArrayLike, out: ArrayLike = None) -> Wanted:
        raise NotImplementedError

    def _given(self, keys: ArrayLike, values: ArrayLike, name: str) -> tuple[KeyArray | None, FloatRows]:
        """Keys and values as the core takes them; `name` is that of one value."""
        raise NotImplementedError

    def _push_item(
        self, keys: ArrayLike, grads: ArrayLike, lr: float | None
    ) -> tuple[int, KeyArray | None, FloatRows, float]:
        rate = math.nan if lr is None else check_lr(lr, self._where)
        return (self._id, *self._given(keys, grads, "grad"), rate)

    def _begin_pull(self, keys: ArrayLike, out: ArrayLike, timeout: float | None) -> Ticket:
        started, session = time.monotonic(), self._session
        seconds = session.deadline(timeout)
        wanted = self._wanted(keys, out)
        core = session.call(
            self._where, session.core.pull_many, [wanted.item], codec=self._codec, timeout_s=seconds
        )
        return Ticket(core, self._where, started, seconds, session, wanted)

    def _begin_push(
        self, keys: ArrayLike, grads: ArrayLike, lr: float | None, step: int, timeout: float | None
    ) -> Ticket:
        started, session = time.monotonic(), self._session
        seconds = session.deadline(timeout)
        core = session.call(
            self._where,
            session.core.push_many,
            [self._push_item(keys, grads, lr)],
            step=check_step(step, self._where),
            codec=self._codec,
            timeout_s=seconds,
        )
        return Ticket(core, self._where, started, seconds, session)

    def _begin_assign(self, keys: ArrayLike, values: ArrayLike, timeout: float | None) -> Ticket:
        started, session = time.monotonic(), self._session
        seconds = session.deadline(timeout)
        at, flat = self._given(keys, values, "value")
        if at is None:
            core = session.call(self._where, session.core.assign_tensor, self._id, flat, timeout_s=seconds)
        else:
            core = session.call(self._where, session.core.assign, self._id, at, flat, timeout_s=seconds)
        return Ticket(core, self._where, started, seconds, session)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._where} cannot be pickled or copied: it belongs to a client of process "
            f"{self._session.pid}. Send its name, and open it from a client of the other process"
        )


def check_lr(lr: float, where: str) -> float:
    """`lr` if it can be a learning rate for one push: finite and at least 0."""
    # NumPy scalars and one-element tensors are fine: schedulers produce them.
    try:
        number = float(lr)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(lr, bool | str) or not 0 <= number < math.inf:
        raise BadInput(f"{where}: lr is {lr!r}; it must be a finite number, at least 0")
    return number


def check_step(step: int, where: str) -> int:
    """`step` if it can be a training step: a whole number, at least 0."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step < 1 << 63:
        raise BadInput(f"{where}: step is {step!r}; it must be a whole number, at least 0")
    return int(step)
