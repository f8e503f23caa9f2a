"""Chains of servers under the same bad network: servers die, sleep and are given up, join and leave, while
clients push and pull. The placement is decided by the coordinator's own `Placer`; fills are the shipped ones.

Judged, besides what `ledger` says: once the faults are over every chain is whole again, and its members are
equal to the last byte. A pull is strong: it shows what was acknowledged before it began. The one exception is a
server that slept, was given up and does not know it yet: what others did under placements that the reader
has not learnt may be missing there.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shoal import _core
from shoal.fleet.placer import Fill, Placer

from .ledger import KEY_ARRAY, Ledger, Read, Rows, Violation
from .network import TO_CLIENT, TO_SERVER, Connection
from .nodes import CHALLENGE, REFUSE, REPLY, TOKEN, WELCOME, SimulatedClient, SimulatedServer, Verifier
from .plan import Action, Plan, make_plan
from .rounds import Judge, RoundClient, RoundPlan, RoundWorld, make_round_plan
from .simulator import World

SERVER_FAULTS = ("kill", "sleep", "add", "remove", "cut_chain")
UNAVAILABLE = 6  # of base/status.h
HOMES_MS = 5.0
REPLICATE = (25, 26, 27)  # of wire/frame.h
VERIFIER = 2_000_000


def make_chain_plan(seed: int) -> Plan:
    """The plan of a seed, with replicas and with faults of servers."""
    rng = random.Random(f"chains {seed}")
    plan = make_plan(seed)
    servers = rng.choice((2, 3, 3, 4))
    replicas = rng.choice((1, 1, 2)) if servers > 2 else 1
    calm = [action for action in plan.actions if action.kind != "pause_server"]
    faults = [_server_fault(rng, servers, plan.quiet_after) for _ in range(rng.choice((1, 2, 4, 6)))]
    actions = sorted([*calm, *faults], key=lambda action: action.at)
    shards = rng.choice((2, 4, 8))
    return dataclasses.replace(
        plan, servers=servers, shards=shards, replicas=replicas, actions=tuple(actions), late_ms=200.0
    )


def _server_fault(rng: random.Random, servers: int, length: float) -> Action:
    kind = rng.choice(SERVER_FAULTS)
    detail = (rng.choice((50, 200, 500)), rng.randrange(servers + 2))
    return Action(rng.uniform(0, length), kind, rng.randrange(servers + 1), detail)


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


class News(NamedTuple):
    """A placement, and what the core's own does not say again."""

    version: int
    servers: int
    up: frozenset[int]
    sync: int  # where the sync shard is asked
    placement: _core.Placement


class ChainServer(SimulatedServer):
    """A server with servers behind it: its chain's connections, and the fills that it makes."""

    def __init__(self, world: ChainWorld, index: int) -> None:
        super().__init__(world, index)
        self._chains = world
        self.store = _core.protocol.Server(world.plan.shards, TOKEN, placed=False)
        self.index = index
        self.dead = False
        self.version = 0
        self.links: dict[int, Connection] = {}
        self._peers = 0  # that it knows of
        self._greeted: set[int] = set()
        self._fills: list[tuple[Fill, _core.protocol.Fill]] = []
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
        self.after()

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
                self._chains.coordinator.hear(fill, code)
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
            elif peer in self._greeted:
                for frame in self._out_of_turn(peer, self.store.outgoing(peer)):
                    self._chains.network.send(link, TO_SERVER, frame)

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
        super().__init__(world, who)

    def start(self) -> None:
        self.version = 0
        super().start()
        self.learn()

    def learn(self) -> None:
        news = self._chains.coordinator.news_for(None)
        if self.down or news.version <= self.version:
            return
        self.version, self.news = news.version, news
        self._machine.set_placement(news.placement)
        while len(self._links) < news.servers:
            self._links.append(None)
            self._greeted.append(False)
            self._heard.append(True)
            self._dial(len(self._links) - 1)
            self._arm(len(self._links) - 1, self.incarnation)
        self._settle(0)
        self._pump()

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
        return super()._begin(action)

    def _settle(self, seq: int) -> None:
        # What is acknowledged or read now may have been done under the newest placement that there is.
        self._chains.chain_ledger.at(self._chains.coordinator.placer.version)
        super()._settle(seq)


