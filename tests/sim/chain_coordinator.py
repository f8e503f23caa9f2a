"""The coordinator of simulated chains: it decides by the shipped `Placer`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal import _core
from shoal.fleet.losses import Losses
from shoal.fleet.placer import Fill, Placer
from shoal.store.messages import Takeover, WatchPlacement

from .chain_nodes import ChainClient, ChainServer

if TYPE_CHECKING:
    from .chains import ChainWorld


class News(NamedTuple):
    """A placement, and what the core's own does not say again."""

    version: int
    servers: int
    up: frozenset[int]
    sync: int  # where the sync shard is asked
    terms: tuple[int, ...]
    heads: tuple[int, ...]
    placement: _core.Placement


class Coordinator:
    """Decides by the shipped `Placer`; what it says arrives at everybody at another time."""

    def __init__(self, world: ChainWorld, replicas: int) -> None:
        self._world = world
        self._rng = random.Random(f"coordinator {world.plan.seed}")
        self._news_rng = random.Random(f"losses {world.plan.seed}")
        self.placer = Placer(replicas, weak=world.plan.weak)
        self.placer.apply(self.placer.first(world.plan.shards, world.plan.servers))
        self._up = set(range(world.plan.servers))
        self._leaving: set[int] = set()
        self._said = self._newest()
        self.losses = Losses()

    def hear_takeovers(self, takeovers: list[Takeover]) -> None:
        """What a server tells, and all clients of it, each in its own time."""
        self.losses.hear(WatchPlacement(after=0, wait_s=0, takeovers=tuple(takeovers)))
        self.tell_losses(self._world.clients)

    def tell_losses(self, clients: Iterable[ChainClient]) -> None:
        for client in clients:
            wait = self._news_rng.uniform(0, self._news_rng.choice((5, 20, 500)))
            self._world.later(client, wait, client.hear_losses)

    def news_for(self, server: int | None) -> News:
        """The newest, or for servers that must wait, what was said last."""
        if server is not None and not self.placer.may_know(server):
            return self._said
        newest = self._newest()
        if not self.placer.first_to_know:
            self._said = newest
        return newest

    def _newest(self) -> News:
        placed = self.placer.placed
        assert placed is not None
        placement = _core.Placement(
            version=placed.version,
            weak=self._world.plan.weak,
            servers=[
                _core.ServerAddress(i, "sim", int(i in self._up)) for i in range(len(self._world.servers))
            ],
            terms=list(placed.terms),
            chains=[list(chain) for chain in placed.chains],
        )
        heads = tuple(chain[0] for chain in placed.chains)
        up = frozenset(self._up)
        return News(placed.version, len(self._world.servers), up, heads[0], placed.terms, heads, placement)

    def knows(self, server: int, version: int) -> None:
        if self.placer.knows(server, version):
            self.publish()

    def publish(self) -> None:
        # Servers that were given up hear of it in their own time.
        nodes: list[Any] = [server for server in self._world.servers if server.index in self._up]
        nodes += self._world.clients
        for node in nodes:
            self._world.later(node, self._rng.uniform(0, self._rng.choice((5, 5, 20, 500))), node.learn)
        for fill in self.placer.plan(self._up, self._leaving):
            self._order(fill, self._world.servers[fill.source])

    def _order(self, fill: Fill, source: ChainServer) -> None:
        def arrive() -> None:
            source.learn()
            if source.version < self.placer.version and self.placer.fills.get(fill.shard) is fill:
                self._order(fill, source)  # it comes with the placement
            else:
                self._world.later(source, self._rng.choice((0, 0, 50, 200)), lambda: source.begin(fill))

        self._world.later(source, self._rng.uniform(0, 10), arrive)

    def _decide(self, placed: Any) -> None:
        if not self.placer.first_to_know:
            self._said = self._newest()
        self.placer.apply(placed)
        for index in sorted(self._leaving - self.placer.first_to_know):
            targets = {fill.target for fill in self.placer.fills.values()}
            if index not in self.placer.members() | targets and index in self._up:
                self._up.discard(index)
                self._leaving.discard(index)
                self._world.servers[index].end()
        self.publish()

    def hear(self, fill: Fill, code: int) -> None:
        def arrive() -> None:
            current = self.placer.fills.get(fill.shard)
            if current is None or current.number != fill.number:
                return
            if code != 0:
                del self.placer.fills[fill.shard]
                self.publish()
            elif (placed := self.placer.filled(fill.shard, fill.term, fill.target)) is not None:
                self._decide(placed)

        self._world.clock.at(self._world.clock.now + self._rng.uniform(0, 10), arrive)

    def spare(self, server: int) -> bool:
        """Whether nothing is lost with it."""
        placed = self.placer.placed
        assert placed is not None
        living = {s.index for s in self._world.servers if not s.dead and s.index in self._up} - {server}
        chains = list(placed.chains)
        for fill in self.placer.fills.values():  # that may be done, and not heard of yet
            chains.append(tuple({*placed.chains[fill.shard], fill.target} - {fill.leaving}))
        return server in self._up and all(living.intersection(chain) for chain in chains)

    def gone(self, server: int) -> None:
        if server in self._up:
            self._up.discard(server)
            self._leaving.discard(server)
            self._decide(self.placer.gone(server) or self.placer.joined())

    def room_for_copies(self) -> int:
        """On so many servers; where all of them are to leave nothing is copied any more."""
        living = {server.index for server in self._world.servers if not server.dead}
        return len(living) if living - self._leaving else 1

    def may_be_lost(self, server: int) -> bool:
        """Whether no shard is being moved, and another server is there to take what it had."""
        quiet = not self.placer.fills and not self.placer.first_to_know and not self._leaving
        return quiet and server in self._up and len(self._up) > 1

    def adopt(self, lost: int) -> dict[int, int]:
        return self.placer.adopt([lost], self._up - {lost} - self._leaving)

    def adopted(self, lost: int, adopted: dict[int, int], together: bool) -> None:
        """Others have read what it had."""
        self._up.discard(lost)
        self._decide(self.placer.adopted([lost], adopted, together))

    def add(self) -> None:
        index = len(self._world.servers)
        self._world.servers.append(ChainServer(self._world, index))
        self._up.add(index)
        self._decide(self.placer.joined())

    def remove(self, server: int, replicas: int) -> None:
        stay = {s for s in self._up if not self._world.servers[s].dead} - self._leaving - {server}
        if server in self._up and not self._world.servers[server].dead and len(stay) > replicas:
            self._leaving.add(server)
            self.publish()

    def chains(self) -> tuple[tuple[int, ...], ...]:
        assert self.placer.placed is not None
        return self.placer.placed.chains

    def chain(self, shard: int) -> tuple[int, ...]:
        return self.chains()[shard]

    def settled(self) -> bool:
        """Everybody knows the newest placement, and there is nothing to be done about it."""
        placed = self.placer.placed
        assert placed is not None
        living = [s for s in self._world.servers if not s.dead]
        known = all(server.version == placed.version for server in living)
        known = known and all(client.heard == self.losses.number for client in self._world.clients)
        what_if = copy.deepcopy(self.placer)
        return known and not self.placer.fills and not what_if.plan(self._up, self._leaving)
