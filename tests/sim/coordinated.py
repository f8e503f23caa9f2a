"""Chains under the shipped coordinator, which is itself a process that dies, sleeps and is not reached.

Servers register, watch and report as `ChainDuty` does, clients join, beat and watch as a `Client` does, by
connections that are slow, silent one way, and cut. The coordinator decides alone: who is given up, who is
evicted, where shards go. A server that is silent for longer than a lease is given up while it goes on.

Judged, besides what `chains` says:

1. what was answered holds, also after the coordinator was killed and began again from its journal: a name's
   id, the order of its incarnations, a server's place, a table's id; no two placements of one version, no two
   chains of one shard and term, and neither ever goes back;
2. from the moment that a worker's eviction is done, nothing more of its life takes effect;
3. nobody is told that another has its place where nobody has;
4. another coordinator that begins with the journal is where this one is.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from shoal.config import CoordinatorOptions
from shoal.fleet.losses import Losses
from shoal.fleet.placer import Fill, Placer
from shoal.store import messages as m
from shoal.store.placement_watch import core_placement

from .answers import Answers
from .chain_nodes import ChainLedger
from .chains import SERVER_FAULTS, ChainWorld, make_chain_plan
from .control import Asker, CoordinatorProcess, Stage, simulated_coordinator
from .coordinated_nodes import CoordinatedClient, CoordinatedServer, Evictor
from .ledger import Rows, Violation
from .network import Connection
from .nodes import Verifier
from .plan import TABLES, Action, Plan

CONTROL_FAULTS = ("kill_coordinator", "pause_coordinator", "silence", "cut_control")
CHAIN_SILENCE = "silent_chain"  # one way, from one server to another
STRETCH = 6  # leases take seconds
SHAKY_MS = 1000.0  # after a fault of a server, until the coordinator has heard of it again
LOOK_MS = 100.0
EVICTORS = 1000  # their numbers as clients
KEPT = ("_placer.placed", "_grants._clients", "_roster.servers", "_roster.gone", "_roster.leaving")


def make_coordinator_plan(seed: int) -> Plan:
    rng, plan = random.Random(f"coordinated {seed}"), make_chain_plan(seed)
    length = STRETCH * plan.quiet_after
    actions = [action._replace(at=STRETCH * action.at) for action in plan.actions]
    for number, action in enumerate(actions):
        if action.kind in ("sleep", "pause_client"):
            ms = (rng.choice((200, 2000, 4000)), *action.detail[1:])
            actions[number] = action._replace(detail=ms)
    for _ in range(rng.choice((1, 3, 6))):
        kind = rng.choice((*CONTROL_FAULTS, "kill_coordinator"))
        detail = (rng.choice((50, 500, 2000, 4000)), rng.randrange(8), rng.randrange(2))
        actions.append(Action(rng.uniform(0, length), kind, rng.randrange(8), detail))
    for _ in range(rng.choice((0, 0, 1, 2))):
        detail = (rng.choice((50, 500, 4000)), rng.randrange(4), rng.randrange(2))
        actions.append(Action(rng.uniform(0, length), CHAIN_SILENCE, rng.randrange(4), detail))
    if rng.random() < 0.5:  # a worker is evicted
        kind, at, who = rng.choice(("pause_client", "silence")), rng.uniform(0, length), rng.randrange(8)
        if kind == "pause_client":
            actions.append(Action(at, kind, who % plan.clients, (rng.choice((3500, 6000)),)))
        else:
            actions.append(Action(at, kind, who, (rng.choice((3500, 6000)), 0, 0)))
    actions.sort(key=lambda action: action.at)
    shards = max(plan.shards, 4)  # as many as servers, at least
    return dataclasses.replace(plan, actions=tuple(actions), quiet_after=length, shards=shards)


class Placing:
    """The coordinator's placement, as those look at it who judge."""

    def __init__(self, world: CoordinatedWorld) -> None:
        self._world = world
        self._last = Placer(world.plan.replicas)
        self._filled: set[Fill] = set()

    @property
    def placer(self) -> Placer:
        running = self._world.process.coordinator
        if running is not None:
            self._last = running._placer
        self._filled |= set(self._last.fills.values())
        return self._last

    @property
    def losses(self) -> Losses:
        running = self._world.process.coordinator
        assert running is not None
        return running._losses

    def news_for(self, _server: None) -> SimpleNamespace:
        running = self._world.process.coordinator
        assert running is not None
        return SimpleNamespace(placement=core_placement(running._roster.placement(running._placement())))

    def spare(self, server: int) -> bool:
        """Whether nothing is lost with it, nor with those that are not quite there."""
        now = self._world.clock.now
        # A coordinator that dies while it decides is followed by one that knows the journal alone.
        decided, kept = self.placer.placed, self._world.process.restored()._placer.placed
        if decided is None or kept is None or self._world.servers[server].dead:
            return False
        sound = {s.index for s in self._world.nodes if not s.dead and now >= s.shaky_until} - {server}
        chains = [*decided.chains, *kept.chains]
        for placed in (decided, kept):
            for fill in self._filled:  # that may be done, and not heard of yet
                if fill.term == placed.terms[fill.shard]:
                    chains.append(tuple({*placed.chains[fill.shard], fill.target} - {fill.leaving}))
        return all(sound.intersection(chain) for chain in chains)

    def room_for_copies(self) -> int:
        running = self._world.process.coordinator
        assert running is not None
        living = {server.index for server in self._world.servers if not server.dead}
        return len(living) if living - running._roster.leaving else 1

    def settled(self) -> bool:
        running, placer = self._world.process.coordinator, self.placer
        if running is None or placer.placed is None or placer.fills or placer.first_to_know:
            return False
        roster = running._roster
        for server in self._world.servers:
            if server.dead == (server.index in roster.up):
                return False
            if not server.dead and server.version != placer.version:
                return False
        heard, now = running._losses.number, self._world.clock.now
        nodes = [*self._world.nodes, *self._world.workers]
        if now < self._world.process.paused_until or any(now < max(node.silent) for node in nodes):
            return False  # what was said meanwhile is yet to be heard
        for client in self._world.workers:
            if (client.heard, client.version) != (heard, placer.version):
                return False
        return not copy.deepcopy(placer).plan(roster.up, roster.leaving, running._shard_costs)


