"""Tensors: dense parameters under a name, cut in pieces over the shards."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NoReturn

from shoal import _core
from shoal.optim import Optimizer
from shoal.store.arrays import as_floats, as_out
from shoal.store.catalogue import TableEntry
from shoal.store.table import check_lr, check_step
from shoal.store.ticket import Ticket
from shoal.types import ArrayLike, Codec

if TYPE_CHECKING:
    from shoal.store.client import Session


class Tensor:
    """One dense float32 parameter of any shape, with its optimizer, held by the servers.

    Made by `Client.tensor`. `pull` gives a torch tensor if the handle was opened with one as value, a
    NumPy array otherwise. Safe from many threads.

    >>> import numpy as np, shoal
    >>> client = shoal.connect("memory://")
    >>> w = client.tensor("w", np.zeros((2, 3), np.float32), optimizer=shoal.optim.SGD(lr=0.5))
    >>> w.push(np.ones((2, 3), np.float32))
    >>> w.pull()[0].tolist()
    [-0.5, -0.5, -0.5]
    """

    def __init__(self, session: Session, entry: TableEntry, codec: Codec, torch: bool) -> None:
        assert entry.shape is not None
        self._session = session
        self._entry = entry
        self._id = entry.id
        self._shape = entry.shape
        self._codec = codec
        self._torch = torch
        self._where = entry.what

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._shape

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, as of when this handle was opened."""
        return self._entry.optimizer

    @property
    def wire(self) -> Codec:
        """How values travel between this client and the servers."""
        return self._codec

    def pull(self, out: ArrayLike = None, timeout: float | None = None) -> Any:
        """The present value; with `out` (float32, contiguous) it is written there and `out` returned."""
        started = time.monotonic()
        return self._pull(out, timeout)._rest(started)

    def pull_async(self, out: ArrayLike = None, timeout: float | None = None) -> Ticket:
        """Begin a pull; the ticket's `wait` gives the value. `out` must be left alone until then."""
        return self._pull(out, timeout)._in_background()

    def _pull(self, out: ArrayLike, timeout: float | None) -> Ticket:
        seconds = self._session.deadline(timeout)
        memory = None if out is None else as_out(out, self._shape, self._where).reshape(-1)
        try:
            ticket = self._session.core.pull_tensor(
                self._id, codec=self._codec, out=memory, timeout_s=seconds
            )
        except _core.CoreError as error:
            raise self._session.error(error, self._where) from None
        return Ticket(
            ticket, self._where, seconds, self._session, shape=self._shape, out=out, torch=self._torch
        )

    def push(
        self, grad: ArrayLike, lr: float | None = None, step: int = 0, timeout: float | None = None
    ) -> None:
        """Apply a gradient of the tensor's shape by its optimizer; returns when that is done.

        A gradient that is not finite is refused as a whole: nothing is applied.
        """
        started = time.monotonic()
        self._push(grad, lr, step, timeout)._rest(started)

    def push_async(
        self, grad: ArrayLike, lr: float | None = None, step: int = 0, timeout: float | None = None
    ) -> Ticket:
        """Begin a push. The array may be reused as soon as this returns."""
        return self._push(grad, lr, step, timeout)._in_background()

    def _push(
        self,
        grad: ArrayLike,
        lr: float | None,
        step: int,
        timeout: float | None,
        pulled: ArrayLike = None,
        compensation: float = 0.0,
    ) -> Ticket:
        seconds = self._session.deadline(timeout)
        values = as_floats(grad, self._shape, "grad", self._where)
        try:
            ticket = self._session.core.push_tensor(
                self._id,
                values.reshape(-1),
                lr=math.nan if lr is None else check_lr(lr, self._where),
                codec=self._codec,
                step=check_step(step, self._where),
                pulled=None if pulled is None else as_floats(pulled, self._shape, "pulled", self._where),
                dc_lambda=compensation,
                timeout_s=seconds,
            )
        except _core.CoreError as error:
            raise self._session.error(error, self._where) from None
        return Ticket(ticket, self._where, seconds, self._session)

    def assign(self, value: ArrayLike, timeout: float | None = None) -> None:
        """Set the value; the optimizer's state stays."""
        started = time.monotonic()
        self._assign(value, timeout)._rest(started)

    def assign_async(self, value: ArrayLike, timeout: float | None = None) -> Ticket:
        """Begin an assign. The array may be reused as soon as this returns."""
        return self._assign(value, timeout)._in_background()

    def _assign(self, value: ArrayLike, timeout: float | None) -> Ticket:
        seconds = self._session.deadline(timeout)
        values = as_floats(value, self._shape, "value", self._where)
        try:
            ticket = self._session.core.assign_tensor(self._id, values.reshape(-1), timeout_s=seconds)
        except _core.CoreError as error:
            raise self._session.error(error, self._where) from None
        return Ticket(ticket, self._where, seconds, self._session)

    def stats(self, timeout: float | None = None) -> dict[str, int]:
        """Figures over all servers: value_bytes, state_bytes, memory_bytes, pushes, pulls."""
        return self._session.table_stats(self._entry, self._session.deadline(timeout))

    def __repr__(self) -> str:
        state = "closed, " if self._session.closed else ""
        return f"<Tensor {self.name!r}: {state}shape={self._shape}, wire={self._codec}, {self.optimizer}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._where} cannot be pickled or copied: it belongs to a client of process "
            f"{self._session.pid}. Send its name, and open it from a client of the other process"
        )
