"""What goes with servers, and whether that is what clients say: weak replication, and servers without a copy.

Weak: a push is acknowledged before the copies have it. Every client counts the acknowledged pushes that it
lost, by shard: exactly those of its own that do not show at the end.

Without copies: a server dies for good, and what it had is read from the last checkpoint by others, with the
shipped `checkpoint.shards`: its shards alone, or all shards together. What the dead, or those that went back,
had and the checkpoint has not is gone, or was pushed again by clients that had no answer yet. Clients name
versions: as many as are gone where nothing was pushed again, and never fewer. Nothing else is missing.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np

from shoal.checkpoint import manifest, shards
from shoal.checkpoint.place import Place
from shoal.store.messages import PartInfo

from .chain_nodes import ChainLedger, ChainServer
from .chains import ChainWorld, make_chain_plan
from .disk import SCHEME, Disk
from .ledger import Push, Read, Rows, Violation
from .plan import TABLES, Action, Plan, make_plan

URL = f"{SCHEME}:///ckpt"
LIFE = "life"
Shown = set[tuple[int, int]]  # (table, column) of pushes


class LossyLedger(ChainLedger):
    """A push shows wholly or not at all within a shard, and never twice; what was read may go again."""

    def begin_read(self, table: int, keys: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Read:
        return Read(table, keys, np.zeros_like(self._whole[table][keys]))


class LossyWorld(ChainWorld):
    """One run in which something may be lost."""

    ledger_kind = LossyLedger

    def _missing(self, tables: list[Rows]) -> Iterator[tuple[Push, int]]:
        """Pushes, and shards where they do not show; all of them are acknowledged."""
        for push in self.ledger.pushes:
            pushed = set(self.ledger.shard_of_key[push.weights > 0].tolist())
            shows = set(self.ledger.shard_of_key[tables[push.table][:, push.column] > 0].tolist())
            for shard in pushed - shows:
                yield push, shard


class WeakWorld(LossyWorld):
    """Chains whose heads acknowledge alone."""

    def _judge_losses(self, tables: list[Rows]) -> None:
        missing = Counter((push.who, shard) for push, shard in self._missing(tables))
        self.lost = missing.total()
        counted = Counter({(c._who, shard): n for c in self.clients for shard, n in c.lost.items() if n})
        if counted != missing:
            raise Violation(f"clients count {_show(counted)} as lost; missing is {_show(missing)}")
        told = sum(one.pushes for one in self.coordinator.losses.by_shard())
        if told != self.lost:
            raise Violation(f"the coordinator was told of {told} pushes; {self.lost} are missing")


def _show(counts: Counter[tuple[int, int]]) -> str:
    return ", ".join(f"{n} of client {who} in shard {s}" for (who, s), n in sorted(counts.items())) or "none"


def make_weak_plan(seed: int) -> Plan:
    """Clients do not crash: a life that ends takes along what it knows."""
    rng, plan = random.Random(f"weak {seed}"), make_chain_plan(seed)
    kinds = ("kill", "kill", "sleep", "cut_chain")
    more = [
        Action(rng.uniform(0, plan.quiet_after), rng.choice(kinds), rng.randrange(4), (50, rng.randrange(4)))
        for _ in range(rng.randint(1, 4))
    ]
    calm = [action for action in plan.actions if action.kind != "crash"]
    actions = tuple(sorted([*calm, *more], key=lambda action: action.at))
    return dataclasses.replace(plan, weak=True, actions=actions)


def run_weak_plan(plan: Plan) -> int:
    """The number of pushes that were lost; raises Violation."""
    world = WeakWorld(plan)
    world.run()
    return world.lost


def make_reload_plan(seed: int) -> Plan:
    rng = random.Random(f"reload {seed}")
    plan = make_plan(seed)
    servers = rng.choice((2, 3))
    calm = [a for a in plan.actions if a.kind not in ("crash", "pause_server") and a.who < plan.clients]
    length = plan.quiet_after
    faults = [Action(0.0, "checkpoint", 0, ())]
    for _ in range(rng.choice((2, 4, 6))):
        kind = rng.choice(("checkpoint", "lose", "lose", "add", "remove"))
        detail = (rng.choice((50, 200, 500)), rng.randrange(2))
        faults.append(Action(rng.uniform(0, length), kind, rng.randrange(servers + 1), detail))
    actions = sorted([*calm, *faults], key=lambda action: action.at)
    shards_ = rng.choice((2, 4, 8))
    return dataclasses.replace(
        plan, servers=servers, shards=shards_, replicas=0, actions=tuple(actions), late_ms=200.0
    )


class ReloadWorld(LossyWorld):
    """Servers without copies, and checkpoints."""

    def __init__(self, plan: Plan) -> None:
        self._place = Place(URL)
        self._saved = ""
        self._in_cut: dict[int, Shown] = {}
        self._gone: dict[int, list[Shown]] = {}  # by shard, for each time: what the checkpoint had not
        self._reloading = False
        # A pull may show what a shard that is being moved has not sent on yet, and its client names that.

        self._stayed = not any(action.kind in ("add", "remove") for action in plan.actions)
        super().__init__(plan)

    def _act(self, action: Action) -> None:
        if action.kind == "checkpoint":
            self._checkpoint()
        elif action.kind == "lose":
            self._lose(action.who % len(self.servers), *action.detail)
        elif not self._reloading or action.kind not in ("add", "remove"):
            super()._act(action)

    def _checkpoint(self) -> None:
        heads = [self.servers[chain[0]] for chain in self.coordinator.chains()]
        if any(server.dead for server in heads) or self._reloading:
            return
        name = manifest.new_name(self._place)
        parts: list[PartInfo] = []
        for server in sorted({server.index for server in heads}):
            mine = [shard for shard, head in enumerate(heads) if head.index == server]
            part = shards.Saving(self.servers[server].memory, mine, LIFE).write(self._place, name, server)
            assert part is not None
            parts.append(part)
        whole = manifest.Manifest(
            name=name, time=0.0, shards=self.plan.shards, tables=(), parts=tuple(parts), clocks=()
        )
        manifest.write(self._place, whole)
        self._saved = name
        self._in_cut = {shard: self._shown(head, shard) for shard, head in enumerate(heads)}

    def _lose(self, lost: int, ms: int, together: int) -> None:
        coordinator = self.coordinator
        if not self._saved or self._reloading or not coordinator.may_be_lost(lost):
            return
        self.kills += 1
        self._reloading = True
        self._note_gone(coordinator.placer.lost([lost]))
        self.servers[lost].end()
        self.clock.at(self.clock.now + self._rng.uniform(5, ms), lambda: self._reload(lost, bool(together)))

    def _note_gone(self, gone: set[int]) -> None:
        for shard in gone:
            [head] = self.coordinator.chain(shard)
            self._gone.setdefault(shard, []).append(
                self._shown(self.servers[head], shard) - self._in_cut[shard]
            )

    def _reload(self, lost: int, together: bool) -> None:
        """What the coordinator orders and servers do: see `Coordinator._reload` and `Parts`."""
        adopted = self.coordinator.adopt(lost)
        if not adopted:  # it had no shard
            self._reloading = False
            self.coordinator.gone(lost)
            return
        together = together or 0 in adopted
        chains = self.coordinator.placer.chains_without([lost], adopted)
        back = [shard for shard in range(self.plan.shards) if together or shard in adopted]
        self._note_gone(set(back) - adopted.keys())
        for index in sorted({chains[shard][0] for shard in back}):
            memory = self.servers[index].memory
            mine = [shard for shard in back if chains[shard][0] == index]
            for shard in mine:
                memory.unplace(shard)
            for spec in self.specs:
                memory.declare(spec)
            tables = {table: table for table in TABLES}
            shards.load(memory, self._place, self._saved, mine, tables, resume=True, alone=not together)

        def placed() -> None:
            self._reloading = False
            self.coordinator.adopted(lost, adopted, together)

        self.clock.at(self.clock.now + self._rng.uniform(0, 50), placed)

    def _shown(self, server: ChainServer, shard: int) -> Shown:
        _, rows = server.store.image(shard)
        found: Shown = set()
        for table, _key, _meta, row in rows:
            columns = np.flatnonzero(np.frombuffer(row, np.float32)[: self.specs[TABLES.index(table)].dim])
            found.update((TABLES.index(table), column) for column in columns.tolist())
        return found

    def finished(self) -> bool:
        return not self._reloading and super().finished()

    def _judge_losses(self, tables: list[Rows]) -> None:
        missing: dict[int, Shown] = {}
        for push, shard in self._missing(tables):
            missing.setdefault(shard, set()).add((push.table, push.column))
        told: Counter[int] = Counter()
        for one in self.coordinator.losses.by_shard():
            told[one.shard] += one.last - one.version
        self.lost = sum(map(len, missing.values()))
        for shard in range(self.plan.shards):
            gone, away = self._gone.get(shard, []), missing.get(shard, set())
            if not away <= set().union(*gone):
                raise Violation(
                    f"shard {shard}: {away - set().union(*gone)} are missing, and no server had them"
                )
            most = sum(map(len, gone))
            if not len(away) <= told[shard] <= (most if self._stayed else told[shard]):
                raise Violation(
                    f"shard {shard}: clients name {told[shard]} lost versions; {len(away)} pushes are "
                    f"missing, {most} went and were perhaps pushed again"
                )


def run_reload_plan(plan: Plan) -> tuple[int, int]:
    """The number of servers and of pushes that were lost; raises Violation."""
    with Disk(plan.seed).mounted():
        world = ReloadWorld(plan)
        world.run()
    return world.kills, world.lost
