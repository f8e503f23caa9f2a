"""Servers in chains, and clients that are told where shards have gone: drivers around the compiled code."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import _core
from shoal.fleet.placer import Fill
from shoal.store.messages import Lost, Takeover, WatchPlacement

from .ledger import Ledger, Read, Violation
from .network import TO_CLIENT, TO_SERVER, Connection
from .nodes import CHALLENGE, REFUSE, REPLY, TOKEN, WELCOME, SimulatedClient, SimulatedServer
from .plan import Action, Plan

if TYPE_CHECKING:
    from .chain_coordinator import News
    from .chains import ChainWorld

UNAVAILABLE = 6  # of base/status.h
HOMES_MS = 5.0
MOMENTUM = 1e-9
REPLICATE = (25, 26, 27)  # of wire/frame.h


class ChainLedger(Ledger):
    """What is known to be applied, by the version of the placement that whoever asks must know to see it."""

    def __init__(self, plan: Plan, server_of_shard: list[int]) -> None:
        super().__init__(plan, server_of_shard)
        self.zombies = any(action.kind == "sleep" for action in plan.actions)
        self._floors = {0: self._floor}
        self._shapes = [floor.shape for floor in self._floor]

    def at(self, version: int) -> None:
        """From here on it is spoken of under this version."""
        version = version if self.zombies else 0
        if version not in self._floors:
            self._floors[version] = [np.zeros(shape, np.float32) for shape in self._shapes]
        self._floor = self._floors[version]
        self._version = version

    def begin_read(self, table: int, keys: np.ndarray[Any, np.dtype[np.intp]]) -> Read:
        known = [floors[table] for version, floors in self._floors.items() if version <= self._version]
        return Read(table, keys, np.maximum.reduce(known)[keys])

    def freeze(self, *_: object) -> None:
        """Shards move: what a server has does not stand for what was pushed."""


class ChainServer(SimulatedServer):
    """A server with servers behind it: its chain's connections, and the fills that it makes."""

    def __init__(self, world: ChainWorld, index: int) -> None:
        super().__init__(world, index)
        self._chains = world
        self.store = _core.protocol.Server(world.plan.shards, TOKEN, placed=False, weak=world.plan.weak)
        self.memory = self.store.store()
        self.index = index
        self.dead = False
        self.version = 0
        self.links: dict[int, Connection] = {}
        self._peers = 0  # that it knows of
        self._greeted: set[int] = set()
        self._fills: list[tuple[Fill, _core.protocol.Fill]] = []
        self._lag_until: dict[int, float] = {}  # by peer
        self._held_back: dict[int, list[bytes]] = {}  # by peer
        self._rng = random.Random(f"server {index} {world.plan.seed}")

    def learn(self) -> None:
        news = self._chains.coordinator.news_for(self.index)
        if self.dead or news.version <= self.version:
            return
        self.version = news.version
        self._peers = news.servers
        self.store.place(self.index, news.placement)
        for peer in range(self._peers):
            if peer not in news.up:
                self.store.gone(peer)
        self._chains.coordinator.knows(self.index, self.version)
        if takeovers := list(self._takeovers(news)):
            self._chains.coordinator.hear_takeovers(takeovers)
        self.after()

    def _takeovers(self, news: News) -> Iterator[Takeover]:
        """As `ChainDuty` tells of them."""
        for shard, (head, now) in enumerate(zip(news.heads, news.terms, strict=True)):
            term, version, entry = self.memory.began(shard)
            if head == self.index and term == now > 1:
                yield Takeover(shard=shard, term=term, version=version, entry=entry)

    def begin(self, fill: Fill) -> None:
        if not self.dead:
            self._fills.append((fill, _core.protocol.Fill(self.store, fill.shard, fill.target, fill.term)))
            self.after()

    def on_frame(self, connection: Connection, frame: bytes) -> None:
        if not self.dead:
            super().on_frame(connection, frame)
            self.after()

    def _welcomed(self, connection: Connection) -> None:
        """Clients are not judged by what single servers have."""

    def on_chain_frame(self, connection: Connection, frame: bytes) -> None:
        peer = connection.server
        if self.dead or self.links.get(peer) is not connection:
            return
        kind, _, _, _ = _core.protocol.head(frame)
        if kind == REPLY:
            self.store.incoming(peer, frame)
        elif kind == CHALLENGE:
            self._chains.network.send(connection, TO_SERVER, self.store.proof(TOKEN, frame))
        elif kind == WELCOME:
            self._greeted.add(peer)
        elif kind == REFUSE:
            raise Violation(f"server {peer} refuses server {self.index}")
        self.after()

    def on_loss(self, connection: Connection) -> None:
        if not self.dead and self.links.get(connection.server) is connection:
            del self.links[connection.server]
            self._greeted.discard(connection.server)
            self._held_back.pop(connection.server, None)
            self.store.lost(connection.server)
            self.after()

    def after(self) -> None:
        """Whatever happened here may have made something ready."""
        for fill, making in list(self._fills):
            code = making.step()
            if code != UNAVAILABLE:
                self._fills.remove((fill, making))
                self._filled(fill, code)
        for number, reply in self.store.mail():
            self._chains.network.send(self._sessions[number], TO_CLIENT, reply)
        for peer in range(self._peers):
            if self.dead or peer == self.index or not self.store.has_open(peer):
                continue
            link = self.links.get(peer)
            if link is None:
                link = self.links[peer] = Connection(-1 - self.index, 1, peer, stream=True)
                self._chains.network.send(link, TO_SERVER, self.store.hello())
                if self._chains.servers[peer].dead:
                    self._chains.lose(link)
            elif peer in self._greeted and not self._lags(peer):
                for frame in self._out_of_turn(peer, self.store.outgoing(peer)):
                    self._chains.network.send(link, TO_SERVER, frame)

    def _filled(self, fill: Fill, code: int) -> None:
        self._chains.coordinator.hear(fill, code)

    def _lags(self, peer: int) -> bool:
        """Where copies may come later, some come much later."""
        now = self._chains.clock.now
        if self._chains.plan.weak and now >= self._lag_until.get(peer, 0.0) and self._rng.random() < 0.2:
            self._lag_until[peer] = now + self._rng.uniform(0, 200)
            self._chains.later(self, self._lag_until[peer] - now, self.after)
        return now < self._lag_until.get(peer, 0.0)

    def _out_of_turn(self, peer: int, frames: list[bytes]) -> list[bytes]:
        """Threads of a server send entries of the log as each is done, not in the log's order."""
        frames = self._held_back.pop(peer, []) + frames
        entries = [frame for frame in frames if _core.protocol.head(frame)[0] in REPLICATE]
        if not frames or len(entries) < len(frames) or self._rng.random() < 0.5:
            return frames
        self._rng.shuffle(frames)
        self._held_back[peer] = frames[:1]
        self._chains.later(self, self._rng.uniform(0, 3), self.after)
        return frames[1:]

    def end(self) -> None:
        """Killed. Nobody has seen it yet but those who are connected."""
        self.dead = True
        for link in self.links.values():
            self._chains.network.cut(link)
        for client in self._chains.clients:
            if (link := client.link(self.index)) is not None:
                self._chains.lose(link)
        for server in self._chains.servers:
            if self.index in server.links:
                self._chains.lose(server.links[self.index])


