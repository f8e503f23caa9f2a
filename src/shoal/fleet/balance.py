"""What each shard costs the servers that have it, and how evenly that is spread. Pure arithmetic.

A shard has a cost in every dimension: memory, and floats that are read or written in a second. A server's
load is the sum over its shards, as a share of the mean server's. How uneven loads are is the sum of their
squares: it falls when a shard moves from a server to one that has less by more than the shard itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

# Less than this a shard is nothing to tell shards apart by; they are counted then.
_BYTES_MIN, _FLOATS_PER_S_MIN = 1 << 20, 1e5
# Traffic is a mean over about this time.
_MEMORY_S = 10.0


class ShardCosts:
    """What servers have said of their shards."""

    def __init__(self, shards: int) -> None:
        self._began: float | None = None
        self._bytes: dict[int, dict[int, int]] = {}  # by server and shard
        self._floats: dict[
            int, tuple[float, dict[int, int]]
        ] = {}  # when it was said, and how many since ever
        self._floats_per_s: dict[int, dict[int, float]] = {}
        self._sizes, self._rates = [0.0] * shards, [0.0] * shards

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

    def of_shards(self, now: float) -> tuple[Sequence[float], ...]:
        """By dimension the cost of each shard; none while there is too little to tell them apart."""
        if self._began is None or now - self._began < _MEMORY_S:
            return ()
        for costs, said in ((self._sizes, self._bytes), (self._rates, self._floats_per_s)):
            for shard in {shard for mine in said.values() for shard in mine}:
                costs[shard] = float(max(mine[shard] for mine in said.values() if shard in mine))
        enough = ((self._sizes, _BYTES_MIN), (self._rates, _FLOATS_PER_S_MIN))
        return tuple(costs for costs, least in enough if sum(costs) >= least * len(costs))


class Balance:
    """The loads of servers, each of which has the shards that are put on it."""

    def __init__(self, servers: Collection[int], costs: Sequence[Sequence[float]], copies: float) -> None:
        # `copies` of every shard are spread over the servers.
        means = [max(sum(cost) * copies / max(1, len(servers)), 1e-12) for cost in costs]
        self._costs = [
            tuple(cost[s] / mean for cost, mean in zip(costs, means, strict=True))
            for s in range(len(costs[0]))
        ]
        self._loads = {server: (0.0,) * len(costs) for server in servers}

    def put(self, server: int, shard: int, times: int = 1) -> None:
        """A shard comes to a server; with -1 it goes. Servers that do not count are passed over."""
        if server in self._loads:
            new = (
                load + times * cost
                for load, cost in zip(self._loads[server], self._costs[shard], strict=True)
            )
            self._loads[server] = tuple(new)

    def least_first(self) -> list[int]:
        """The servers by their loads, those of all dimensions together."""
        return sorted(self._loads, key=lambda server: (round(sum(self._loads[server]), 9), server))

    def gain(self, shard: int, source: int, target: int) -> float:
        """By how much a move makes loads more even; below 0: less even."""
        pairs = zip(self._costs[shard], self._loads[source], self._loads[target], strict=True)
        return sum(2 * cost * (more - less - cost) for cost, more, less in pairs)
