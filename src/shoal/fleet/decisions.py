"""What the coordinator decides, as values that are journaled and read back.

Each decision has a `key`; a later one of the same key replaces it, so a journal is as large as the state
that it describes, however often clients come and go.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import ClassVar, Literal

import msgspec

from shoal.config import CoordinatorOptions
from shoal.errors import BadInput
from shoal.store.catalogue import TableEntry, decode_setting
from shoal.store.messages import Lost, Takeover


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One of those below. `KEY` is what it is about, and makes its `key`."""

    KEY: ClassVar[str]

    @property
    def key(self) -> str:
        """By what it is known in the journal."""
        return self.KEY.format(self)


_SIZES = ("shards", "servers", "replicas")


class ClusterFormed(Decision, frozen=True, kw_only=True, tag="formed"):
    """What the cluster is. Client ids begin at a random number: what a checkpoint of another cluster says of
    its clients is then never taken for one of this."""

    KEY = "cluster"
    shards: int
    servers: int
    replicas: int = 0
    client_ids_from: int = 0

    @staticmethod
    def of(options: CoordinatorOptions, client_ids_from: int) -> ClusterFormed:
        sizes = {size: getattr(options, size) for size in _SIZES}
        return ClusterFormed(**sizes, client_ids_from=client_ids_from)

    def check(self, options: CoordinatorOptions) -> None:
        """Raise if the options are of another cluster."""
        was, is_ = (", ".join(f"{getattr(one, size)} {size}" for size in _SIZES) for one in (self, options))
        if was != is_:
            raise BadInput(f"the journal is of a cluster with {was}; this coordinator is for {is_}")


class LifeBegan(Decision, frozen=True, kw_only=True, tag="life"):
    """A coordinator has taken over: the first, the next after it died, or another one. The numbers of its
    orders begin with its life's, so that none is taken for one of an earlier life."""

    KEY = "life"
    number: int


class ServerPlaced(Decision, frozen=True, kw_only=True, tag="server"):
    """A server has an index for the life of the cluster."""

    KEY = "server/{0.index}"
    index: int
    identity: str
    pid: int
    host: str
    port: int
    unix_path: str


class ServerLeaving(Decision, frozen=True, kw_only=True, tag="leaving"):
    """A server is to go when its shards have moved."""

    KEY = "leaving/{0.index}"
    index: int


# Why a server is gone that left in order.
LEFT = "it was removed, and its shards have moved"


class ServerGone(Decision, frozen=True, kw_only=True, tag="gone"):
    """A server was given up, or has left: whatever it says from now on is not heard."""

    KEY = "gone/{0.index}"
    index: int
    why: str


class Placed(Decision, frozen=True, kw_only=True, tag="placed"):
    """Shard -> its chain of servers, and shard -> term, which only grows. `version` counts placements.

    `first_to_know`: servers that must have learnt it before others are told (`shoal.fleet.placer`).
    """

    KEY = "placement"
    version: int
    terms: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    first_to_know: tuple[int, ...] = ()


class ClientGranted(Decision, frozen=True, kw_only=True, tag="client"):
    """A client has this id and incarnation. Of those without a name only the highest id matters.

    Of a worker: it is evicted under this life, or has left, and nobody has its place. `instead_of`: what it
    was itself before it was evicted.
    """

    name: str | None
    client_id: int
    incarnation: int
    state: Literal["here", "evicting", "left"] = "here"
    instead_of: int | None = None

    @property
    def key(self) -> str:
        return "client" if self.name is None else f"client/{self.name}"


class TableDefined(Decision, frozen=True, kw_only=True, tag="table"):
    """A table or tensor is as the entry says."""

    KEY = "table/{0.entry.name}"
    entry: TableEntry


class ClocksRestored(Decision, frozen=True, kw_only=True, tag="restored"):
    """The clocks are those of this checkpoint (URL/NAME). `came`: the ranks that have prepared a model since;
    of the others it says what they are."""

    KEY = "restored"
    checkpoint: str
    came: tuple[int, ...] = ()


# Of takeovers, and of losses: so many are known one by one. Of older losses that is what they come to.
LOSSES_MAX = 4096


class TakenOver(Decision, frozen=True, kw_only=True, tag="takeover"):
    """A server has taken a shard over. They are numbered from 1."""

    number: int
    takeover: Takeover

    @property
    def key(self) -> str:
        return f"takeover/{self.number % LOSSES_MAX}"


class LossTold(Decision, frozen=True, kw_only=True, tag="loss"):
    """A client has said what it lost by a takeover. They are numbered from 1."""

    number: int
    lost: Lost

    @property
    def key(self) -> str:
        return f"loss/{self.number % LOSSES_MAX}"


class LossesFolded(Decision, frozen=True, kw_only=True, tag="folded"):
    """What those losses of a shard come to that are not known one by one any more, `number` being the last.

    `lost`: of the newest of their terms, all clients together; `updates` and `pushes`: of the terms before.
    """

    KEY = "folded/{0.lost.shard}"
    number: int
    lost: Lost
    updates: int = 0
    pushes: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Decision] = msgspec.msgpack.Decoder(
    reduce(or_, Decision.__subclasses__()), dec_hook=decode_setting
)


def encode(decision: Decision) -> bytes:
    """The bytes that the journal keeps."""
    return _ENCODER.encode(decision)


def decode(body: bytes) -> Decision:
    """The decision in those bytes; raises msgspec.MsgspecError for anything else."""
    return _DECODER.decode(body)