class CoordinatedLedger(ChainLedger):
    """Servers that the coordinator does not hear of go on without knowing that they were given up, too."""

    def __init__(self, plan: Plan, server_of_shard: list[int]) -> None:
        super().__init__(plan, server_of_shard)
        self.zombies = any(action.kind in ("sleep", "silence") for action in plan.actions)


class CoordinatedWorld(ChainWorld):
    """One run."""

    ledger_kind = CoordinatedLedger
    changes_settings = False  # tables are those that its coordinator knows
    over = False

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._stage = stage
        self.nodes: list[CoordinatedServer] = []
        self.workers: list[CoordinatedClient] = []
        self._evictors: list[Evictor] = []
        self._evicted: list[tuple[str, int, set[tuple[int, int]]]] = []
        self.answers = Answers()
        super().__init__(plan)

    def _server(self, index: int) -> CoordinatedServer:
        return CoordinatedServer(self, index)

    def _worker(self, who: int) -> CoordinatedClient:
        return CoordinatedClient(self, who)

    def _evictor(self, *what: Any) -> Evictor:
        return Evictor(self, *what)

    def _populate(self) -> None:
        plan = self.plan
        self.chain_ledger = self.ledger = self.ledger_kind(plan, self.placement)
        options = CoordinatorOptions(servers=plan.servers, shards=plan.shards, replicas=plan.replicas)
        self.process = CoordinatorProcess(
            self.clock, options, seed=f"{plan.seed}", delay_ms=plan.delay_ms, quiet_after=plan.quiet_after
        )
        self.process.on_death = self._end_evictors
        self._stage.process, self._stage.evict = self.process, self._evict
        self.process.start()
        self.coordinator = Placing(self)  # type: ignore[assignment]
        self.silent, self.paused_until = [0.0, 0.0], 0.0  # as somebody who asks for servers to go
        self.servers = self._servers = self.nodes  # type: ignore[assignment]
        self.nodes.extend(self._server(index) for index in range(plan.servers))
        self.verifier = Verifier(self, self.nodes)  # type: ignore[arg-type]
        self.clients = self._clients = self.workers  # type: ignore[assignment]
        self.workers.extend(self._worker(who) for who in range(plan.clients))
        self.clock.at(LOOK_MS, self._look)

    def _look(self) -> None:
        """Whether all is done: those who look after themselves all the time then end."""
        self.over = self.process.over = self._done()
        if not self.over:
            self.clock.at(self.clock.now + LOOK_MS, self._look)

    def _done(self) -> bool:
        return super().finished()

    def finished(self) -> bool:
        return self.over

    def _node(self, connection: Connection) -> Any:
        if connection.who >= EVICTORS:
            return self._evictors[connection.who - EVICTORS]
        return super()._node(connection)

    # Faults.

    def _act(self, action: Action) -> None:
        if action.kind not in (*SERVER_FAULTS, *CONTROL_FAULTS, CHAIN_SILENCE):
            super()._act(action)
            return
        server = self.nodes[action.who % len(self.nodes)]
        until = self.clock.now + action.detail[0]
        match action.kind:
            case "kill" if self.coordinator.spare(server.index):
                self.kills += 1
                server.end()
            case "sleep" if self.coordinator.spare(server.index):
                self.kills += 1
                server.paused_until = until
                server.shaky_until = max(server.shaky_until, until + SHAKY_MS)
            case "add" if len(self.nodes) < self.plan.servers + 3 and all(s.admitted for s in self.nodes):
                self.nodes.append(self._server(len(self.nodes)))
            case "remove":
                asker = Asker(self.process, self)
                asker.ask(m.RemoveServer(index=server.index), 1.0, lambda _answer: asker.close())
            case "cut_chain":
                link = server.links.get(action.detail[1])
                if link is not None:
                    self.lose(link)
            case "silent_chain":
                self.network.mute(-1 - server.index, action.detail[1], action.detail[2], until)
            case "kill_coordinator":
                self.process.light(action.detail[1], float(action.detail[0]))
            case "pause_coordinator" if not self.process.down:
                self.process.paused_until = max(self.process.paused_until, until)
            case "silence" | "cut_control":
                self._disturb(action, until)

    def _disturb(self, action: Action, until: float) -> None:
        """Of a server or a client, one way."""
        nodes: list[CoordinatedServer | CoordinatedClient] = [*self.nodes, *self.workers]
        node = nodes[action.who % len(nodes)]
        cut = action.kind == "cut_control"
        if isinstance(node, CoordinatedServer):
            if not self.coordinator.spare(node.index):
                return
            # It may be silent the other way for longer.
            node.shaky_until = max(node.shaky_until, (self.clock.now if cut else until) + SHAKY_MS)
        if not cut:
            node.silent[action.detail[2]] = until
        for line in [line for line in self.process.lines if line.node is node] if cut else ():
            line.cut()

    def _evict(
        self, name: str, grant: m.ClientGrant, wanted: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        number = len(self._evictors)
        # It is known by its number before it has begun.
        self._evictors.append(None)  # type: ignore[arg-type]
        self._evictors[number] = evictor = self._evictor(EVICTORS + number, name, grant, wanted, done)
        evictor.start()

    def _end_evictors(self) -> None:
        for evictor in self._evictors:
            evictor.end()

    # What must be.

    def evicted(self, name: str, incarnation: int) -> None:
        """From now on nothing of its earlier lives takes effect."""
        shown = set().union(*(self._shown(server) for server in self.nodes))
        self._evicted.append((name, incarnation, shown))

    def _shown(self, server: CoordinatedServer) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for shard in range(self.plan.shards):
            for table, _key, _meta, row in server.store.image(shard)[1]:
                number = TABLES.index(table)
                columns = np.flatnonzero(np.frombuffer(row, np.float32)[: self.specs[number].dim])
                found.update((number, column) for column in columns.tolist())
        return found

    def check_given_up(self, index: int) -> None:
        if index in self.process.restored()._roster.up:
            raise Violation(f"server {index} is told that it was given up, and it was not")

    def _final_tables(self) -> list[Rows]:
        if not self.over:
            raise Violation("it stands still")
        tables = super()._final_tables()
        for name, incarnation, shown in self._evicted:
            for push in self.ledger.pushes:
                late = tables[push.table][:, push.column].any() and (push.table, push.column) not in shown
                if late and self.workers[push.who].name == name and push.incarnation <= incarnation:
                    raise Violation(
                        f"push {push.column} of {name}, incarnation {push.incarnation}, took effect after "
                        f"it was evicted by incarnation {incarnation}"
                    )
        running, restored = self.process.coordinator, self.process.restored()
        assert running is not None
        for part in KEPT:
            here, there = (_find(one, part) for one in (running, restored))
            if here != there:
                raise Violation(f"{part} is {here}; by the journal it is {there}")
        return tables


def _find(thing: Any, path: str) -> Any:
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


def run_coordinator_plan(plan: Plan) -> tuple[int, int, int]:
    """How many coordinators and servers were lost, and workers evicted. Raises Violation."""
    with simulated_coordinator() as stage:
        world = CoordinatedWorld(plan, stage)
        world.run()
    return world.process.deaths, world.kills, sum(worker.evicted for worker in world.workers)
