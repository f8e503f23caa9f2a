"""Control messages: what clients, servers and the coordinator say to each other. Not on any step's path.

A message is a tagged msgspec Struct in a frame: u32 length, little endian, then msgpack. Decoding builds
these structs and nothing else; whatever does not fit is refused. The first four are the handshake, by
which both ends prove that they have the token without sending it:

    client                                   coordinator
    Hello(version, nonce)          ->
                                   <-        Challenge(nonce)
    Proof(HMAC(token, client label + both nonces))  ->
                                   <-        Welcome(HMAC(token, coordinator label + both nonces))

After it each request gets one reply, in order. A `Failure` carries a code of `shoal.errors`. The one thing
that the coordinator says unasked is a `PartOrder` to a server, which answers by reports that get no reply.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Literal

import msgspec

from shoal.errors import Refused
from shoal.store.catalogue import Opened, TableEntry, TableRequest, decode_setting

VERSION = 1
FRAME_BYTES_MAX = 1 << 20
HANDSHAKE_BYTES_MAX = 512
LENGTH_BYTES = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What a frame carries: one of the handshake, a request or a reply."""


class Request(Message, frozen=True, kw_only=True):
    """What is asked of the coordinator, or told to it."""


class Reply(Message, frozen=True, kw_only=True):
    """What the coordinator says."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The first message on a connection."""

    version: int
    nonce: bytes


class Challenge(Message, frozen=True, kw_only=True, tag="challenge"):
    """The coordinator's half of what must be signed."""

    nonce: bytes


class Proof(Message, frozen=True, kw_only=True, tag="proof"):
    """The client has the token."""

    mac: bytes


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The coordinator has it, too; requests may begin."""

    mac: bytes


class GetCluster(Request, frozen=True, kw_only=True, tag="get_cluster"):
    """What a server must know before it starts."""


class RegisterServer(Request, frozen=True, kw_only=True, tag="register_server"):
    """A server is up. `identity` is its own random name: registering again is harmless."""

    identity: str
    pid: int
    host: str
    port: int
    unix_path: str
    shards: int
    index: int | None = None


class JoinCluster(Request, frozen=True, kw_only=True, tag="join"):
    """A client wants an id. Waits up to `wait_s` for the servers to be there.

    `instead_of`: the incarnation that it was, and that was evicted; Fenced if another client has its place.
    """

    name: str | None
    wait_s: float
    instead_of: int | None = None


class OpenTable(Request, frozen=True, kw_only=True, tag="open"):
    """Create or open a table or tensor."""

    request: TableRequest


class TensorWritten(Request, frozen=True, kw_only=True, tag="written"):
    """The first value of a tensor is in place."""

    name: str


class ListTables(Request, frozen=True, kw_only=True, tag="list_tables"):
    """The tables with an id above `after`, some at a time."""

    after: int = 0


class GetStatus(Request, frozen=True, kw_only=True, tag="get_status"):
    """Who is there."""


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """A server has become the head of a shard in this term, with what it held then."""

    shard: int
    term: int
    version: int
    entry: int


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A shard began its term with `version`, and `last` was acknowledged before; and so many of this client's
    pushes that no copy had (of a weak chain alone; elsewhere they are not counted one by one)."""

    client: int = 0
    shard: int
    term: int
    version: int
    last: int = 0
    pushes: int = 0


class WatchPlacement(Request, frozen=True, kw_only=True, tag="watch"):
    """Answered when there is a placement newer than `after`, or work for this server, or after `wait_s`.

    A server says who it is, and thereby that it lives: its lease is renewed. `filling`: the orders that it
    carries out already; `loads`: of each of its shards the bytes, and the floats read and written since it
    began; `takeovers`: what it heads since the last time. A client says the number of the last takeover that
    it has `heard` of, and what it has lost by them.
    """

    after: int
    wait_s: float
    server: int | None = None
    identity: str = ""
    filling: tuple[int, ...] = ()
    loads: tuple[tuple[int, int, int], ...] = ()
    takeovers: tuple[Takeover, ...] = ()
    heard: int = 0
    lost: tuple[Lost, ...] = ()


