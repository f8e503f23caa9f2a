"""Tickets: operations that are under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

from shoal import _core
from shoal.config import check_timeout
from shoal.store.arrays import to_torch

if TYPE_CHECKING:
    from shoal.store.client import Session


class Ticket:
    """One pull, push or assign in flight. Any thread may wait; dropping a ticket cancels nothing.

    >>> import shoal
    >>> client = shoal.connect("memory://")
    >>> items = client.table("items", dim=2, optimizer=shoal.optim.SGD(lr=1.0))
    >>> ticket = items.pull_async([1, 2, 3])
    >>> ticket.wait(timeout=5).shape
    (3, 2)
    """

    __slots__ = (
        "_core",
        "_finished",
        "_out",
        "_result",
        "_session",
        "_shape",
        "_timeout_s",
        "_torch",
        "_where",
    )

    def __init__(
        self,
        core: _core.Ticket,
        where: str,
        timeout_s: float,
        session: Session,
        *,
        shape: tuple[int, ...] = (),
        out: Any = None,
        torch: bool = False,
    ) -> None:
        self._core = core
        self._where = where
        self._timeout_s = timeout_s
        self._session = session  # while a ticket lives its client is not closed for want of a reference
        self._shape = shape
        self._out = out
        self._torch = torch
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

    def _rest(self, started: float) -> Any:
        """The result of a call that began at `started`: it waits for what is left of its time."""
        return self._wait(max(0.0, started + self._timeout_s - time.monotonic()))

    def _wait(self, seconds: float) -> Any:
        if self._finished:
            return self._result
        try:
            array = self._core.wait(seconds)
        except _core.CoreError as error:
            raise self._session.error(error, self._where, ticket=self) from None
        if self._out is not None:
            self._result = self._out
        elif array is not None:
            if array.shape != self._shape:
                array = array.reshape(self._shape)
            self._result = to_torch(array) if self._torch else array
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