class Coordinator:
    """Decides by the shipped `Placer`; what it says arrives at everybody at another time."""

    def __init__(self, world: ChainWorld, replicas: int) -> None:
        self._world = world
        self._rng = random.Random(f"coordinator {world.plan.seed}")
        self.placer = Placer(replicas)
        self.placer.apply(self.placer.first(world.plan.shards, world.plan.servers))
        self._up = set(range(world.plan.servers))
        self._leaving: set[int] = set()
        self._said = self._newest()

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
            weak=False,
            servers=[
                _core.ServerAddress(i, "sim", int(i in self._up)) for i in range(len(self._world.servers))
            ],
            terms=list(placed.terms),
            chains=[list(chain) for chain in placed.chains],
        )
        sync = placed.chains[0][0]
        return News(placed.version, len(self._world.servers), frozenset(self._up), sync, placement)

    def knows(self, server: int, version: int) -> None:
        if self.placer.knows(server, version):
            self.publish()

    def publish(self) -> None:
        nodes: list[Any] = [*self._world.servers, *self._world.clients]
        for node in nodes:
            self._world.later(node, self._rng.uniform(0, self._rng.choice((5, 20, 300))), node.learn)
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
        return server in self._up and all(living.intersection(chain) for chain in placed.chains)

    def gone(self, server: int) -> None:
        if server in self._up:
            self._up.discard(server)
            self._leaving.discard(server)
            self._decide(self.placer.gone(server) or self.placer.joined())

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

    def chain(self, shard: int) -> tuple[int, ...]:
        assert self.placer.placed is not None
        return self.placer.placed.chains[shard]

    def settled(self) -> bool:
        """Everybody knows the newest placement, and there is nothing to be done about it."""
        placed = self.placer.placed
        assert placed is not None
        living = [s for s in self._world.servers if not s.dead]
        known = all(server.version == placed.version for server in living)
        what_if = copy.deepcopy(self.placer)
        return known and not self.placer.fills and not what_if.plan(self._up, self._leaving)


class ChainWorld(World):
    """One run with chains."""

    def __init__(self, plan: Plan) -> None:
        self.servers: list[ChainServer] = []
        self.clients: list[ChainClient] = []
        World.__init__(self, plan)
        self.kills = self.fills = 0

    def _client(self, who: int) -> ChainClient:
        return ChainClient(self, who)

    def _populate(self) -> None:
        self.chain_ledger = self.ledger = ChainLedger(self.plan, self.placement)
        self.servers.extend(ChainServer(self, index) for index in range(self.plan.servers))
        self._servers = self.servers  # type: ignore[assignment]
        self.coordinator = Coordinator(self, self.plan.replicas)
        for server in self.servers:
            server.learn()
        self.verifier = Verifier(self, self.servers)  # type: ignore[arg-type]
        for who in range(self.plan.clients):
            self.clients.append(self._client(who))
        self._clients = self.clients  # type: ignore[assignment]

    def later(self, node: Any, ms: float, event: Callable[[], None]) -> None:
        """An event at a node, when it is awake."""

        def happen() -> None:
            if self.clock.now < node.paused_until:
                self.clock.at(node.paused_until, happen)
            else:
                event()

        self.clock.at(self.clock.now + ms, happen)

    def lose(self, connection: Connection) -> None:
        self.network.cut(connection)
        self._notice(connection)

    def _node(self, connection: Connection) -> Any:
        return self._clients[connection.who] if connection.who >= 0 else self.servers[-1 - connection.who]

    def _deliver(self, connection: Connection, direction: int, frame: bytes) -> None:
        if connection.who >= 0 or direction == TO_SERVER:
            super()._deliver(connection, direction, frame)
            return
        server = self.servers[-1 - connection.who]
        self.later(server, 0.0, lambda: server.on_chain_frame(connection, frame))

    def _act(self, action: Action) -> None:
        if action.kind not in SERVER_FAULTS:
            super()._act(action)
            return
        server = action.who % len(self.servers)
        wait = float(action.detail[0])
        rng = self._rng
        if action.kind == "kill" and self.coordinator.spare(server):
            self.kills += 1
            self.servers[server].end()
            self.clock.at(self.clock.now + rng.uniform(5, wait), lambda: self.coordinator.gone(server))
        elif action.kind == "sleep" and self.coordinator.spare(server) and not self.servers[server].dead:
            self.kills += 1
            asleep = self.servers[server]
            asleep.paused_until = self.clock.now + wait

            def give_up() -> None:
                if self.coordinator.spare(server):
                    self.coordinator.gone(server)
                    self.later(asleep, rng.uniform(0, 100), asleep.end)

            self.clock.at(self.clock.now + rng.uniform(5, wait), give_up)
        elif action.kind == "add" and len(self.servers) < self.plan.servers + 3:
            self.coordinator.add()
        elif action.kind == "remove":
            self.coordinator.remove(server, self.plan.replicas)
        elif action.kind == "cut_chain":
            link = self.servers[server].links.get(action.detail[1])
            if link is not None:
                self.lose(link)

    def finished(self) -> bool:
        return super().finished() and self.coordinator.settled()

    def _final_tables(self) -> list[Rows]:
        reader = _core.protocol.Client(VERIFIER, 1, len(self.servers), self.placement)
        for spec in self.specs:
            reader.declare(spec)
        reader.set_placement(self.coordinator.news_for(None).placement)
        sessions = [_core.protocol.Session(server.store) for server in self.servers]
        for session in sessions:
            [challenge], _ = session.feed(reader.hello())
            session.feed(reader.proof(TOKEN, challenge))
        tables = []
        for spec in self.specs:
            operation = reader.pull(spec.id, KEY_ARRAY)
            for server, session in enumerate(sessions):
                for frame in reader.outgoing(server):
                    for reply in session.feed(frame)[0]:
                        reader.incoming(server, reply)
            if not reader.done(operation):
                raise Violation("a pull at the end is not answered")
            tables.append(reader.rows(operation))
        self.chain_ledger.at(self.coordinator.placer.version)
        self._compare_copies()
        return tables

    def _compare_copies(self) -> None:
        placed = self.coordinator.placer.placed
        assert placed is not None
        for shard, chain in enumerate(placed.chains):
            if len(chain) < min(self.plan.replicas + 1, sum(not server.dead for server in self.servers)):
                raise Violation(f"shard {shard} has {len(chain)} copies at the end")
            head, rows = self.servers[chain[0]].store.image(shard)
            for copy in chain[1:]:
                its_head, its_rows = self.servers[copy].store.image(shard)
                if sorted(rows) != sorted(its_rows):
                    raise Violation(f"shard {shard}: servers {chain[0]} and {copy} have other rows")
                numbers, records = _parse_head(head)
                its_numbers, its_records = _parse_head(its_head)
                if numbers != its_numbers:
                    raise Violation(
                        f"shard {shard}: servers {chain[0]} and {copy} are at {numbers} and {its_numbers}"
                    )
                # A server fences a client when that connects; what was applied for it is the same.
                for life in records.keys() & its_records.keys():
                    if records[life] != its_records[life]:
                        raise Violation(
                            f"shard {shard}: {chain[0]} and {copy} know of other pushes of {life}"
                        )


