"""What each shard costs the servers that have it, and how evenly that is spread. Pure arithmetic.

A shard has a cost in every dimension: memory, floats that are read or written in a second, and that it has
a head and a tail. What is pushed costs every server of its chain, what is pulled the tail alone. A server's
load is the sum over its shards, as a share of the mean server's. How uneven loads are is the sum of their
squares: it falls when a shard moves from a server to one that has less by more than the shard itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# Less than this a shard is nothing to tell shards apart by; they are counted then.
_BYTES_MIN, _FLOATS_PER_S_MIN = 1 << 20, 1e5
# Traffic is a mean over about this time.
_MEMORY_S = 10.0


@dataclass(frozen=True)
class Cost:
    """Of all shards in one dimension: for each server of a chain, and more for its head and its tail."""

    each: Sequence[float]
    head: Sequence[float] = ()
    tail: Sequence[float] = ()
    weight: float = 1.0

    def of(self, shard: int) -> tuple[float, float, float]:
        """Those three of one shard."""
        head, tail = (end[shard] if end else 0.0 for end in (self.head, self.tail))
        return self.each[shard], head, tail

    def whoever_reads(self) -> Cost:
        """The same where a pull may be answered by any server of the chain."""
        return Cost([sum(self.of(shard)) for shard in range(len(self.each))])

    def mean(self, copies: int, servers: int) -> float:
        """What a server has of it where all have the same."""
        total = copies * sum(self.each) + sum(self.head) + sum(self.tail)
        return max(total / max(1, servers), 1e-12)


class ShardCosts:
    """What servers have said of their shards."""

    def __init__(self, shards: int) -> None:
        self._began: float | None = None
        self._bytes: dict[int, dict[int, int]] = {}  # by server and shard
        self._floats: dict[
            int, tuple[float, dict[int, int]]
        ] = {}  # when it was said, and how many since ever
        self._floats_per_s: dict[int, dict[int, float]] = {}
        self._sizes, self._rates, self._pushed = [0.0] * shards, [0.0] * shards, [0.0] * shards

    def heard(self, server: int, loads: Iterable[tuple[int, int, int]], now: float) -> None:
        """A server has said (shard, bytes, floats since it began) of each of its shards."""
        said = [load for load in loads if 0 <= load[0] < len(self._sizes)]
        self._began = now if self._began is None else self._began
        before_at, before = self._floats.get(server, (now, {}))
        passed = max(now - before_at, 1e-9)
        rates = self._floats_per_s.get(server, {})
        share = min(1.0, passed / _MEMORY_S)
        self._floats[server] = now, {shard: floats for shard, _, floats in said}
        self._bytes[server] = {shard: size for shard, size, _ in said}
        # A shard that has just come is as busy as it was elsewhere.
        self._floats_per_s[server] = {
            shard: self._rates[shard]
            if shard not in before
            else (1 - share) * rates[shard] + share * max(0, floats - before[shard]) / passed
            for shard, _, floats in said
        }

    def gone(self, server: int) -> None:
        """It has no shards any more."""
        for said in (self._bytes, self._floats, self._floats_per_s):
            said.pop(server, None)

    def of_shards(self, now: float) -> tuple[Cost, ...]:
        """By dimension what shards cost; none while there is too little to tell them apart."""
        if self._began is None or now - self._began < _MEMORY_S:
            return ()
        # Pushes come to all copies and pulls to one: what one has more than another was pulled there.
        kinds = ((self._sizes, self._bytes, max), (self._rates, self._floats_per_s, max))
        for costs, said, which in (*kinds, (self._pushed, self._floats_per_s, min)):
            for shard in {shard for mine in said.values() for shard in mine}:
                costs[shard] = float(which(mine[shard] for mine in said.values() if shard in mine))
        pulled = [rate - pushed for rate, pushed in zip(self._rates, self._pushed, strict=True)]
        found = []
        if sum(self._sizes) >= _BYTES_MIN * len(self._sizes):
            found.append(Cost(tuple(self._sizes)))
        if sum(self._rates) >= _FLOATS_PER_S_MIN * len(self._rates):
            found.append(Cost(tuple(self._pushed), tail=pulled))
        return tuple(found)


class Balance:
    """The loads of servers, each of which has the shards in whose chains it is. Others do not count."""

    def __init__(self, servers: Collection[int], costs: Sequence[Cost], copies: int) -> None:
        self._means = [cost.mean(copies, len(servers)) for cost in costs]
        self._costs = costs
        self._loads = {server: [0.0] * len(costs) for server in servers}
        self._shares: dict[int, list[tuple[float, float, float]]] = {}  # of shards, by dimension

    def put(self, shard: int, chain: Sequence[int], times: int = 1) -> None:
        """A shard comes to these servers; with -1 it goes."""
        for at, server in enumerate(chain):
            if (loads := self._loads.get(server)) is not None:
                for d, cost in enumerate(self._cost(shard, at == 0, at == len(chain) - 1)):
                    loads[d] += times * cost

    def least_first(self, shard: int, first: bool = False) -> list[int]:
        """The servers that could be the new tail of a shard, by how little uneven that makes loads."""
        costs = self._cost(shard, first, True)
        return sorted(self._loads, key=lambda server: (round(self._arrival(server, costs), 9), server))

    def gain(self, shard: int, before: Sequence[int], after: Sequence[int]) -> float:
        """By how much another chain makes loads more even; below 0: less even."""
        was = {server: list(loads) for server, loads in self._loads.items() if server in {*before, *after}}
        self.put(shard, before, -1)
        self.put(shard, after)
        gain = sum(
            old * old - new * new
            for server, loads in was.items()
            for old, new in zip(loads, self._loads[server], strict=True)
        )
        self._loads.update(was)
        return gain

    def _cost(self, shard: int, head: bool, tail: bool) -> list[float]:
        """As a share of the mean server's load, by dimension."""
        if shard not in self._shares:
            pairs = zip(self._costs, self._means, strict=True)
            scaled = [(cost.of(shard), cost.weight / mean) for cost, mean in pairs]
            self._shares[shard] = [(a * by, b * by, c * by) for (a, b, c), by in scaled]
        return [each + head * first + tail * last for each, first, last in self._shares[shard]]

    def _arrival(self, server: int, costs: Sequence[float]) -> float:
        return sum(cost * (2 * load + cost) for cost, load in zip(costs, self._loads[server], strict=True))
