"""Who waits for an answer of the coordinator, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import Timeout, code_of
from shoal.fleet.placer import Placer
from shoal.fleet.roster import Roster
from shoal.store.messages import Failure, FillOrder, WatchPlacement


@dataclass(frozen=True)
class Waiting:
    """A client that wants to join a cluster whose servers are not all there."""

    peer: int
    name: str | None
    since: float
    until: float

    def too_late(self, roster: Roster, now: float) -> Failure:
        """What it is told at its deadline."""
        error = Timeout(
            f"the cluster is not complete: servers {list(roster.missing)} of {roster.expected} have not "
            f"registered; waited {now - self.since:.1f} s for them"
        )
        return Failure(code=code_of(error), message=str(error))


@dataclass(frozen=True)
class Watching:
    """A client or (with its index) a server that wants to know of a placement newer than `after`."""

    peer: int
    request: WatchPlacement
    until: float


def what_is_new(request: WatchPlacement, placer: Placer) -> tuple[bool, tuple[FillOrder, ...]]:
    """Whether whoever asks is to be told of the placement, and what it is to do."""
    server = request.server
    if server is not None and not placer.may_know(server):
        return False, ()
    orders = (
        FillOrder(number=fill.number, shard=fill.shard, term=fill.term, target=fill.target)
        for fill in placer.fills.values()
        if fill.source == server and fill.number not in request.filling
    )
    return placer.version > request.after, tuple(orders)