class Filled(Request, frozen=True, kw_only=True, tag="filled"):
    """A server has filled another, as the order of that `number` told it; `error` says why it has not."""

    number: int
    shard: int
    term: int
    target: int
    error: str = ""


class EvictServer(Request, frozen=True, kw_only=True, tag="evict"):
    """Its process was seen to end, or it is to end: shards go on without it."""

    index: int
    why: str


class RemoveServer(Request, frozen=True, kw_only=True, tag="remove"):
    """Move its shards to the other servers, and then let it go."""

    index: int


class SaveStore(Request, frozen=True, kw_only=True, tag="save"):
    """All servers are to write their shards, as of one cut, under URL/name. Answered when they have.

    `call_s`: how long workers have to come to the end of a step, so as to add their state; 0: none is wanted.
    `gives_way`: to shards that are short of copies, if it takes long; it is then to be made `again`.
    """

    url: str
    name: str
    base: str | None = None
    wait_s: float
    call_s: float = 0.0
    gives_way: bool = True


class AttendCut(Request, frozen=True, kw_only=True, tag="attend"):
    """A worker asks whether a cut is wanted; `here`: it adds its state. `ready`: it has a copy for the
    checkpoint of that name. `aligned`: the cut must not lie within a step that it makes together with others.
    `stands`: it saves, and makes no step; `waits`: it may be in one that ends when others make theirs.
    `whole`: it makes several steps with a batch, and has copies of these clocks, which lie between batches.
    `dismissed`: the job was made smaller, and nobody will come in its place; who let it go says so.
    """

    rank: int
    ready: str = ""
    aligned: bool = False
    stands: bool = False
    waits: bool = False
    here: bool = True
    whole: tuple[int, ...] | None = None
    dismissed: bool = False


class LoadStore(Request, frozen=True, kw_only=True, tag="load"):
    """All servers are to read URL/name; first all check it. `tables`: its ids -> those of this cluster."""

    url: str
    name: str
    tables: dict[int, int]
    resume: bool = False
    wait_s: float


class ReloadStore(Request, frozen=True, kw_only=True, tag="reload"):
    """These servers have ended: what only they had is read from URL/name by others, which then have it.

    `together`: all shards go back to it, as they must where the sync shard is among the lost. Else the others
    go on as they are.
    """

    lost: tuple[int, ...]
    url: str
    name: str
    together: bool
    wait_s: float


class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one server has written of a checkpoint."""

    name: str
    sha256: str
    rows: int
    bytes: int


class PartReport(Request, frozen=True, kw_only=True, tag="part"):
    """How far a server is with an order. `part` None of one that was saved: that base is not to be had."""

    number: int
    did: Literal["begun", "saved", "checked", "loaded", "failed"]
    part: PartInfo | None = None
    clocks: tuple[int, ...] = ()
    code: int = 0
    message: str = ""


class PartOrder(Reply, frozen=True, kw_only=True, tag="order"):
    """What a server is to do with these of its shards; another one than the last ends that."""

    number: int
    do: Literal["save", "check", "load", "stop"]
    url: str = ""
    name: str = ""
    base: str | None = None
    index: int = 0
    shards: tuple[int, ...] = ()
    tables: dict[int, int] = {}
    resume: bool = False
    reload: Literal["", "alone", "together"] = ""


class StoreSaved(Reply, frozen=True, kw_only=True, tag="saved"):
    """All parts are written. `workers`: the ranks that write their state. `again`: why not, instead.

    `restored`: the checkpoint (URL/NAME) that clocks were last taken back to; `came`: the ranks that have
    prepared a model since.
    """

    parts: tuple[PartInfo, ...] = ()
    clocks: tuple[int, ...] = ()
    shards: int = 0
    workers: tuple[int, ...] = ()
    restored: str = ""
    came: tuple[int, ...] = ()
    again: str = ""


class CutNews(Reply, frozen=True, kw_only=True, tag="cut"):
    """The last cut that workers were called to. It `begins`: clocks may be those of any moment from then on,
    until it is `made`; then `clocks` are the workers' in it. `restored`: the checkpoint (URL/NAME) that the
    clocks were last taken back to.
    """

    url: str = ""
    name: str = ""
    state: Literal["", "called", "begins", "made"] = ""
    clocks: tuple[int, ...] = ()
    restored: str = ""


class ClusterInfo(Reply, frozen=True, kw_only=True, tag="cluster"):
    """What a cluster is. `weak`: replicas may lag behind what was acknowledged."""

    shards: int
    servers: int
    replicas: int = 0
    weak: bool = False


class ServerAdmitted(Reply, frozen=True, kw_only=True, tag="admitted"):
    """A server's place for the life of the cluster. `life` counts coordinators, one after the other."""

    index: int
    life: int = 0


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One server. `state`: up, gone when its control connection is closed, leaving, left, or evicted."""

    index: int
    pid: int
    host: str
    port: int
    unix_path: str
    state: str


class PlacementInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where every shard is: its chain of servers, the head first, and its term."""

    version: int
    weak: bool
    servers: tuple[ServerInfo, ...]
    terms: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]


