"""Clients: one process's door to a store.

A client opens tables and tensors. It belongs to the process that made it; threads share it freely. The
catalogue behind it (`Directory`) lies in the client for an embedded store and at the coordinator
otherwise; the code here does not tell them apart.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np

from shoal import _core
from shoal.config import ClientOptions, check_choice, check_name, check_timeout
from shoal.errors import BadInput, Closed, Fenced, ShoalError, Timeout, Unavailable, WrongProcess, from_core
from shoal.init import Initializer
from shoal.optim import Optimizer
from shoal.placement import Range
from shoal.store.arrays import as_floats, is_torch
from shoal.store.catalogue import Directory, Opened, TableEntry, TableRequest, describe
from shoal.store.table import Table
from shoal.store.tensor import Tensor
from shoal.types import ArrayLike, Codec, Waitable

P = ParamSpec("P")
T = TypeVar("T")

CHECKPOINT_S = 3600.0
_POLL_FIRST_S = 0.002
_POLL_MAX_S = 0.05
# The core ends its timeouts so, whether there is a ticket or not; here it is known.
_CORE_ADVICE = "it is still being tried"


class Session:
    """What a client and its tables share: the core's client, the deadline, and whose it is."""

    def __init__(
        self,
        core: _core.Client,
        address: str,
        options: ClientOptions,
        name: str | None = None,
        incarnation: int = 1,
    ) -> None:
        self.core = core
        self.address = address
        self.name = name
        self.incarnation = incarnation
        self.pid = os.getpid()
        self.closed = False
        self.pushes_lost = 0
        self.aside: Callable[[], str] = str  # what else is amiss, for errors that may come of it
        self._timeout_s = options.timeout_s
        self._close_at_exit()

    def begin_life(self, core: _core.Client, incarnation: int) -> None:
        """Go on with another core; what the one before had on its way is void."""
        before, self.core, self.incarnation = self.core, core, incarnation
        self._close_at_exit()
        before.close()

    def _close_at_exit(self) -> None:
        # Also at the end of the interpreter, while threads may still take the GIL: after that an operation
        # in flight could not let go of its array.
        weakref.finalize(self, _close_core, self.core, self.pid)

    def check_process(self) -> None:
        """Raise in a forked child."""
        if os.getpid() != self.pid:
            raise WrongProcess(
                f"this client of {self.address} belongs to process {self.pid}, and this is process "
                f"{os.getpid()}, forked from it. Call shoal.connect() in the new process; in a DataLoader "
                f"worker pull in the training loop instead"
            )

    def check(self) -> None:
        """Raise unless this process may use the client, and it is open."""
        self.check_process()
        if self.closed:
            raise Closed(f"this client of {self.address} was closed; call shoal.connect() again")

    def deadline(self, timeout: float | None) -> float:
        """Seconds that a call may take. Every call begins here."""
        self.check()
        return self._timeout_s if timeout is None else check_timeout(timeout)

    def call(self, where: str, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> T:
        """What a function of the core gives; a failure is raised as one of `where`."""
        try:
            return function(*arguments, **options)
        except _core.CoreError as error:
            raise self.error(error, where) from None

    def error(self, error: _core.CoreError, where: str, ticket: Waitable | None = None) -> ShoalError:
        """What a failure of the core means to the caller: the thing first, at the end what to do.

        `ticket` is the operation that was waited for; other calls can only be repeated.
        """
        failure = from_core(error, where)
        if isinstance(failure, Fenced):
            who = "this client" if self.name is None else f"client {self.name!r}"
            return Fenced(
                f"{where}: {who} was fenced: a newer client of the same name took over. To go on, call "
                f"shoal.connect() again, with a name of its own if both shall work ({error.args[1]})"
            )
        if isinstance(failure, Timeout):
            seen = str(failure).partition(_CORE_ADVICE)[0].rstrip("; ")
            then = "the call may be repeated"
            if ticket is not None:
                then = "it goes on in the background: error.ticket.wait() waits for it again"
            failure = Timeout(f"{seen}{self.aside()}; {then}")
            failure.ticket = ticket
        elif isinstance(failure, Unavailable):
            failure = Unavailable(f"{failure}{self.aside()}")
        return failure


def _close_core(core: _core.Client, pid: int) -> None:
    if os.getpid() == pid:
        core.close()


class Client:
    """A connection to a store; made by `shoal.connect` or `LocalCluster.connect`.

    Safe from many threads. Use it as a context manager, or call `close`. It cannot be pickled, and in a
    forked child every call raises `shoal.errors.WrongProcess`.

    >>> import shoal
    >>> with shoal.connect("memory://") as client:
    ...     items = client.table("items", dim=4, optimizer=shoal.optim.Adagrad(lr=0.05))
    ...     items.pull([1, 2]).shape
    (2, 4)
    """

    def __init__(self, session: Session, directory: Directory) -> None:
        self._session = session
        self._directory = directory
        self._tensor_lock = threading.Lock()
        self._opened: dict[str, TableEntry] = {}
        self.on_fenced: Callable[[], None] | None = None  # what `reading` does about it: a worker's rejoin

    @property
    def address(self) -> str:
        """What it is connected to."""
        return self._session.address

    @property
    def name(self) -> str | None:
        """The name under which it joined, if any."""
        return self._session.name

    @property
    def incarnation(self) -> int:
        """How many clients of its name there have been, with this one."""
        return self._session.incarnation

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    def table(
        self,
        name: str,
        *,
        dim: int | None = None,
        optimizer: Optimizer | None = None,
        init: Initializer | None = None,
        init_if_new: Initializer | None = None,
        seed: int | None = None,
        wire: Codec = "fp32",
        placement: Range | None = None,
        retune: bool = True,
    ) -> Table:
        """Create or open the table `name`.

        To create one, `dim` and `optimizer` are needed; `init` is `init_if_new`, or else Zeros, `seed` 0
        and keys are hashed unless said otherwise. If it exists, what is given must agree with it (Mismatch
        shows both sides) and what is not given is taken as it is; only hyper-parameters, such as lr, are
        updated, and with `retune=False` they stay as well. `wire` is this handle's own: fp32, fp16, bf16 or
        int8 values on the way.

        >>> import shoal
        >>> client = shoal.connect("memory://")
        >>> client.table("items", dim=4, optimizer=shoal.optim.SGD(lr=0.1), seed=7).dim
        4
        >>> client.table("items").seed
        7
        """
        request = TableRequest(
            name=check_name("name", name),
            dim=_check("dim", dim, int | np.integer, int),
            optimizer=_check("optimizer", optimizer, Optimizer),
            init=_check("init", init, Initializer),
            init_if_new=_check("init_if_new", init_if_new, Initializer),
            seed=_check("seed", seed, int | np.integer, int),
            placement=_check("placement", placement, Range),
            retune=retune,
        )
        codec = check_choice("wire", wire, Codec)
        seconds = self._session.deadline(None)
        return Table(self._session, self._open(request, seconds).entry, codec)

    def tensor(
        self,
        name: str,
        value: ArrayLike = None,
        *,
        optimizer: Optimizer | None = None,
        wire: Codec = "fp32",
        retune: bool = True,
    ) -> Tensor:
        """Create or open the dense tensor `name`.

        The first client that brings a `value` (float32, any shape) sets it; those that come later get
        what is there, and their value must only agree in shape. Without `value` it is opened.
        Hyper-parameters that are given take the place of those that are there, unless `retune=False`.

        >>> import numpy as np, shoal
        >>> client = shoal.connect("memory://")
        >>> w = client.tensor("w", np.ones(3, np.float32), optimizer=shoal.optim.SGD(lr=0.1))
        >>> client.tensor("w").pull().tolist()
        [1.0, 1.0, 1.0]
        """
        where = describe(check_name("name", name), dense=True)
        codec = check_choice("wire", wire, Codec)
        seconds = self._session.deadline(None)
        array = None
        if value is not None:
            shape = getattr(value, "shape", None)
            array = as_floats(value, np.shape(value) if shape is None else tuple(shape), "value", where)
        request = TableRequest(
            name=name,
            dense=True,
            shape=None if array is None else array.shape,
            optimizer=_check("optimizer", optimizer, Optimizer),
            brings_value=array is not None,
            retune=retune,
        )
        # One at a time: the coordinator tells clients apart, and this client's threads must not write two
        # first values at once.
        if not self._tensor_lock.acquire(timeout=seconds):
            raise Timeout(
                f"{where}: another thread of this client has been opening a tensor for {seconds:g} s"
            )
        try:
            opened = self._open_written(request, seconds)
            if array is not None and opened.write != "none":
                self._write(opened, array.reshape(-1), seconds)
        finally:
            self._tensor_lock.release()
        return Tensor(self._session, opened.entry, codec, is_torch(value))

    def fork(self) -> Client:
        """Another client of the same embedded store, for a thread that is a worker of its own.

        Not for a store behind servers: there each worker connects.
        """
        self._session.check()
        if self.address != "memory://":
            raise BadInput(f"fork: {self.address} is not an embedded store; call shoal.connect() once more")
        session = self._session
        options = ClientOptions(timeout_s=session.deadline(None))
        return Client(Session(session.core.fork(), session.address, options, session.name), self._directory)

    def stats(self) -> dict[str, Any]:
        """Figures of this client: lane of each server, requests, bytes, reconnects, retries.

        `reads_behind`: pulls, counted on each shard, that lacked what this client had been acknowledged or
        had read there by the time they came; `versions_behind_max`: how many of the shard's updates at most.
        `waits_s`: by server, for how long the oldest request has had no answer, those that wait for other
        workers left out. `pushes_lost`: acknowledged under `replication="weak"` and gone with a server,
        counted on each shard.
        """
        self._session.check()
        counters = self._session.call(self.address, self._session.core.counters)
        return {**counters, "pushes_lost": self._session.pushes_lost}

    def save(self, url: str, *, timeout: float = CHECKPOINT_S) -> str:
        """Write a checkpoint of the whole store under `url`: file://, s3://, ...; returns its name.

        Rows, optimizer state and all that goes with them, of one instant; servers write their own. Others
        may push and pull meanwhile.

        >>> import shoal
        >>> client = shoal.connect("memory://")
        >>> _ = client.table("items", dim=4, optimizer=shoal.optim.SGD(lr=0.1))
        >>> client.save("memory://doctest")[:6]
        '000001'
        """
        name: str = _checkpoints().save(self, url, self._session.deadline(timeout))
        return name

    def load(self, url: str, *, timeout: float = CHECKPOINT_S) -> str:
        """Make the store's rows those of a checkpoint; returns its name.

        `url` is where `save` wrote, for the newest that is whole, or one of them (URL/NAME). It may have been
        saved by another number of servers. Tables that do not exist here are created; those that do must
        have the same layout, or Mismatch lists what differs. What is damaged is refused before anything
        is changed; what cannot be read now is Unavailable. Nobody else should push meanwhile.
        """
        name: str = _checkpoints().load(self, url, self._session.deadline(timeout)).name
        return name

    def rejoin(self) -> None:
        """Go on after an eviction of a worker's client: its process stood still, or was cut off.

        Tables and tensors that it has opened stay good. What was on its way when it was evicted may be on
        some of the servers. Raises Fenced if another client has taken its name meanwhile.
        """
        self._directory.rejoin(self._session)
        for entry in self._opened.values():
            self._declare(entry, self._session.deadline(None))

    def reading(self, pull: Callable[[], T]) -> T:
        """What `pull()` gives; again after an eviction that `on_fenced` has mended."""
        try:
            return pull()
        except Fenced:
            if self.on_fenced is None:
                raise
            self.on_fenced()
            return pull()

    def close(self) -> None:
        """Close the connections. What was not waited for may or may not take effect. Twice is harmless."""
        session = self._session
        if session.closed or os.getpid() != session.pid:
            return
        session.closed = True
        session.core.close()  # first: it takes its leave of the coordinator
        self._directory.close()

    def _open(self, request: TableRequest, seconds: float) -> Opened:
        opened = self._directory.open(request, seconds)
        self._opened[request.name] = opened.entry
        self._declare(opened.entry, seconds)
        return opened

    def _declare(self, entry: TableEntry, seconds: float) -> None:
        self._session.call(entry.what, self._session.core.declare, core_spec(entry), seconds)

    def _open_written(self, request: TableRequest, seconds: float) -> Opened:
        """Open a tensor that has its first value, or that this client is to write."""
        end = time.monotonic() + seconds
        pause_s = _POLL_FIRST_S
        while True:
            opened = self._open(request, seconds)
            if opened.write != "wait":
                return opened
            if time.monotonic() + pause_s > end:
                raise Timeout(
                    f"{opened.entry.what}: the client that created it wrote no value in {seconds:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)

    def _write(self, opened: Opened, flat: Any, seconds: float) -> None:
        """Write a tensor's first value; over what another opener left half written, where it died."""
        session, entry = self._session, opened.entry
        begin = session.core.init_tensor if opened.write == "first" else session.core.assign_tensor
        ticket = session.call(entry.what, begin, entry.id, flat, timeout_s=seconds)
        session.call(entry.what, ticket.wait, seconds)
        self._directory.written(entry.name, seconds)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            self._session.check()
            state = f"open, tables={len(self._opened)}"
        except ShoalError as error:
            state = type(error).__name__
        named = f" as {self.name!r}" if self.name else ""
        return f"<Client of {self.address}{named}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a Client cannot be pickled or copied: it belongs to process {self._session.pid}. Call "
            f"shoal.connect({self.address!r}) in the other process"
        )


def _checkpoints() -> Any:
    """The functions behind save and load, at their first use: they lie above this layer, with fsspec."""
    return importlib.import_module("shoal.checkpoint.client")


def _check(name: str, value: Any, kind: Any, make: Any = None) -> Any:
    """`value` if it is None or of that kind, which a bool never is."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = getattr(kind, "__name__", "int")
        hint = f", such as an object of shoal.{name[:5]}" if name == "optimizer" else ""
        hint = ", such as an object of shoal.init" if name.startswith("init") else hint
        raise BadInput(f"{name} is {value!r}; allowed: {expected}{hint}")
    return value if make is None else make(value)


def core_spec(entry: TableEntry) -> _core.TableSpec:
    """The table as the core knows it."""
    spec = _core.TableSpec()
    spec.id = entry.id
    spec.name = entry.name
    spec.generation = entry.generation
    spec.dim = entry.dim
    spec.dense = entry.shape is not None
    spec.optimizer = entry.optimizer.to_core()
    spec.init = entry.init.to_core()
    spec.seed = entry.seed
    if entry.placement is not None:
        spec.range_low, spec.range_high = entry.placement.low, entry.placement.high
    return spec
