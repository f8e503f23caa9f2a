"""What went with servers: who took a shard over with how much, and what clients had been told before.

A server that becomes the head of a shard says with which version it begins. Clients hear of that, and answer
with what they had been acknowledged beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from shoal.fleet.decisions import LOSSES_MAX, LossesFolded, LossTold, TakenOver
from shoal.store.messages import Lost, Takeover, WatchPlacement

_Decision = TakenOver | LossTold | LossesFolded


class Losses:
    """The takeovers, and what clients say that they lost by them.

    Each loss counts once, as long as it is known one by one: a client that was not answered says it again.
    """

    def __init__(self) -> None:
        self.number = 0  # of the last takeover
        # By shard and term, in order: versions of a shard begin anew with each, so none stands for the one
        # before. A server says it again with each placement.
        self._takeovers: dict[tuple[int, int], TakenOver] = {}
        self._told = 0  # the number of the last loss
        self._lost: dict[tuple[int, int, int], LossTold] = {}  # by shard, term and client
        self._by_number: dict[int, LossTold] = {}
        self._folded: dict[int, LossesFolded] = {}  # by shard

    def hear(self, request: WatchPlacement) -> list[_Decision]:
        """What is new of what a server or a client says; it is known from now on."""
        new: list[_Decision] = []
        for one in request.takeovers:
            if (one.shard, one.term) not in self._takeovers:
                new.append(TakenOver(number=self.number + 1, takeover=one))
                self.apply(new[-1])
        for lost in request.lost:
            told = self._lost.get((lost.shard, lost.term, lost.client))
            if told is None or told.lost != lost:
                number = told.number if told else self._told + 1
                # Before the one that takes its place in the journal: it is then in both, never in none.
                if (oldest := self._by_number.get(number - LOSSES_MAX)) is not None:
                    new.append(self._fold(oldest))
                    self.apply(new[-1])
                new.append(LossTold(number=number, lost=lost))
                self.apply(new[-1])
        return new

    def apply(self, decision: _Decision) -> None:
        """Know that; also from the journal."""
        match decision:
            case TakenOver():
                self.number = max(self.number, decision.number)
                self._takeovers[decision.takeover.shard, decision.takeover.term] = decision
                if len(self._takeovers) > LOSSES_MAX:
                    del self._takeovers[next(iter(self._takeovers))]
            case LossTold():
                self._told = max(self._told, decision.number)
                self._by_number[decision.number] = self._lost[_key(decision)] = decision
            case LossesFolded():
                self._folded[decision.lost.shard] = decision
                if (told := self._by_number.pop(decision.number, None)) is not None:
                    del self._lost[_key(told)]

    def _fold(self, told: LossTold) -> LossesFolded:
        """What its shard's come to with this one."""
        new = replace(told.lost, client=0)
        if (known := self._folded.get(new.shard)) is None:
            return LossesFolded(number=told.number, lost=new)
        old = known.lost
        if new.term > old.term:
            updates, pushes = known.updates + max(0, old.last - old.version), known.pushes + old.pushes
            return LossesFolded(number=told.number, lost=new, updates=updates, pushes=pushes)
        if new.term == old.term:
            both = replace(old, last=max(old.last, new.last), pushes=old.pushes + new.pushes)
            return replace(known, number=told.number, lost=both)
        # It came late: its updates are those that others of its term have told.
        return replace(known, number=told.number, pushes=known.pushes + new.pushes)

    def news(self, request: WatchPlacement) -> tuple[int, tuple[Takeover, ...]]:
        """The number of the last takeover, and those that a client has not heard of."""
        new = (one.takeover for one in self._takeovers.values() if one.number > request.heard)
        return self.number, tuple(new) if request.server is None else ()

    def by_shard(self) -> tuple[Lost, ...]:
        """For each shard and term: the newest version that any client was told of, and all their pushes.

        What is only known all together, of terms long ago, is said as that of term 0, from version 0.
        """
        found: dict[tuple[int, int], Lost] = {}
        for shard, folded in self._folded.items():
            found[shard, folded.lost.term] = folded.lost
            if folded.updates or folded.pushes:
                found[shard, 0] = Lost(
                    shard=shard, term=0, version=0, last=folded.updates, pushes=folded.pushes
                )
        for (shard, term, _), told in self._lost.items():
            one = told.lost
            known = found.get((shard, term), Lost(shard=shard, term=term, version=one.version))
            last, pushes = max(known.last, one.last), known.pushes + one.pushes
            found[shard, term] = replace(known, last=last, pushes=pushes)
        return tuple(one for _, one in sorted(found.items()))


def _key(told: LossTold) -> tuple[int, int, int]:
    return told.lost.shard, told.lost.term, told.lost.client


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
