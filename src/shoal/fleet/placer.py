"""Where every shard is, and how it comes to be elsewhere: pure decisions, without sockets or time.

A shard lies on a chain of servers: pushes go to the first, each sends on what it has applied, and what
the last has is acknowledged. There is one way to change a chain besides dropping a member: a server is
*filled* by the last of the chain, while training goes on, and then becomes the last itself. With it dead
servers are replaced, shards move to new servers, and servers are emptied before they leave.

A chain is never put in another order: the first has always applied what others do not have yet. So that heads
and tails are as even as what servers hold, a shard may move once more, or be copied by way of another server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shoal.errors import Unavailable
from shoal.fleet.balance import Balance, Cost
from shoal.fleet.decisions import Placed

Chain = tuple[int, ...]
# Fills at once: enough to keep a link busy while one is being ended.
_FILLS_MAX = 2
# What two servers gain whose loads differ by a fifth of the mean: less comes and goes by itself.
_WORTH_MOVING = 0.02
# What a head and a tail weigh beside a copy. Not the same: a move that makes one more even and another less
# would then be as good as none, and a few would stay uneven.
_ENDS = 1.4, 1.2
_TURNS_MAX = 10


def first_chains(shards: int, servers: int, replicas: int) -> tuple[Chain, ...]:
    """Contiguous parts, equal within one; the copies of a part are on the servers that follow.

    >>> first_chains(4, 2, 0)
    ((0,), (0,), (1,), (1,))
    >>> first_chains(4, 2, 1)
    ((0, 1), (0, 1), (1, 0), (1, 0))
    """
    heads = [shard * servers // shards for shard in range(shards)]
    return tuple(tuple((head + copy) % servers for copy in range(replicas + 1)) for head in heads)


def by_owner(chains: Sequence[Chain]) -> dict[int, tuple[int, ...]]:
    """Server -> the shards in whose chains it is.

    >>> by_owner([(0, 1), (1,), ()])
    {0: (0,), 1: (0, 1)}
    """
    owners = sorted({server for chain in chains for server in chain})
    return {one: tuple(shard for shard, chain in enumerate(chains) if one in chain) for one in owners}


@dataclass(frozen=True)
class Fill:
    """`source`, the last of the shard's chain, fills `target`, which then takes the place of `leaving`."""

    number: int
    shard: int
    term: int
    source: int
    target: int
    leaving: int | None = None


