"""Cuts through several servers while clients push, under the shipped coordinator.

The decisions are those of `shoal.fleet.cuts`, images and files those of `shoal.fleet.parts`, and clients hold
their pushes by core/serve/hold.h. Messages of all of them are late, lost with their connection, or silent one
way; clients, servers and the coordinator sleep, die and come back in the middle of a cut, or of its images.

What was accepted is judged by `cut_judge`. When the faults are over all pushes go through, so nobody is held
for good, and one more cut is made.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from shoal.store import messages as m

from .control import Asker, Stage, simulated_coordinator
from .coordinated import CONTROL_FAULTS, CoordinatedLedger, CoordinatedWorld
from .cut_judge import URL, CutJudge
from .cut_nodes import CutClient, CutEvictor, CutServer, simulated_parts
from .disk import Disk
from .ledger import Push
from .plan import KEYS, TABLES, Action, Plan

SAVE_S = 20.0
AGAIN_MS = 500.0
AROUND_MS = 600.0  # of a cut: when most pushes come
FAULTS = (
    *CONTROL_FAULTS,
    "crash",
    "pause_client",
    "cut",
    "mute",
    "kill",
    "sleep",
    "cut_chain",
    "pause_server",
)


def make_cut_plan(seed: int) -> Plan:
    rng = random.Random(f"cuts {seed}")
    servers, clients = rng.choice((2, 2, 3)), rng.choice((2, 3))
    stream = rng.random() < 0.5
    length = rng.choice((3000.0, 6000.0, 9000.0))
    saves = sorted(rng.uniform(100, length) for _ in range(rng.choice((1, 2, 3))))
    columns = [0] * len(TABLES)
    actions = [Action(at, "save", 0, ()) for at in saves]
    actions += [_push(rng, clients, saves, columns) for _ in range(rng.choice((20, 40, 60)))]
    actions += [_fault(rng, rng.choice((length, AROUND_MS)), saves) for _ in range(rng.choice((0, 1, 3, 6)))]
    if (
        rng.random() < 0.3
    ):  # a client goes on, and just before a cut the coordinator does not know of it any more
        at = max(0.0, rng.choice(saves) - rng.uniform(2400, 4500))
        actions.append(Action(at, "silence", servers + rng.randrange(clients), (6000, 0, 0)))
        actions += [Action(at, "kill_coordinator", 0, (50, 0, 0))] * rng.randrange(2)
    actions.sort(key=lambda action: action.at)
    return Plan(
        seed=seed,
        servers=servers,
        shards=rng.choice((4, 8)),
        clients=clients,
        stream=stream,
        drop=0.0 if stream else rng.choice((0.0, 0.02, 0.1)),
        double=0.0 if stream else rng.choice((0.0, 0.1, 0.4)),
        delay_ms=rng.choice((1.0, 5.0, 20.0)),
        late_ms=rng.choice((20.0, 200.0, 800.0)),
        quiet_after=length + 3000.0,
        replicas=rng.choice((0, 0, 1)),
        columns=tuple(columns),
        actions=tuple(actions),
    )


def _push(rng: random.Random, clients: int, saves: list[float], columns: list[int]) -> Action:
    table = rng.randrange(len(TABLES))
    columns[table] += 1
    at = max(0.0, rng.choice(saves) + rng.uniform(-AROUND_MS, 2 * AROUND_MS))
    keys = [rng.randrange(len(KEYS)) for _ in range(rng.choice((2, 6, 12)))]
    return Action(at, "push", rng.randrange(clients), (table, columns[table] - 1, *keys))


def _fault(rng: random.Random, spread: float, saves: list[float]) -> Action:
    at = max(0.0, rng.choice(saves) + rng.uniform(-spread / 2, spread))
    kind = rng.choice(FAULTS)
    ms = rng.choice((50, 500, 1500, 3500))
    who, server, way = rng.randrange(8), rng.randrange(2), rng.randrange(2)
    if kind in ("crash", "pause_client", "cut", "mute", "pause_server"):
        detail = {"cut": (server,), "mute": (server, way, min(ms, 500))}.get(kind, (ms,))
        return Action(at, kind, who % 2, detail)
    return Action(at, kind, who, (ms, rng.randrange(8), way))


class CutLedger(CoordinatedLedger):
    """Also when pushes were acknowledged."""

    now: Callable[[], float]

    def __init__(self, plan: Plan, server_of_shard: list[int]) -> None:
        super().__init__(plan, server_of_shard)
        self.zombies = self.zombies or any(action.kind == "pause_server" for action in plan.actions)
        self.acked_at: dict[int, float] = {}

    def ack(self, push: Push) -> None:
        super().ack(push)
        self.acked_at[id(push)] = self.now()


class CutWorld(CoordinatedWorld):
    """One run."""

    ledger_kind = CutLedger

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._saving = 0  # that are not answered
        self._saves = 0
        self._last_made = False
        self._orders: dict[str, int] = {}  # by name of a checkpoint: the newest attempt
        super().__init__(plan, stage)

    def _populate(self) -> None:
        self.judge = CutJudge(self)
        super()._populate()
        assert isinstance(self.ledger, CutLedger)
        self.cut_ledger = self.ledger
        self.cut_ledger.now = lambda: self.clock.now
        self.clock.at(self.plan.quiet_after, self._last_save)

    def _server(self, index: int) -> CutServer:
        return CutServer(self, index)

    def _worker(self, who: int) -> CutClient:
        return CutClient(self, who)

    def _evictor(self, *what: Any) -> CutEvictor:
        return CutEvictor(self, *what)

    def _act(self, action: Action) -> None:
        if action.kind == "save":
            self._save(lambda _made: None)
        else:
            super()._act(action)

    def ordered(self, order: m.PartOrder) -> None:
        """A server is told to begin."""
        if order.do == "save":
            self._orders[order.name] = max(order.number, self._orders.get(order.name, 0))

    def _save(self, told: Callable[[bool], None]) -> None:
        """As `shoal.checkpoint.client` does."""
        self._saves += 1
        self._saving += 1
        request = m.SaveStore(url=URL, name=f"{self._saves:06}-0badcafe", wait_s=SAVE_S)
        asker = Asker(self.process, self)

        def answered(saved: Any) -> None:
            made = isinstance(saved, m.StoreSaved) and not saved.again
            if made:
                self.judge.accepted(request, self._orders[request.name], saved)
            asker.close()
            self._saving -= 1
            told(made)

        asker.ask(request, SAVE_S, answered)

    def _last_save(self) -> None:
        def told(made: bool) -> None:
            self._last_made = made
            if not made:
                self.clock.at(self.clock.now + AGAIN_MS, self._last_save)

        self._save(told)

    def _done(self) -> bool:
        return self._last_made and self._saving == 0 and super()._done()

    def end(self) -> None:
        """Threads go."""
        for server in self.nodes:
            assert isinstance(server, CutServer)
            server.parts.end()


def run_cut_plan(plan: Plan) -> tuple[int, int, int]:
    """How many cuts were made, how often clients held for one, and servers were lost."""
    with simulated_coordinator() as stage, simulated_parts(), Disk(plan.seed).mounted():
        world = CutWorld(plan, stage)
        try:
            world.run()
            world.judge.judge()
        finally:
            world.end()
    return len(world.judge.cuts), world.judge.attempts, world.kills
