"""One simulated run from one plan: the compiled protocol under a network that does its worst.

    python -m tests.sim pushes 17         replays seed 17, says what happened, shrinks the plan if it fails
    python -m tests.sim pushes 0:5000     runs these seeds, stops at the first that fails

Deterministic: the clock is virtual, and all chance comes from the seed. After `plan.quiet_after` the
network is only slow; then everything that was begun must come to its end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .ledger import Ledger, Rows, Violation
from .network import TO_SERVER, Clock, Connection, Network
from .nodes import SimulatedClient, SimulatedServer, Verifier, table_specs
from .plan import Action, Plan

LIVENESS_MS = 60_000.0
CLIENT_ACTIONS = ("push", "pull", "cut", "mute", "pause_client", "crash")
NOTICE_MS = 30.0  # until an end sees that its connection is gone


@dataclass(frozen=True)
class Summary:
    """What a run that found nothing went through."""

    virtual_ms: float
    frames: int
    pushes: int
    acked: int
    duplicates: int  # pushes that arrived at a shard again
    applied_unacked: int  # pushes of crashed clients that show
    fenced_frames: int  # late frames of incarnations that were replaced
    blocked: int  # times that a client found its window full


class World:
    """All that takes part in one run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.network = Network(plan, self.clock, self._deliver)
        self.placement = [shard % plan.servers for shard in range(plan.shards)]
        self.specs = table_specs(plan.columns)
        self._rng = random.Random(f"world {plan.seed}")
        self._left = len(plan.actions)
        self._populate()
        for action in plan.actions:
            self._schedule(action)

    def _populate(self) -> None:
        plan = self.plan
        self.ledger = Ledger(plan, self.placement)
        self._servers = [SimulatedServer(self, index) for index in range(plan.servers)]
        self.verifier = Verifier(self, self._servers)
        self._clients = [SimulatedClient(self, who) for who in range(plan.clients)]

    def finished(self) -> bool:
        """Whether all was asked and all was answered; what is still in flight then is late frames."""
        quiet = self._left == 0 and self.clock.now >= self.plan.quiet_after
        return quiet and all(client.idle() for client in self._clients)

    def run(self) -> Summary:
        limit = self.plan.quiet_after + LIVENESS_MS
        while self.clock.step():
            if self.clock.now > limit:
                raise Violation(f"not finished {LIVENESS_MS:g} ms after the last fault")
        for client in self._clients:
            client.check_end()
        tables = self._final_tables()
        self.ledger.judge(tables)
        return self._summary(tables)

    def _final_tables(self) -> list[Rows]:
        return self.verifier.read_all()

    def _summary(self, tables: list[Rows]) -> Summary:
        pushes = self.ledger.pushes
        unacked = [push for push in pushes if not push.acked]
        return Summary(
            virtual_ms=self.clock.now,
            frames=self.network.frames,
            pushes=len(pushes),
            acked=len(pushes) - len(unacked),
            duplicates=sum(server.store.counters()["duplicates"] for server in self._servers),
            applied_unacked=sum(bool(tables[push.table][:, push.column].any()) for push in unacked),
            fenced_frames=sum(server.fenced_frames for server in self._servers),
            blocked=sum(client.blocked for client in self._clients),
        )

    def closed_by_server(self, connection: Connection) -> None:
        self._notice(connection)

    def _notice(self, connection: Connection) -> None:
        node = self._node(connection)
        wait = self._rng.uniform(0, NOTICE_MS)

        def tell() -> None:
            if self.clock.now < node.paused_until:
                self.clock.at(node.paused_until, tell)
            else:
                node.on_loss(connection)

        self.clock.at(self.clock.now + wait, tell)

    def _node(self, connection: Connection) -> SimulatedClient:
        return self._clients[connection.who]

    def _deliver(self, connection: Connection, direction: int, frame: bytes) -> None:
        node: SimulatedServer | SimulatedClient = (
            self._servers[connection.server] if direction == TO_SERVER else self._node(connection)
        )
        if self.clock.now < node.paused_until:
            self.clock.at(node.paused_until, lambda: self._deliver(connection, direction, frame))
        else:
            node.on_frame(connection, frame)

    def _schedule(self, action: Action) -> None:
        def event() -> None:
            client = self._clients[action.who] if action.kind in CLIENT_ACTIONS else None
            if (
                client is not None
                and self.clock.now < client.paused_until
                and action.kind in ("push", "pull")
            ):
                self.clock.at(client.paused_until, event)
                return
            self._left -= 1
            self._act(action)

        self.clock.at(action.at, event)

    def _act(self, action: Action) -> None:
        now = self.clock.now
        if action.kind == "pause_server":
            self._servers[action.who].paused_until = now + action.detail[0]
            return
        client = self._clients[action.who]
        if action.kind in ("push", "pull"):
            client.work(action)
        elif action.kind == "crash":
            client.crash(action.detail[0])
        elif action.kind == "pause_client":
            client.paused_until = now + action.detail[0]
        elif action.kind == "mute":
            server, direction, ms = action.detail
            self.network.mute(action.who, server, direction, now + ms)
        elif action.kind == "cut" and (connection := client.link(action.detail[0])) is not None:
            self.network.cut(connection)
            self._notice(connection)


def run_plan(plan: Plan) -> Summary:
    """Run it; raises Violation."""
    return World(plan).run()
