"""Every error that Shoal raises, split by what the caller can do about it.

    ShoalError
    ├── BadInput (ValueError)              fix the call; nothing was changed
    │   └── Mismatch                       it exists with other settings: take those, or another name
    ├── UnknownTable (LookupError)         create it first, or correct the name
    ├── Refused                            wrong token, protocol version or address: fix the set-up
    ├── Fenced                             a newer client of the same name exists: stop, or connect again
    ├── Unavailable (ConnectionError)      a process cannot be reached: look at it, then try again
    ├── Timeout (TimeoutError)             the deadline passed: wait again (`.ticket`), or give up
    ├── Unbound (RuntimeError)             a module without a store: prepare its model, or bind it
    ├── Closed                             connect again
    │   └── WrongProcess (RuntimeError)    made before a fork: connect in this process
    └── Internal                           our mistake: please report it

The C++ core and the control messages carry a number for each; `from_code` is the one place that knows
them. This module does no I/O and imports nothing of Shoal.
"""

# The names are public and read as what happened; the suffix Error would add nothing.
# ruff: noqa: N818

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.types import Waitable

__all__ = [
    "BadInput",
    "Closed",
    "Fenced",
    "Internal",
    "Mismatch",
    "Refused",
    "ShoalError",
    "Timeout",
    "Unavailable",
    "Unbound",
    "UnknownTable",
    "WrongProcess",
    "code_of",
    "from_code",
    "from_core",
]


class ShoalError(Exception):
    """What all errors of Shoal have in common.

    >>> import shoal
    >>> try:
    ...     shoal.connect("memory://").table("nothing")
    ... except shoal.ShoalError as error:
    ...     print(type(error).__name__)
    UnknownTable
    """


class BadInput(ShoalError, ValueError):
    """An argument cannot be used. The message names it, the value seen and what is allowed.

    >>> import shoal
    >>> shoal.optim.SGD(lr=-1.0)
    Traceback (most recent call last):
        ...
    shoal.errors.BadInput: SGD: lr is -1.0; it must be a finite number, at least 0
    """


class Mismatch(BadInput):
    """A table or tensor of this name exists with other settings. The message shows both."""


class UnknownTable(ShoalError, LookupError):
    """No table or tensor has this name. The message lists those that exist."""


class Refused(ShoalError):
    """The other side does not accept this process: token, protocol version, or what it sent."""


class Fenced(ShoalError):
    """A newer client of the same name took over; what this one sends is refused."""


class Unavailable(ShoalError, ConnectionError):
    """A process cannot be reached. The message names its address."""


class Timeout(ShoalError, TimeoutError):
    """The deadline passed. `ticket` is the operation that goes on, where there is one."""

    ticket: Waitable | None = None

    def __reduce__(self) -> tuple[type[Timeout], tuple[str]]:
        # The ticket belongs to this process; the message alone may travel.
        return type(self), (str(self),)


class Unbound(ShoalError, RuntimeError):
    """A module of `shoal.nn` was used before it had a store. The message names the ways to give it one."""


class Closed(ShoalError):
    """The client, table or cluster was closed before this call."""


class WrongProcess(Closed, RuntimeError):
    """A client was used in another process than the one that made it, as after a fork."""


class Internal(ShoalError):
    """A mistake of Shoal's own. Please report it with the message."""


# The numbers of core/base/status.h; they travel on the wire and are never reused.
_CODES: dict[int, type[ShoalError]] = {
    1: BadInput,
    2: Mismatch,
    3: UnknownTable,
    4: Refused,
    5: Fenced,
    6: Unavailable,
    7: Timeout,
    8: Closed,
    9: Internal,
    10: Unavailable,  # the core's `moved`, where a deadline came before the shard was found
}
_CODE_INTERNAL = 9


def from_code(code: int, message: str) -> ShoalError:
    """The error for a code of the core or of a control message.

    >>> from_code(7, "no answer")
    Timeout('no answer')
    """
    kind = _CODES.get(code)
    if kind is None:
        return Internal(f"unknown error code {code}: {message}")
    return kind(message)


def code_of(error: ShoalError) -> int:
    """The code that stands for `error` on the wire.

    >>> code_of(UnknownTable("x"))
    3
    """
    for kind in type(error).__mro__:
        for code, known in _CODES.items():
            if kind is known:
                return code
    return _CODE_INTERNAL


def from_core(error: Exception, where: str = "") -> ShoalError:
    """The error for a `CoreError`, whose args are (code, message); `where` leads the message."""
    code, message = error.args
    # The core often names the table itself; once is enough.
    return from_code(int(code), str(message) if not where or where in message else f"{where}: {message}")