class ChainClient(SimulatedClient):
    """A client that is told where shards have gone."""

    def __init__(self, world: ChainWorld, who: int) -> None:
        self._chains = world
        self.version = 0
        self._ticking = False
        self.lost: Counter[int] = Counter()  # acknowledged pushes, by shard
        self._tried: Action | None = None
        self._settings_rng = random.Random(f"settings {who} {world.plan.seed}")
        super().__init__(world, who)

    def start(self) -> None:
        self.version = self.heard = 0
        super().start()
        self.learn()
        self._chains.coordinator.tell_losses([self])

    def learn(self) -> None:
        news = self._chains.coordinator.news_for(None)
        if self.down or news.version <= self.version:
            return
        self.version, self.news = news.version, news
        self._place(news.placement, news.servers)

    def _place(self, placement: _core.Placement, servers: int) -> None:
        self._machine.set_placement(placement)
        while len(self._links) < servers:
            self._links.append(None)
            self._greeted.append(False)
            self._heard.append(True)
            self._dial(len(self._links) - 1)
            self._arm(len(self._links) - 1, self.incarnation)
        self._settle(0)
        self._pump()

    def hear_losses(self) -> None:
        """As `PlacementWatch` does."""
        self.learn()
        if self.down:
            return
        losses = self._chains.coordinator.losses
        self.heard, takeovers = losses.news(WatchPlacement(after=0, wait_s=0, heard=self.heard))
        if lost := self._count_lost(takeovers):
            losses.hear(WatchPlacement(after=0, wait_s=0, lost=lost))

    def _count_lost(self, takeovers: Iterable[Takeover]) -> tuple[Lost, ...]:
        found = []
        for new in takeovers:
            last, pushes = self._machine.taken_over(new.shard, new.term, new.version, new.entry)
            self.lost[new.shard] += pushes
            if last > new.version or pushes:
                found.append(
                    Lost(
                        client=self._who,
                        shard=new.shard,
                        term=new.term,
                        version=new.version,
                        last=last,
                        pushes=pushes,
                    )
                )
        return tuple(found)

    def link(self, server: int) -> Connection | None:
        return None if server >= len(self._links) else super().link(server)

    def _pump(self) -> None:
        super()._pump()
        if self._machine.homeless() and not self._ticking:
            self._ticking = True
            self._chains.later(self, HOMES_MS, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if not self.down:
            self._machine.send_homeless()
            self._pump()

    def _begin(self, action: Action) -> bool:
        self._chains.chain_ledger.at(self.version)
        # Once for an action, which is tried at each answer: else answers would make more and more of them.
        if self._chains.changes_settings and action.kind == "push" and action is not self._tried:
            self._tried = action
            if self._settings_rng.random() < 0.2:
                self._change_settings(action.detail[0])
        return super()._begin(action)

    def _change_settings(self, table: int) -> None:
        """Another momentum, too small for any value: rows keep it in their state, which copies compare."""
        spec = self._chains.specs[table]
        spec.generation += 1
        spec.optimizer.momentum = MOMENTUM * (1 + spec.generation % 7)
        frame = self._machine.declare(spec)
        for server, link in enumerate(self._links):
            if link is not None and self._greeted[server]:
                self._send(link, frame)

    def _settle(self, seq: int) -> None:
        # What is acknowledged or read now may have been done under the newest placement that there is.
        self._chains.chain_ledger.at(self._chains.coordinator.placer.version)
        super()._settle(seq)