def _parse_head(head: bytes) -> tuple[tuple[int, ...], dict[tuple[int, int], bytes]]:
    """Of a shard's image: entries, version, commits, staleness; and by (client, incarnation) what it applied."""
    at, records = 48, {}
    (clients,) = struct.unpack_from("<Q", head, at)
    at += 8
    for _ in range(clients):
        client, incarnation, _low, applied = struct.unpack_from("<4Q", head, at)
        records[client, incarnation] = head[at + 16 : at + 32 + 16 * applied]
        at += 32 + 16 * applied
    return struct.unpack_from("<6Q", head), records


def run_chain_plan(plan: Plan) -> tuple[int, int]:
    """Runs it; the number of pushes and of servers that were lost. Raises Violation."""
    world = ChainWorld(plan)
    world.run()
    return len(world.ledger.pushes), world.kills


def run_chain_seed(seed: int) -> tuple[int, int]:
    try:
        return run_chain_plan(make_chain_plan(seed))
    except Violation as violation:
        raise Violation(f"chains of seed {seed}: {violation}") from None


class ChainRoundClient(RoundClient, ChainClient):
    """A worker whose servers come and go."""

    def sync_server(self) -> int:
        return self.news.sync

    def everywhere(self) -> list[int]:
        return sorted(self.news.up)

    def _ask_again(self) -> None:
        incarnation = self.incarnation

        def again() -> None:
            if not self.down and self.incarnation == incarnation:
                self._carry()
                self._pump()

        self._chains.later(self, HOMES_MS, again)

    def _settle(self, seq: int) -> None:
        RoundClient._settle(self, seq)


class ChainRoundWorld(ChainWorld, RoundWorld):
    """Rounds over chains."""

    def __init__(self, shape: RoundPlan) -> None:
        self.shape = shape
        self.judged = Judge()
        ChainWorld.__init__(self, shape.plan)

    def _client(self, who: int) -> ChainRoundClient:
        return ChainRoundClient(self, who)

    def _compare_copies(self) -> None:
        super()._compare_copies()
        head, *copies = self.coordinator.chain(0)
        for copy_ in copies:
            if self.servers[head].store.sync_image() != self.servers[copy_].store.sync_image():
                raise Violation(f"the sync shards of servers {head} and {copy_} differ")


def make_chain_round_plan(seed: int) -> RoundPlan:
    plan, rounds = make_chain_plan(seed), make_round_plan(seed)
    faults = tuple(action for action in plan.actions if action.kind not in ("push", "pull"))
    return dataclasses.replace(
        rounds, plan=dataclasses.replace(plan, actions=faults, columns=rounds.plan.columns)
    )


def run_chain_round_seed(seed: int) -> tuple[int, int]:
    try:
        return ChainRoundWorld(make_chain_round_plan(seed)).run_rounds()
    except Violation as violation:
        raise Violation(f"rounds over chains of seed {seed}: {violation}") from None
