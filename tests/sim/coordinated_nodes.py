"""Servers and workers that know only what the coordinator tells them, by connections that fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shoal.errors import Fenced, from_code
from shoal.fleet.placer import Fill
from shoal.fleet.pulse import Beat, BeatKind, Hello, PulseOrder
from shoal.optim import SGD
from shoal.store import messages as m
from shoal.store.catalogue import TableRequest
from shoal.store.placement_watch import core_placement
from shoal.store.rounds import client_name, rank_of

from .chain_nodes import HOMES_MS, ChainClient, ChainServer
from .control import WELCOME, Asker, Line
from .ledger import Violation
from .network import Connection
from .nodes import FENCED
from .plan import Action
from .rounds import ASK, MOVED, SYNC

if TYPE_CHECKING:
    from .coordinated import CoordinatedWorld

WATCH_S, ASK_S, JOIN_S, REJOIN_S = 0.5, 5.0, 30.0, 1.0  # of chain_duty.py and server_process.py
AGAIN_MS, REGISTER_MS = 100.0, 250.0
BEAT_MS, REDIAL_MS, DIAL_MS = 500.0, 250.0, 2000.0  # of pulse.cc
EVICT_S = 5.5  # of evict.py: an attempt, and the pause before the next
LEAVE, AWAY = 7, 1  # of store/sync_message.h


class CoordinatedServer(ChainServer):
    """A server that knows only what the coordinator tells it."""

    def __init__(self, world: CoordinatedWorld, index: int) -> None:
        super().__init__(world, index)
        self._world_of = world
        self.silent = [0.0, 0.0]
        self.shaky_until = 0.0
        self.admitted = False
        self._identity = f"server {index}"
        self._life = 0
        self._filling: set[int] = set()
        self._told: list[m.Takeover] = []
        self._duty = Asker(world.process, self)
        self._askers = [self._duty]
        self._register()

    def _register(self) -> None:
        if self.dead or self._world_of.over:
            return
        line = self._registration = Line(
            self._world_of.process, self, self._on_registration, lambda: self._again(REGISTER_MS)
        )
        self._answered = False
        line.send(
            m.RegisterServer(
                identity=self._identity, pid=1, host="sim", port=1 + self.index, unix_path="",
                shards=self._world_of.plan.shards, index=self.index,
            )
        )  # fmt: skip

        def late() -> None:
            if line is self._registration and not self._answered:
                line.drop()
                self._again(REGISTER_MS)

        self._world_of.later(self, 1000 * (REJOIN_S if self.admitted else JOIN_S), late)

    def _again(self, ms: float) -> None:
        self._world_of.later(self, ms, self._register)

    def _on_registration(self, message: Any) -> None:
        if self.dead:
            return
        if isinstance(message, m.PartOrder):
            self._take(message)
            return
        self._answered = True
        if isinstance(message, m.Failure):
            self._failed(message)
            self._registration.drop()
            self._again(REGISTER_MS)
            return
        self._world_of.answers.server(self._identity, message.index, self.index)
        self._life = message.life
        if not self.admitted:
            self.admitted = True
            self._watch()

    def _take(self, order: m.PartOrder) -> None:
        raise Violation(f"server {self.index}: nobody has asked for {order.do}")

    def _failed(self, failure: m.Failure) -> None:
        if isinstance(from_code(failure.code, ""), Fenced):
            self._world_of.check_given_up(self.index)
            self.end()

    def _watch(self) -> None:
        if self.dead or self._world_of.over:
            return
        request = m.WatchPlacement(
            after=self.version, wait_s=WATCH_S, server=self.index, identity=self._identity,
            filling=tuple(sorted(self._filling)), takeovers=tuple(self._told),
        )  # fmt: skip
        self._duty.ask(request, ASK_S, self._on_news)

    def _on_news(self, news: Any) -> None:
        if self.dead:
            return
        if not isinstance(news, m.PlacementNews):
            if news is not None:
                self._failed(news)
            self._world_of.later(self, AGAIN_MS, self._watch)
            return
        if news.life != self._life:
            self._life = news.life
            self._registration.drop()
            self._again(0.0)
        self._told.clear()
        if news.placement is not None:
            self._learn(news.placement)
        for order in news.fills:
            self._filling.add(order.number)
            self.begin(order)  # type: ignore[arg-type]
        self.after()
        self._watch()

    def _learn(self, info: m.PlacementInfo) -> None:
        self._world_of.answers.placement(info, self.version)
        self.version = info.version
        self._peers = len(info.servers)
        self.store.place(self.index, core_placement(info))
        for server in info.servers:
            if server.state in ("evicted", "left"):
                self.store.gone(server.index)
        self._told += self._takeovers(
            SimpleNamespace(heads=[c[0] for c in info.chains], terms=info.terms)  # type: ignore[arg-type]
        )

    def _filled(self, fill: Fill, code: int) -> None:
        error = f"code {code}" if code else ""
        report = m.Filled(
            number=fill.number, shard=fill.shard, term=fill.term, target=fill.target, error=error
        )
        asker = Asker(self._world_of.process, self)
        self._askers.append(asker)

        def told(_answer: Any) -> None:
            self._filling.discard(fill.number)
            asker.close()

        asker.ask(report, ASK_S, told)

    def end(self) -> None:
        super().end()
        self._registration.drop()
        for asker in self._askers:
            asker.close()


class CoordinatedClient(ChainClient):
    """A worker: joins, renews its lease, and joins again when it was evicted."""

    def __init__(self, world: CoordinatedWorld, who: int) -> None:
        self._world_of = world
        self.silent = [0.0, 0.0]
        self.name = client_name(who)
        self.heard = 0
        self._links = []
        self._early: deque[Action] = deque()  # to be done once it has joined
        self._instead_of: int | None = None
        self._pulse: Line | None = None
        self._control, self._watcher = Asker(world.process, self), Asker(world.process, self)
        self._lost_told: tuple[m.Lost, ...] = ()
        self.evicted = 0
        self.welcome = False
        super().__init__(world, who)

    def start(self) -> None:
        self.down, self.welcome = True, False
        if self._world_of.over:  # it was evicted when it had done all, and learns it only now
            return
        request = m.JoinCluster(name=self.name, wait_s=JOIN_S, instead_of=self._instead_of)
        self._control.ask(request, JOIN_S, self._joined)

    def _joined(self, grant: Any) -> None:
        if isinstance(grant, m.ClientGrant):
            self._instead_of = None
            self._world_of.answers.client(self.name, grant.client_id, grant.incarnation)
            self._live(grant)
            self._open_table()
            return
        if grant is not None and isinstance(from_code(grant.code, ""), Fenced):
            raise Violation(f"{self.name} is told that another has its place: {grant.message}")
        self._world_of.later(self, AGAIN_MS, self.start)

    def _live(self, grant: m.ClientGrant) -> None:
        self.incarnation = grant.incarnation
        self.identity = grant.client_id
        self.version = self.heard = 0
        self._begin_life(grant.client_id)
        self._learn(grant.placement)
        self._dial_pulse()
        self._watch()

    def _open_table(self) -> None:
        """Tables are the coordinator's, too; those of the simulation are known to all."""
        name = f"table {self._rng.randrange(3)}"
        table = TableRequest(name=name, dim=1, optimizer=SGD(lr=0.1))

        def opened(answer: Any) -> None:
            if isinstance(answer, m.TableOpened):
                self._world_of.answers.table(name, answer.opened.entry.id)

        self._control.ask(m.OpenTable(request=table), ASK_S, opened)

    def _learn(self, info: m.PlacementInfo) -> None:
        self._world_of.answers.placement(info, self.version)
        self.version, self.info = info.version, info
        self._place(core_placement(info), len(info.servers))

    def _watch(self) -> None:
        if self._world_of.over:
            return
        request = m.WatchPlacement(after=self.version, wait_s=WATCH_S, heard=self.heard, lost=self._lost_told)
        self._watcher.ask(request, ASK_S, self._on_news)

    def _on_news(self, news: Any) -> None:
        if self.down:
            return
        if isinstance(news, m.PlacementNews):
            if news.placement is not None:
                self._learn(news.placement)
            self._lost_told = self._count_lost(news.takeovers)
            self.heard = news.heard
            self._watch()
        else:
            self._world_of.later(self, AGAIN_MS, self._watch)

    # The pulse.

    def _dial_pulse(self) -> None:
        if self._world_of.over or self.down:
            return
        incarnation = self.incarnation

        def again() -> None:
            if self.incarnation == incarnation and line is self._pulse:
                self._world_of.later(self, REDIAL_MS, self._dial_pulse)

        def late() -> None:
            if not welcomed and line is self._pulse:
                line.drop()
                again()

        def heard(message: Any) -> None:
            if message is WELCOME:
                welcomed.append(True)
                self.welcome = True
                self._beat(line)
                self._pump()
            else:
                self._obey(message, line)

        welcomed: list[bool] = []
        line = self._pulse = Line(self._world_of.process, self, heard, again)
        line.send(Hello(incarnation, self.identity, b""))
        self._world_of.later(self, DIAL_MS, late)

    def _beat(self, line: Line) -> None:
        if line is self._pulse and not self.down and not self._world_of.over:
            line.send(Beat(BeatKind.ALIVE, 0, 0, self._seq, 0))
            self._world_of.later(self, BEAT_MS, lambda: self._beat(line))

    def _obey(self, order: PulseOrder, line: Line) -> None:
        raise Violation(f"{self.name}: nobody has asked for a cut, and it is told {order}")

    # Work.

    def work(self, action: Action) -> None:
        if self.down and self._instead_of is None and self.incarnation > 0:
            return  # a process that is no more
        if self.down:
            self._early.append(action)
            return
        super().work(action)

    def _pump(self) -> None:
        if self.welcome:
            self._backlog.extend(self._early)
            self._early.clear()
            super()._pump()
        else:
            for server in range(len(self._links)):
                self._flush(server)

    def idle(self) -> bool:
        return super().idle() and self.welcome and not self._early

    def crash(self, back_after: float) -> None:
        if not self.down:
            self._instead_of = None
            self._early.clear()
            super().crash(back_after)
            self._hang_up()

    def _fenced(self) -> None:
        """It was evicted: it goes on as another life, without what it had begun."""
        if self.down:
            return
        if not self._world_of.answers.newer(self.name, self.incarnation, self._world_of.process.journal):
            super()._fenced()
        self.evicted += 1
        self._instead_of = self.incarnation
        self._early.extend(self._backlog)
        if self._pulse is not None:
            self._pulse.send(Beat(BeatKind.BYE, 0, 0, 0, 0))
        super().crash(self._rng.uniform(1, 50))
        self._hang_up()

    def _hang_up(self) -> None:
        if self._pulse is not None:
            self._pulse.drop()
            self._pulse = None
        self._control.close()
        self._watcher.close()

    def _succeeded(self, operation: int, what: str) -> None:
        if self._machine.code(operation) != FENCED:
            super()._succeeded(operation, what)

    def _settle(self, seq: int) -> None:
        done = [number for number, _ in self._pushes.values()] + list(self._reads)
        done = [operation for operation in done if self._machine.done(operation)]
        if any(self._machine.code(operation) == FENCED for operation in done):
            self._fenced()
        else:
            super()._settle(seq)

    def check_end(self) -> None:
        if self.incarnation:
            super().check_end()


