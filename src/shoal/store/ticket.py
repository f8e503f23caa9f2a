"""Tickets: operations that are under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from shoal import _core
from shoal.config import check_timeout
from shoal.store.arrays import to_torch
from shoal.types import ArrayLike, FloatRows, KeyArray

if TYPE_CHECKING:
    from shoal.store.client import Session


class Wanted(NamedTuple):
    """What a pull asks of the core, and how its caller wants to have the answer."""

    item: tuple[int, KeyArray | None, FloatRows | None]
    shape: tuple[int, ...]
    out: ArrayLike
    torch: bool

    def result(self, array: Any) -> Any:
        """The caller's own memory, if the core has written there, or the array."""
        if self.out is not None:
            return self.out
        if array.shape != self.shape:
            array = array.reshape(self.shape)
        return to_torch(array) if self.torch else array


class Ticket:
    """One pull, push or assign in flight. Any thread may wait; dropping a ticket cancels nothing.

    >>> import shoal
    >>> client = shoal.connect("memory://")
    >>> items = client.table("items", dim=2, optimizer=shoal.optim.SGD(lr=1.0))
    >>> ticket = items.pull_async([1, 2, 3])
    >>> ticket.wait(timeout=5).shape
    (3, 2)
    """

    __slots__ = ("_core", "_finished", "_result", "_session", "_started", "_timeout_s", "_wanted", "_where")

    def __init__(
        self,
        core: _core.Ticket,
        where: str,
        started: float,
        timeout_s: float,
        session: Session,
        wanted: Wanted | None = None,
    ) -> None:
        self._core = core
        self._where = where
        self._started = started
        self._timeout_s = timeout_s
        self._session = session  # while a ticket lives its client is not closed for want of a reference
        self._wanted = wanted
        self._finished = False
        self._result: Any = None

    def done(self) -> bool:
        """Whether `wait` returns (or raises) at once."""
        self._session.check_process()
        return self._finished or self._core.done()

    def wait(self, timeout: float | None = None) -> Any:
        """The result: rows for a pull, None for a push or an assign. Waiting again gives it again.

        Raises `shoal.errors.Timeout` after `timeout` seconds (default: the client's); the operation goes
        on, and the error's `ticket` may be waited for again.
        """
        self._session.check_process()
        return self._wait(self._timeout_s if timeout is None else check_timeout(timeout))

    def _rest(self) -> Any:
        """The result, for which it waits what is left of the call's time."""
        return self._wait(max(0.0, self._started + self._timeout_s - time.monotonic()))

    def _wait(self, seconds: float) -> Any:
        if self._finished:
            return self._result
        try:
            array = self._core.wait(seconds)
        except _core.CoreError as error:
            raise self._session.error(error, self._where, ticket=self) from None
        if self._wanted is not None:
            self._result = self._wanted.result(array)
        self._finished = True
        return self._result

    def _in_background(self) -> Ticket:
        """This ticket, its operation now carried on while nobody waits for it."""
        self._core.leave()
        return self

    def __repr__(self) -> str:
        done = self._finished or self._core.done()
        return f"<Ticket {self._where}: {'done' if done else 'in flight'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Ticket cannot be pickled or copied: it belongs to the client that made it")