class ClientGrant(Reply, frozen=True, kw_only=True, tag="granted"):
    """A client's identity, and where every shard is."""

    client_id: int
    incarnation: int
    placement: PlacementInfo


class FillOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A server, the last of the shard's chain, is to fill another. No two orders have the same number."""

    number: int
    shard: int
    term: int
    target: int


class PlacementNews(Reply, frozen=True, kw_only=True, tag="news"):
    """The placement, if it is newer than what was asked with, and what a server is to do."""

    placement: PlacementInfo | None = None
    fills: tuple[FillOrder, ...] = ()
    life: int = 0
    heard: int = 0
    takeovers: tuple[Takeover, ...] = ()


class TableOpened(Reply, frozen=True, kw_only=True, tag="opened"):
    """The table or tensor as it is now."""

    opened: Opened


class TablePage(Reply, frozen=True, kw_only=True, tag="tables"):
    """Some tables; `more` says that asking on makes sense."""

    entries: tuple[TableEntry, ...]
    more: bool


class StatusInfo(Reply, frozen=True, kw_only=True, tag="status"):
    """Who is there. `waiting_for`: indexes of servers that have not registered yet. `still`: rank, clock and
    seconds of workers that renew their lease and have made no progress: they are stuck, or wait."""

    pid: int
    shards: int
    servers: tuple[ServerInfo, ...]
    waiting_for: tuple[int, ...]
    tables: int
    clients: int
    replicas: int = 0
    degraded: int = 0
    filling: int = 0
    lost: tuple[Lost, ...] = ()
    still: tuple[tuple[int, int, float], ...] = ()


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    """Nothing to add."""


class NotLeader(Reply, frozen=True, kw_only=True, tag="not_leader"):
    """This coordinator stands by. `leader` is the address of the one that leads, if that is known."""

    leader: str
    pid: int


class Failure(Reply, frozen=True, kw_only=True, tag="failure"):
    """The request was not carried out."""

    code: int
    message: str


_ENCODER = msgspec.msgpack.Encoder()
_HANDSHAKE = (Hello, Challenge, Proof, Welcome)
_KINDS = reduce(or_, (*_HANDSHAKE, *Request.__subclasses__(), *Reply.__subclasses__()))
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_KINDS, dec_hook=decode_setting)


def encode(message: Message) -> bytes:
    """The frame that carries `message`."""
    body = _ENCODER.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise Refused(f"a {type(message).__name__} of {len(body)} bytes is above {FRAME_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode(body: bytes) -> Message:
    """The message in a frame's body; raises Refused for anything else."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise Refused(f"not a control message: {error}") from None