class Evictor(CoordinatedClient):
    """What `shoal.fleet.evict` does: is there as the next life of a worker, takes its leave, and ends."""

    def __init__(self, world: CoordinatedWorld, who: int, name: str, grant: m.ClientGrant,
                 wanted: Callable[[], bool], done: Callable[[], None]) -> None:  # fmt: skip
        self._evicts, self._grant, self._wanted, self._on_end = name, grant, wanted, done
        self._leave = self._asked = 0
        self._begun = self._ended = False
        super().__init__(world, who)

    def start(self) -> None:
        if not self._begun:  # whoever made it has it now
            self._begun = True
            return
        if self._ended or not self._wanted() or self._world_of.over:
            self.end()
            return
        self._leave, self.welcome = 0, False
        self._live(self._grant)
        attempt = self._attempt = object()

        def late() -> None:
            if self._attempt is attempt and not self.down:
                self._hang_up()
                self.start()

        self._world_of.later(self, 1000 * EVICT_S, late)

    def on_frame(self, connection: Connection, frame: bytes) -> None:
        super().on_frame(connection, frame)
        if not self.down:
            self._pump()  # perhaps the last server has welcomed it

    def _pump(self) -> None:
        super()._pump()
        up = [s.index for s in self.info.servers if s.state not in ("evicted", "left")]
        if self.down or self._leave or not self.welcome or not all(self._greeted[s] for s in up):
            return
        self._asked += 1
        rank = rank_of(self._evicts)
        body = ASK.pack(LEAVE, rank, AWAY, 0, 0, self._asked, 0, 1, 0, 1.0, 1, 0, 0.0, 0.0, 0.0, 0)
        self._leave = self._machine.ask(SYNC, [self.info.chains[0][0]], body + bytes(8))
        for server in range(len(self._links)):
            self._flush(server)

    def _settle(self, seq: int) -> None:
        if not self._leave or not self._machine.done(self._leave):
            return
        if self._machine.code(self._leave) == MOVED:
            self._leave = 0
            self._world_of.later(self, HOMES_MS, lambda: None if self.down else self._pump())
        else:
            self._finish()

    def _fenced(self) -> None:
        self._finish()  # another has its place

    def _finish(self) -> None:
        if not self.down:
            self.end()
            self._world_of.evicted(self._evicts, self._grant.incarnation)
            self._on_end()

    def end(self) -> None:
        """With what it did, or with its process."""
        self._ended = True
        self._hang_up()

    def _hang_up(self) -> None:
        super()._hang_up()
        self.down = True
        for link in self._links:
            if link is not None:
                self._world_of.network.cut(link)
