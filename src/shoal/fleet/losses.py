"""What went with servers: who took a shard over with how much, and what clients had been told before.

A server that becomes the head of a shard says with which version it begins. Clients hear of that, and answer
with what they had been acknowledged beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.fleet.decisions import LOSSES_MAX, LossTold, TakenOver
from shoal.store.messages import Lost, Takeover, WatchPlacement


class Losses:
    """The takeovers, and what clients say that they lost by them."""

    def __init__(self) -> None:
        self.number = 0  # of the last takeover
        # By shard and term, in order: versions of a shard begin anew with each, so none stands for the one
        # before. A server says it again with each placement.
        self._takeovers: dict[tuple[int, int], TakenOver] = {}
        self._told = 0  # the number of the last loss
        self._lost: dict[tuple[int, int, int], LossTold] = {}  # by shard, term and client

    def hear(self, request: WatchPlacement) -> list[TakenOver | LossTold]:
        """What is new of what a server or a client says; it is known from now on."""
        new: list[TakenOver | LossTold] = []
        for one in request.takeovers:
            if (one.shard, one.term) not in self._takeovers:
                new.append(TakenOver(number=self.number + 1, takeover=one))
                self.apply(new[-1])
        for lost in request.lost:
            told = self._lost.get((lost.shard, lost.term, lost.client))
            if told is None or told.lost != lost:
                new.append(LossTold(number=told.number if told else self._told + 1, lost=lost))
                self.apply(new[-1])
        return new

    def apply(self, decision: TakenOver | LossTold) -> None:
        """Know that; also from the journal."""
        if isinstance(decision, TakenOver):
            self.number = max(self.number, decision.number)
            self._takeovers[decision.takeover.shard, decision.takeover.term] = decision
        else:
            lost = decision.lost
            self._told = max(self._told, decision.number)
            self._lost[lost.shard, lost.term, lost.client] = decision
        if len(self._takeovers) > LOSSES_MAX:
            del self._takeovers[next(iter(self._takeovers))]
        if len(self._lost) > LOSSES_MAX:
            del self._lost[next(iter(self._lost))]

    def news(self, request: WatchPlacement) -> tuple[int, tuple[Takeover, ...]]:
        """The number of the last takeover, and those that a client has not heard of."""
        new = (one.takeover for one in self._takeovers.values() if one.number > request.heard)
        return self.number, tuple(new) if request.server is None else ()

    def by_shard(self) -> tuple[Lost, ...]:
        """For each shard and term: the newest version that any client was told of, and all their pushes."""
        found: dict[tuple[int, int], Lost] = {}
        for (shard, term, _), told in sorted(self._lost.items(), key=lambda item: item[0]):
            one = told.lost
            known = found.get((shard, term), Lost(shard=shard, term=term, version=one.version))
            found[shard, term] = msgspec.structs.replace(
                known, last=max(known.last, one.last), pushes=known.pushes + one.pushes
            )
        return tuple(found.values())


def describe(losses: Sequence[Lost]) -> str:
    """What went with servers, in a short line; which versions of which shards, the status knows.

    >>> describe([Lost(shard=shard, term=2, version=120, last=180) for shard in (3, 4, 5, 9)])
    'lost with a server: 240 updates of 4 shards (3-5, 9); versions by shard: shoal status --json'
    """
    gone = sorted({one.shard for one in losses if one.last > one.version})
    updates = sum(max(0, one.last - one.version) for one in losses)
    pushes = sum(one.pushes for one in losses)
    said = f", {pushes} of them acknowledged pushes," if pushes else ""
    begins = [shard for shard in gone if shard - 1 not in gone]
    ends = [shard for shard in gone if shard + 1 not in gone]
    ranges = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True)]
    shards = "1 shard" if len(gone) == 1 else f"{len(gone)} shards"
    return (
        f"lost with a server: {updates} updates{said} of {shards} ({', '.join(ranges)}); versions by shard: "
        "shoal status --json"
    )
