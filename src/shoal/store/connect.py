"""`shoal.connect`: from an address to a client."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import closing
from dataclasses import replace

from shoal import _core
from shoal.config import (
    TOKEN_SOURCES,
    ClientOptions,
    Environment,
    check_lane,
    check_name,
    check_timeout,
    read_environment,
)
from shoal.errors import BadInput, Unavailable, from_core
from shoal.store.catalogue import Catalogue, Directory, Opened, TableEntry, TableRequest
from shoal.store.client import Client, Session
from shoal.store.control import Address, ControlClient, ReplyT, list_tables
from shoal.store.messages import (
    ClientGrant,
    Done,
    JoinCluster,
    LoadStore,
    OpenTable,
    SaveStore,
    TableOpened,
    TensorWritten,
)
from shoal.store.placement_watch import PlacementWatch, core_placement
from shoal.store.pulse_relay import PulseRelay

__all__ = ["RemoteDirectory", "connect"]

_MEMORY = "memory://"
# A coordinator that refuses connections may be starting; a wrong address should not cost the whole deadline.
_REFUSED_PATIENCE_S = 3.0
_AGAIN_S = 0.1


class _LocalDirectory:
    """The catalogue of an embedded store."""

    def __init__(self) -> None:
        self._catalogue = Catalogue()
        self._lock = threading.Lock()
        self.life = secrets.token_hex(8)  # of the rows: another one after each load

    def open(self, request: TableRequest, timeout_s: float) -> Opened:
        with self._lock:
            return self._catalogue.open(request)

    def written(self, name: str, timeout_s: float) -> None:
        with self._lock:
            self._catalogue.written(name)

    def entries(self, timeout_s: float) -> list[TableEntry]:
        with self._lock:
            return list(self._catalogue)

    def close(self) -> None:
        pass


class RemoteDirectory:
    """The catalogue at the coordinator."""

    def __init__(
        self, control: ControlClient, watch: PlacementWatch, relay: PulseRelay | None = None
    ) -> None:
        self._control = control
        self._watch = watch
        self._relay = relay

    def open(self, request: TableRequest, timeout_s: float) -> Opened:
        return self._control.ask(OpenTable(request=request), TableOpened, timeout_s).opened

    def written(self, name: str, timeout_s: float) -> None:
        self._control.ask(TensorWritten(name=name), Done, timeout_s)

    def entries(self, timeout_s: float) -> list[TableEntry]:
        return list_tables(self._control, timeout_s)

    def order(self, request: SaveStore | LoadStore, reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """Ask for what all servers take part in. By a connection of its own: it may take long."""
        with closing(self._control.another()) as control:
            return control.ask(request, reply, timeout_s)

    def close(self) -> None:
        self._watch.close()
        self._control.close()
        if self._relay is not None:
            self._relay.close()


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    name: str | None = None,
    lane: str | None = None,
    timeout: float | None = None,
    options: ClientOptions | None = None,
) -> Client:
    """A client of the store at `address`.

    "memory://" is a store of its own inside this process, without sockets, gone with the client.
    "shoal://host:port" is a coordinator, or several with commas, as `shoal up` prints it; then `token`
    proves that this process may join (default: SHOAL_TOKEN, then the file SHOAL_TOKEN_FILE). Without
    `address`, SHOAL_ADDRESS.

    A `name` that was used before takes over from the older client of that name, which is fenced.
    `timeout` is the deadline of this and, by default, of every later call, in seconds; `lane` is auto,
    shm, unix or tcp. Raises BadInput, Refused (token), Unavailable or Timeout, never hangs.

    >>> import shoal
    >>> client = shoal.connect("memory://")
    >>> client
    <Client of memory://: open, tables=0>
    >>> client.close()
    """
    environment = read_environment()
    address = environment.address if address is None else address
    chosen = _options(environment, options, lane, timeout)
    if not isinstance(address, str) or not (address == _MEMORY or address.startswith("shoal://")):
        raise BadInput(
            f"address is {address!r}; allowed: 'memory://' for a store in this process, or "
            f"'shoal://host:port' for a coordinator (`shoal up` prints it)"
        )
    if name is not None:
        check_name("name", name)
    if address == _MEMORY:
        try:
            core = _core.Client.embedded()
        except _core.CoreError as error:
            raise from_core(error, address) from None
        return Client(Session(core, address, chosen, name), _LocalDirectory())
    return _join(Address.parse(address), environment.find_token(token), name, chosen)


def _options(
    environment: Environment, options: ClientOptions | None, lane: str | None, timeout: float | None
) -> ClientOptions:
    """Default < environment < options < argument."""
    base = options
    if base is not None and not isinstance(base, ClientOptions):
        raise BadInput(f"options is {base!r}; allowed: an object of shoal.ClientOptions")
    if base is None:
        base = ClientOptions()
        base = ClientOptions(
            timeout_s=environment.timeout_s or base.timeout_s,
            lane=environment.lane or base.lane,
            reads=environment.reads or base.reads,
        )
    return replace(
        base,
        timeout_s=base.timeout_s if timeout is None else check_timeout(timeout),
        lane=base.lane if lane is None else check_lane(lane),
    )


def _join(address: Address, token: str | None, name: str | None, options: ClientOptions) -> Client:
    if token is None:
        raise BadInput(f"no token for {address}. {TOKEN_SOURCES}")
    control = ControlClient(address, token)
    relay = PulseRelay(address) if address.others else None
    try:
        # The coordinator answers by its own deadline, a little earlier, and says whom it waits for.
        request = JoinCluster(name=name, wait_s=0.9 * options.timeout_s)
        grant = control.ask(request, ClientGrant, options.timeout_s, _REFUSED_PATIENCE_S)
        core = _connect_core(address, address if relay is None else relay.address, grant, token, options)
    except BaseException:
        control.close()
        raise
    session = Session(core, str(address), options, name, grant.incarnation)
    watch = PlacementWatch(address, token, session, grant)
    session.aside = watch.aside
    directory: Directory = RemoteDirectory(control, watch, relay)
    return Client(session, directory)


def _connect_core(
    address: Address, pulse: Address, grant: ClientGrant, token: str, options: ClientOptions
) -> _core.Client:
    """Also where the coordinator dies just now: the core calls it once only before it is connected."""
    end = time.monotonic() + (options.timeout_s if address.others else _REFUSED_PATIENCE_S)
    while True:
        try:
            return _core.Client.connect(
                client_id=grant.client_id,
                incarnation=grant.incarnation,
                token=token.encode(),
                placement=core_placement(grant.placement),
                lane=options.lane,
                timeout_s=options.timeout_s,
                shm_bytes_max=options.shm_bytes_max,
                any_copy=options.reads == "any",
                coordinator_host=pulse.host,
                coordinator_port=pulse.port,
            )
        except _core.CoreError as error:
            failure = from_core(error, str(address))
            if not isinstance(failure, Unavailable) or time.monotonic() + _AGAIN_S >= end:
                raise failure from None
        time.sleep(_AGAIN_S)