class Placer:
    """The placement and the fills under way. What changes it gives the next `Placed`, to be applied."""

    def __init__(self, replicas: int, *, weak: bool = False) -> None:
        self._length = replicas + 1
        # With weak replication a head that goes takes along what it has not sent on: none goes so that heads
        # are even, nor so that pulls are.
        self._weak = weak
        self.number = 0  # of the last fill; another coordinator's are others
        self.placed: Placed | None = None
        self.fills: dict[int, Fill] = {}
        # Servers that answered pulls of shards which are read elsewhere now. No other server is told of that
        # before they are, or a pull there could miss what was pushed since.
        self.first_to_know: set[int] = set()

    def first(self, shards: int, servers: int) -> Placed:
        """The placement that a cluster begins with."""
        chains = first_chains(shards, servers, self._length - 1)
        return Placed(version=1, terms=(1,) * shards, chains=chains)

    def apply(self, placed: Placed) -> None:
        """Take a placement over; fills of shards that it changes are void."""
        self.placed = placed
        self.first_to_know = set(placed.first_to_know)
        self.fills = {s: fill for s, fill in self.fills.items() if fill.term == placed.terms[s]}

    @property
    def version(self) -> int:
        """Of the placement; 0 before the first."""
        return self.placed.version if self.placed is not None else 0

    def knows(self, server: int, version: int) -> bool:
        """A server has learnt a placement; whether others have waited for that."""
        if server not in self.first_to_know or version < self.version:
            return False
        self.first_to_know.discard(server)
        return True

    def may_know(self, server: int) -> bool:
        """Whether a server may be told of the newest placement now."""
        return not self.first_to_know or server in self.first_to_know

    def joined(self) -> Placed:
        """The same, with other servers to know of."""
        assert self.placed is not None
        first = tuple(sorted(self.first_to_know))
        return msgspec.structs.replace(self.placed, version=self.placed.version + 1, first_to_know=first)

    def gone(self, server: int) -> Placed | None:
        """Without that server. A shard that only it had stays where it was, and is lost while it is."""
        assert self.placed is not None
        self.first_to_know.discard(server)
        changed: dict[int, Chain] = {}
        for shard, chain in enumerate(self.placed.chains):
            fill = self.fills.get(shard)
            rest = tuple(member for member in chain if member != server)
            if rest and (rest != chain or (fill is not None and fill.target == server)):
                changed[shard] = rest
        return self._changed(changed)

    def lost(self, servers: Collection[int]) -> set[int]:
        """The shards that only these servers have."""
        chains = self.placed.chains if self.placed else ()
        return {shard for shard, chain in enumerate(chains) if set(chain) <= set(servers)}

    def adopt(self, lost: Collection[int], up: Collection[int]) -> dict[int, int]:
        """For each shard that only these servers had another one, of those that have least."""
        assert self.placed is not None
        load = Counter(dict.fromkeys(set(up) - set(lost), 0))
        load.update(member for chain in self.placed.chains for member in chain if member in load)
        adopted: dict[int, int] = {}
        for shard in sorted(self.lost(lost)):
            if not load:
                raise Unavailable("no server is up that could take the shards of those that are lost")
            adopted[shard] = min(load, key=lambda server: (load[server], server))
            load[adopted[shard]] += 1
        return adopted

    def chains_without(self, lost: Collection[int], adopted: Mapping[int, int]) -> list[Chain]:
        """The chains when others have adopted what was lost."""
        assert self.placed is not None
        rest = (tuple(m for m in chain if m not in lost) for chain in self.placed.chains)
        return [chain or (adopted[shard],) for shard, chain in enumerate(rest)]

    def adopted(self, lost: Collection[int], adopted: Mapping[int, int], together: bool) -> Placed:
        """Those, under new terms; of all shards, if they have gone back together."""
        assert self.placed is not None
        self.first_to_know -= set(lost)
        chains = enumerate(self.chains_without(lost, adopted))
        old = self.placed.chains
        placed = self._changed({shard: chain for shard, chain in chains if together or chain != old[shard]})
        assert placed is not None
        return placed

    def filled(self, shard: int, term: int, target: int) -> Placed | None:
        """The fill is done; None if it was void."""
        assert self.placed is not None
        fill = self.fills.get(shard)
        if fill is None or (fill.term, fill.target) != (term, target):
            return None
        old = self.placed.chains[shard]
        self.first_to_know |= {old[-1]} if fill.leaving is None else {old[-1], fill.leaving}
        return self._changed({shard: _moved(old, fill.leaving, target)})

    def plan(
        self,
        up: Collection[int],
        leaving: Collection[int] = (),
        costs: Sequence[Cost] = (),
        *,
        only_copies: bool = False,
    ) -> list[Fill]:
        """Fills to begin now; `leaving` are up and must be emptied. `costs`: of shards, by dimension."""
        assert self.placed is not None
        begun = []
        while len(self.fills) < _FILLS_MAX:
            fill = self._next_fill(frozenset(up), frozenset(leaving), costs, only_copies)
            if fill is None:
                break
            self.fills[fill.shard] = fill
            begun.append(fill)
        return begun

    def copying(self, up: Collection[int]) -> tuple[set[int], set[int]]:
        """The shards that are being filled; and others that have too few copies, where one could be made."""
        chains = enumerate(self.placed.chains if self.placed else ())
        short = {s for s, chain in chains if len(chain) < min(self._length, len(up)) and chain[-1] in up}
        return set(self.fills), short - self.fills.keys()

    def degraded(self) -> int:
        """Shards with fewer copies than were asked for."""
        return sum(len(chain) < self._length for chain in self.placed.chains) if self.placed else 0

    def members(self) -> set[int]:
        """Servers that have a shard."""
        return {member for chain in self.placed.chains for member in chain} if self.placed else set()

    def _changed(self, chains: Mapping[int, Chain]) -> Placed | None:
        assert self.placed is not None
        if not chains:
            return None
        old = self.placed
        return Placed(
            version=old.version + 1,
            terms=tuple(term + (shard in chains) for shard, term in enumerate(old.terms)),
            chains=tuple(chains.get(shard, chain) for shard, chain in enumerate(old.chains)),
            first_to_know=tuple(sorted(self.first_to_know)),
        )

    def _next_fill(
        self, up: frozenset[int], leaving: frozenset[int], costs: Sequence[Cost], only_copies: bool
    ) -> Fill | None:
        """The most urgent: a shard with too few copies, then one that must leave, then one that evens out."""
        assert self.placed is not None
        stay = up - leaving
        if not stay:
            return None
        chains = self.placed.chains
        short = self.copying(up)[1]
        idle = [] if only_copies else [s for s in range(len(chains)) if s not in self.fills]
        balance = self._balance(stay, self._costs(costs))
        wanted: list[tuple[int, int | None]] = [(shard, None) for shard in sorted(short)]
        wanted += [(shard, member) for shard in idle for member in chains[shard] if member in leaving]
        turned = self._turned({shard for shard, _ in wanted}, stay)

        def urgency(one: tuple[int, int | None]) -> tuple[bool, int, bool]:
            shard, member = one
            return member is not None, len(stay.intersection(chains[shard])), shard in turned

        wanted.sort(key=urgency)
        for shard, member in wanted:
            if fill := self._fill(shard, balance.least_first(shard), up, turned.get(shard, member)):
                return fill
        for shard in sorted(short):  # better with a server that is to leave than alone
            if fill := self._fill(shard, sorted(leaving), up):
                return fill
        best = (0.0, 0, 0, 0)
        for shard in idle:
            chain = chains[shard]
            target = next((s for s in balance.least_first(shard, len(chain) == 1) if s not in chain), None)
            if target is None or chain[-1] not in up:
                continue
            for member in stay.intersection(chain):
                gain = balance.gain(shard, chain, _moved(chain, member, target))
                best = max(best, (round(gain, 9), -shard, member, target))
        if best[0] <= (_WORTH_MOVING if costs else 1e-6):
            return None
        return self._fill(-best[1], [best[3]], up, best[2])

    def _costs(self, costs: Sequence[Cost]) -> Sequence[Cost]:
        """With those of heads and tails, which are counted."""
        assert self.placed is not None
        costs = costs or (Cost([1.0] * len(self.placed.chains)),)
        if self._weak:
            return [cost.whoever_reads() for cost in costs]
        return (*costs, *self._ends()) if self._length > 1 else costs

    def _ends(self) -> tuple[Cost, Cost]:
        """Heads and tails, counted."""
        assert self.placed is not None
        none, ones = ([one] * len(self.placed.chains) for one in (0.0, 1.0))
        head, tail = (weight / self._length for weight in _ENDS)
        return Cost(none, head=ones, weight=head), Cost(none, tail=ones, weight=tail)

    def _coming(self) -> list[Chain]:
        """The chains when the fills are done."""
        assert self.placed is not None
        chains = list(self.placed.chains)
        for fill in self.fills.values():
            chains[fill.shard] = _moved(chains[fill.shard], fill.leaving, fill.target)
        return chains

    def _balance(self, servers: frozenset[int], costs: Sequence[Cost]) -> Balance:
        """As it will be when the fills are done."""
        balance = Balance(servers, costs, self._length)
        for shard, chain in enumerate(self._coming()):
            balance.put(shard, chain)
        return balance

    def _turned(self, shards: Collection[int], stay: frozenset[int]) -> dict[int, int]:
        """Of the shards that are to get a copy, those whose head is to leave for it, and that head.

        Where all servers are in every chain nothing can be moved later to even out heads and tails. So the
        head of some goes when the new copy is there, and comes back as the tail: copies are no fewer
        meanwhile than they were before.
        """
        if self._weak or self._length == 1 or len(stay) > self._length:
            return {}
        chains = self._coming()
        balance = Balance(stay, self._ends(), self._length)
        kept = [tuple(member for member in chain if member in stay) for chain in chains]
        whole = [(*chain, *sorted(stay.difference(chain))) for chain in kept]
        for shard, chain in enumerate(whole):
            balance.put(shard, chain)
        # Those that are one copy short of all; each is turned as is best with the others, until none gains.
        last = [s for s in sorted(shards, reverse=True) if len(kept[s]) == len(stay) - 1]
        for _ in range(_TURNS_MAX):
            before = list(whole)
            for shard in last:
                chain = whole[shard]
                turns = [(*chain[by:], *chain[:by]) for by in range(len(chain))]
                whole[shard] = max(turns, key=lambda turn: round(balance.gain(shard, chain, turn), 9))
                balance.put(shard, chain, -1)
                balance.put(shard, whole[shard])
            if whole == before:
                break
        return {shard: kept[shard][0] for shard in last if whole[shard][: len(kept[shard])] != kept[shard]}

    def _fill(
        self, shard: int, targets: list[int], up: frozenset[int], leaving: int | None = None
    ) -> Fill | None:
        assert self.placed is not None
        chain = self.placed.chains[shard]
        # One that has left a chain, and has not learnt it, would take what it is filled with for what it had,
        # and drop it when it learns.
        fit = [server for server in targets if server not in chain and server not in self.first_to_know]
        if not fit or chain[-1] not in up:
            return None
        self.number += 1
        return Fill(self.number, shard, self.placed.terms[shard], chain[-1], fit[0], leaving)


def _moved(chain: Chain, leaving: int | None, target: int) -> Chain:
    return (*(member for member in chain if member != leaving), target)
