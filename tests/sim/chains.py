"""Chains of servers under the same bad network: servers die, sleep and are given up, join and leave, while
clients push and pull. The placement is decided by the coordinator's own `Placer`; fills are the shipped ones.

Judged, besides what `ledger` says: once the faults are over every chain is whole again, and its members are
equal to the last byte. A pull is strong: it shows what was acknowledged before it began. The one exception is
a server that slept, was given up and does not know it yet: what others did under placements that the reader
has not learnt may be missing there.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable
from typing import Any

from shoal import _core

from .chain_coordinator import Coordinator
from .chain_nodes import MOMENTUM, ChainClient, ChainLedger, ChainServer
from .ledger import KEY_ARRAY, Rows, Violation
from .network import TO_SERVER, Connection
from .nodes import TOKEN, Verifier
from .plan import Action, Plan, make_plan
from .simulator import World

SERVER_FAULTS = ("kill", "sleep", "add", "remove", "cut_chain")
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


class ChainWorld(World):
    """One run with chains."""

    ledger_kind: type[ChainLedger] = ChainLedger
    changes_settings = True  # clients do, of tables, now and then

    def __init__(self, plan: Plan) -> None:
        self.servers: list[ChainServer] = []
        self.clients: list[ChainClient] = []
        World.__init__(self, plan)
        self.kills = self.fills = 0

    def _client(self, who: int) -> ChainClient:
        return ChainClient(self, who)

    def _populate(self) -> None:
        for spec in self.specs if self.changes_settings else []:
            spec.optimizer.momentum = MOMENTUM
        self.chain_ledger = self.ledger = self.ledger_kind(self.plan, self.placement)
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
                    awake = max(self.clock.now, asleep.paused_until)
                    self.clock.at(awake + rng.uniform(0, 100), asleep.end)

            self.clock.at(self.clock.now + wait * rng.uniform(0.1, 1), give_up)
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
        self._judge_losses(tables)
        return tables

    def _judge_losses(self, tables: list[Rows]) -> None:
        if lost := self.coordinator.losses.by_shard():
            raise Violation(f"clients miss what no chain has lost: {lost}")

    def _compare_copies(self) -> None:
        placed = self.coordinator.placer.placed
        assert placed is not None
        wanted = min(self.plan.replicas + 1, self.coordinator.room_for_copies())
        for shard, chain in enumerate(placed.chains):
            if len(chain) < wanted:
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
    """Of a shard's image: entries, version, commits, staleness; by (client, incarnation) what it applied."""
    at, records = 64, {}
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
