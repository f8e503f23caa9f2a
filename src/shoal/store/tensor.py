"""Tensors: dense parameters under a name, cut in pieces over the shards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shoal.store.arrays import as_floats, as_out
from shoal.store.catalogue import TableEntry
from shoal.store.handle import Handle, check_step
from shoal.store.ticket import Ticket, Wanted
from shoal.types import ArrayLike, Codec, FloatRows

if TYPE_CHECKING:
    from shoal.store.client import Session


class Tensor(Handle):
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
        super().__init__(session, entry, codec)
        self._shape = entry.shape
        self._torch = torch

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._shape

    def _flat(self) -> Tensor:
        """The same tensor seen as one row of numbers: what is pulled and pushed has shape (n,)."""
        other = Tensor(self._session, self._entry, self._codec, self._torch)
        other._shape = (self._entry.dim,)
        return other

    def pull(self, out: ArrayLike = None, timeout: float | None = None) -> Any:
        """The present value; with `out` (float32, contiguous) it is written there and `out` returned."""
        return self._begin_pull(None, out, timeout)._rest()

    def pull_async(self, out: ArrayLike = None, timeout: float | None = None) -> Ticket:
        """Begin a pull; the ticket's `wait` gives the value. `out` must be left alone until then."""
        return self._begin_pull(None, out, timeout)._in_background()

    def push(
        self, grad: ArrayLike, lr: float | None = None, step: int = 0, timeout: float | None = None
    ) -> None:
        """Apply a gradient of the tensor's shape by its optimizer; returns when that is done.

        A gradient that is not finite is refused as a whole: nothing is applied.
        """
        self._begin_push(None, grad, lr, step, timeout)._rest()

    def push_async(
        self, grad: ArrayLike, lr: float | None = None, step: int = 0, timeout: float | None = None
    ) -> Ticket:
        """Begin a push. The array may be reused as soon as this returns."""
        return self._begin_push(None, grad, lr, step, timeout)._in_background()

    def _push(
        self,
        grad: ArrayLike,
        lr: float | None,
        step: int,
        timeout: float | None,
        pulled: ArrayLike,
        compensation: float,
    ) -> Ticket:
        """With delay compensation: servers add what the change since `pulled` would have made of it."""
        started, session = time.monotonic(), self._session
        seconds = session.deadline(timeout)
        _, _, flat, rate = self._push_item(None, grad, lr)
        core = session.call(
            self._where,
            session.core.push_tensor,
            self._id,
            flat,
            lr=rate,
            codec=self._codec,
            step=check_step(step, self._where),
            pulled=as_floats(pulled, self._shape, "pulled", self._where),
            dc_lambda=compensation,
            timeout_s=seconds,
        )
        return Ticket(core, self._where, started, seconds, session)

    def assign(self, value: ArrayLike, timeout: float | None = None) -> None:
        """Set the value; the optimizer's state stays."""
        self._begin_assign(None, value, timeout)._rest()

    def assign_async(self, value: ArrayLike, timeout: float | None = None) -> Ticket:
        """Begin an assign. The array may be reused as soon as this returns."""
        return self._begin_assign(None, value, timeout)._in_background()

    def _wanted(self, keys: ArrayLike, out: ArrayLike = None) -> Wanted:
        memory = None if out is None else as_out(out, self._shape, self._where).reshape(-1)
        return Wanted((self._id, None, memory), self._shape, out, self._torch)

    def _given(self, keys: ArrayLike, values: ArrayLike, name: str) -> tuple[None, FloatRows]:
        return None, as_floats(values, self._shape, name, self._where).reshape(-1)

    def __repr__(self) -> str:
        state = "closed, " if self._session.closed else ""
        return f"<Tensor {self.name!r}: {state}shape={self._shape}, wire={self._codec}, {self.optimizer}>"
