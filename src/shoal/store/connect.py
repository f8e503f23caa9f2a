"""`shoal.connect`: from an address to a client."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from shoal import _core
from shoal.config import (
    TOKEN_SOURCES,
    ClientOptions,
    Environment,
    check_choice,
    check_name,
    check_timeout,
    read_environment,
)
from shoal.errors import BadInput, Internal, Unavailable, from_core
from shoal.store.catalogue import Catalogue, Opened, TableEntry, TableRequest
from shoal.store.client import Client, Session
from shoal.store.control import Address, ControlClient, ReplyT, list_tables
from shoal.store.cut_call import CutCall
from shoal.store.messages import (
    AttendCut,
    ClientGrant,
    CutNews,
    Done,
    JoinCluster,
    LoadStore,
    OpenTable,
    SaveStore,
    StoreSaved,
    TableOpened,
    TensorWritten,
)
from shoal.store.placement_watch import PlacementWatch, core_placement
from shoal.types import Lane

_MEMORY = "memory://"
# A coordinator that refuses connections may be starting; a wrong address should not cost the whole deadline.
_REFUSED_PATIENCE_S = 3.0
_AGAIN_S = 0.1
_ATTEND_S = 5.0


class _LocalDirectory:
    """The catalogue of an embedded store."""

    def __init__(self) -> None:
        self._catalogue = Catalogue()
        self._lock = threading.Lock()
        self.life = secrets.token_hex(8)  # of the rows: another one after each load
        self.call = CutCall()
        self._attended = threading.Condition()

    def open(self, request: TableRequest, timeout_s: float) -> Opened:
        with self._lock:
            return self._catalogue.open(request)

    def written(self, name: str, timeout_s: float) -> None:
        with self._lock:
            self._catalogue.written(name)

    def entries(self, timeout_s: float) -> list[TableEntry]:
        with self._lock:
            return list(self._catalogue)

    def rejoin(self, session: Session) -> None:
        raise Internal("nobody is evicted from a store of this process")

    attend_every_s = 0.02  # how often a worker may ask

    def attend(self, request: AttendCut) -> CutNews:
        """What workers are told of cuts."""
        with self._attended:
            news = self.call.attend(request.rank, request)
            self._attended.notify_all()
            return news

    @contextmanager
    def calling(self, url: str, name: str, seconds: float) -> Iterator[None]:
        """Call the workers, and wait until all are ready, for so long; without seconds nobody is called."""
        with self._attended:
            if seconds > 0:
                self.call.open(url, name)
                self._attended.wait_for(lambda: not self.call.missing, seconds)
                self.call.begins(True)
        try:
            yield
        finally:
            with self._attended:
                self.call.end()

    def cut(self, clocks: Sequence[int]) -> StoreSaved | None:
        """Shards are cut: what is to be known of the workers, also which are ready of those that were called.
        None: it lies within a step, or a batch.
        """
        with self._attended:
            if self.call.splits_a_step(clocks) or self.call.splits_a_batch(clocks):
                return None
            workers = self.call.made(clocks) if self.call.news.state == "begins" else ()
            restored, came = self.call.news.restored, self.call.came
        return StoreSaved(clocks=tuple(clocks), workers=workers, restored=restored, came=came)

    def close(self) -> None:
        pass


class RemoteDirectory:
    """The catalogue at the coordinator, which also says who a client is and where shards lie."""

    def __init__(self, control: ControlClient, token: str, options: ClientOptions) -> None:
        self._control = control
        self._token = token
        self._options = options
        self._watch: PlacementWatch | None = None

    def connect(self, grant: ClientGrant) -> _core.Client:
        """The core's client of that life."""
        return _connect_core(self._control.address, grant, self._token, self._options)

    def watch(self, session: Session, grant: ClientGrant) -> None:
        """Tell the session's core from now on where shards have gone since the grant."""
        if self._watch is not None:
            self._watch.close()
        self._watch = PlacementWatch(self._control.address, self._token, session, grant)
        session.aside = self._watch.aside

    def rejoin(self, session: Session) -> None:
        """Go on under the next life of its name; Fenced where another client has that."""
        request = JoinCluster(
            name=session.name, wait_s=0.9 * self._options.timeout_s, instead_of=session.incarnation
        )
        grant = self._control.ask(request, ClientGrant, self._options.timeout_s)
        session.begin_life(self.connect(grant), grant.incarnation)
        self.watch(session, grant)

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

    attend_every_s = 0.5

    def attend(self, request: AttendCut) -> CutNews:
        """What workers are told of cuts."""
        return self._control.ask(request, CutNews, _ATTEND_S, patience_s=0.0)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._control.close()


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
            f"'shoal://host:port' for a coordinator (`shoal up` prints it), here or in SHOAL_ADDRESS"
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
        lane=base.lane if lane is None else check_choice("lane", lane, Lane),
    )


def _join(address: Address, token: str | None, name: str | None, options: ClientOptions) -> Client:
    if token is None:
        raise BadInput(f"no token for {address}. {TOKEN_SOURCES}")
    control = ControlClient(address, token)
    try:
        # The coordinator answers by its own deadline, a little earlier, and says whom it waits for.
        request = JoinCluster(name=name, wait_s=0.9 * options.timeout_s)
        grant = control.ask(request, ClientGrant, options.timeout_s, _REFUSED_PATIENCE_S)
        return client_of(control, token, name, options, grant)
    except BaseException:
        control.close()
        raise


def client_of(
    control: ControlClient, token: str, name: str | None, options: ClientOptions, grant: ClientGrant
) -> Client:
    """The client that the coordinator has granted; `control` is closed with it."""
    directory = RemoteDirectory(control, token, options)
    session = Session(directory.connect(grant), str(control.address), options, name, grant.incarnation)
    directory.watch(session, grant)
    return Client(session, directory)


def _connect_core(address: Address, grant: ClientGrant, token: str, options: ClientOptions) -> _core.Client:
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
                coordinators=[(one.host, one.port) for one in address.all],
            )
        except _core.CoreError as error:
            failure = from_core(error, str(address))
            if not isinstance(failure, Unavailable) or time.monotonic() + _AGAIN_S >= end:
                raise failure from None
        time.sleep(_AGAIN_S)
