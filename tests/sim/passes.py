"""Passes over data: workers that lease units, train them, die, are evicted, come back; the ledger's count.

The units of a pass are leased, or each rank has every n-th and only what comes back is leased. A worker says
that a unit is done with the step that used it. Then

1. no two workers hold a unit at one time, where nobody was overdue; nobody trains what was taken over;
2. when a pass is over every unit was trained; exactly once where nobody died, and never twice by those who
   heard that it counted;
3. the ledger's report is what the workers did: what a dead one had said last it counts, or not;
4. the report of a pass that is over is the same for all who ask.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from typing import Any

from shoal import _core

from .ledger import Violation
from .nodes import FENCED, TOKEN
from .plan import Action, make_plan
from .rounds import ADVANCE, ASK, OPEN, SYNC, TAKE_ROUND, RoundClient, RoundPlan, RoundWorld

TAKE_EACH = 0
LEDGER_OPEN, LEASE, PASS_END, LEAVE, REPORT, RESUME, KEEP = 4, 5, 6, 7, 8, 9, 11  # of store/sync_message.h
STATIC, OVERDUE, AWAY = 2, 1, 1
UNAVAILABLE = 6  # of base/status.h
PASSES = 3
FOR_GOOD_MS = 300  # whoever would sleep for so long when it is evicted dies

Unit = tuple[int, int]  # epoch, unit
Life = tuple[int, int]  # rank, incarnation


@dataclasses.dataclass(frozen=True)
class PassPlan(RoundPlan):
    """`units` of a pass; `static`: ranks have theirs unasked; `overdue`: some take what others have."""

    units: int = 0
    static: bool = False
    overdue: float = 0.0


def make_pass_plan(seed: int) -> PassPlan:
    rng, plan = random.Random(f"passes {seed}"), make_plan(seed)
    clients = rng.choice((1, 2, 3, 4))
    faults = [a for a in plan.actions if a.kind not in ("push", "pull") and a.who < clients]
    if rng.random() < 0.3:  # nobody dies
        faults = [action for action in faults if action.kind != "crash"]
    else:
        for _ in range(rng.choice((0, 1, 3))):
            at = rng.uniform(0, plan.quiet_after)
            faults.append(Action(at, "evict", rng.randrange(clients), (rng.choice((0, 50, 300)),)))
    faults.sort(key=lambda action: action.at)
    plan = dataclasses.replace(plan, clients=clients, actions=tuple(faults), columns=(1, 1))
    take, static = rng.choice((TAKE_EACH, TAKE_EACH, TAKE_ROUND)), rng.random() < 0.4
    quorum = 1.0 if static else rng.choice((1.0, 0.5))
    overdue = rng.choice((0.0, 0.0, 0.3)) * (not static)
    return PassPlan(plan, take, quorum, 1, units=rng.randint(1, 12), static=static, overdue=overdue)


class Work:
    """What the workers did."""

    def __init__(self, units: int) -> None:
        self._units = units
        self.disturbed = self.overdue = False
        self.revoked = 0
        self.asked: dict[Unit, list[Life]] = {}  # said to be done, and not answered
        self.done: dict[Unit, list[Life]] = {}
        self._holder: dict[Unit, Life] = {}
        self.reports: dict[int, tuple[int, ...]] = {}

    def lease(self, unit: Unit, life: Life, alive: set[Life]) -> None:
        if life not in alive:  # it was evicted while the answer was on its way
            return
        other = self._holder.get(unit)
        if other is not None and other != life and other in alive and not self.overdue:
            raise Violation(f"unit {unit} is handed out to {life}, and {other} has it")
        self._holder[unit] = life

    def ask(self, unit: Unit, life: Life) -> None:
        """It is said to be done; if that comes too late for its round, it is handed out again."""
        self._holder.pop(unit, None)
        self.asked.setdefault(unit, []).append(life)

    def answered(self, unit: Unit, life: Life, dropped: bool) -> None:
        self.asked[unit].remove(life)
        if not dropped:
            self.done.setdefault(unit, []).append(life)

    def units(self, epoch: int) -> int:
        """That a pass has."""
        return self._units

    def judge(self, epoch: int, ranks: int, report: tuple[int, ...]) -> None:
        if self.reports.setdefault(epoch, report) != report:
            raise Violation(f"pass {epoch} is over, and its report has changed")
        units, done, *rest = report
        by_rank, uses = rest[:ranks], rest[ranks:]
        if (units, done, sum(uses)) != (self.units(epoch),) * 3 or uses[0]:
            raise Violation(f"pass {epoch} of {self.units(epoch)} units is over: {units=}, {done=}, {uses=}")
        names = [(epoch, unit) for unit in range(units)]
        sure = {name: len(self.done.get(name, ())) for name in names}
        maybe = {name: len(self.asked.get(name, ())) for name in names}
        for name in names:
            wrong = sure[name] > 1 or (sure[name] != 1 and not self.disturbed)
            if sure[name] + maybe[name] == 0 or wrong:
                raise Violation(f"pass {epoch} is over; unit {name} was trained {sure[name]} times")
        trained = Counter(rank for name in names for rank, _ in self.done.get(name, ()))
        said = Counter(rank for name in names for rank, _ in self.asked.get(name, ()))
        for rank, count in enumerate(by_rank):
            if not trained[rank] <= count <= trained[rank] + said[rank]:
                raise Violation(f"pass {epoch}: worker {rank} trained {trained[rank]}, reported are {count}")
        if sum(times * count for times, count in enumerate(uses)) != sum(by_rank):
            raise Violation(f"pass {epoch}: used {uses}, by ranks {by_rank}")
        if not any(maybe.values()):
            exact = Counter(sure.values())
            if Counter({times: count for times, count in enumerate(uses) if count}) != exact:
                raise Violation(f"pass {epoch}: used {uses}; the workers trained {dict(exact)}")


class PassClient(RoundClient):
    """A worker that trains unit by unit."""

    world: PassWorld

    incarnation_max = 0  # of those that evicted it
    gone = False  # it never comes back

    def idle(self) -> bool:
        return self.gone or super().idle()

    def start(self) -> None:
        if self.gone:
            return
        self.incarnation = max(self.incarnation, self.incarnation_max)
        self._units: deque[int] = deque()
        self._unit: Unit | None = None
        self._epoch = 0
        self._own: set[int] | None = None  # of its own units those that are done; None: they are given
        super().start()

    def _life(self) -> Life:
        return self._who, self.incarnation

    def evict(self) -> None:
        """As `shoal.fleet.evict` does, at once: the next life takes the leave of this one."""
        self.incarnation_max = max(self.incarnation_max, self.incarnation) + 1
        body = ASK.pack(LEAVE, self._who, AWAY, 0, 0, 1, 0, 1, 0, 1.0, 1, 0, 0.0, 0.0, 0.0, 0) + bytes(8)
        self.world.ask_at_once(self._who + 1, self.incarnation_max, body)

    def _fenced(self) -> None:
        if self.incarnation_max <= self.incarnation:
            super()._fenced()
        elif not self.down:
            self.crash(5.0)

    def _settle(self, seq: int) -> None:
        done = self._open if all(self._machine.done(operation) for operation in self._open) else []
        codes = {self._machine.code(operation) for operation in done}
        if FENCED in codes or (UNAVAILABLE in codes and self.incarnation_max > self.incarnation):
            self._fenced()
        elif UNAVAILABLE in codes:  # frames came so often that the first were turned away
            self._question(self._verb, **self._asked_with)
        else:
            super()._settle(seq)

    def _opened(self, done: list[int]) -> None:
        self._answer = self._take_answer(self._machine.answer(done[0]))
        self._carry()

    def _carry(self) -> None:
        if self._carrying:
            super()._carry()
        else:
            self.applied = max(self.applied, self._closed)
            self._go_on(*self._answer)

    def _ask(self, verb: int, weight: float = 0.0) -> None:
        self._do(verb)

    def _do(self, verb: int, **more: Any) -> None:
        self._verb, self._asked_with, self._then = verb, more, self._opened
        self._question(verb, **more)

    def _go_on(self, step: int, dropped: bool, again: bool, numbers: tuple[int, ...]) -> None:
        """The last question is answered, and its commits are everywhere."""
        epoch = self._epoch
        match self._verb:
            case verb if verb == OPEN:
                self._step = step
                self._do(RESUME, epoch=0)
            case verb if verb == RESUME:
                self._begin_pass(step, set(numbers))
            case verb if verb == LEDGER_OPEN:
                self._give_own(workers=step)
            case verb if verb == LEASE:
                for first, end in zip(numbers[::2], numbers[1::2], strict=True):
                    self._units.extend(range(first, end))
                for unit in self._units:
                    self.world.work.lease((epoch, unit), self._life(), self.world.lives())
                self._train(last=not numbers)
            case verb if verb == KEEP and not numbers:  # another has it
                self.world.work.revoked += 1
                self._unit = None
                self._train()
            case verb if verb == KEEP:
                self._use()
            case verb if verb == ADVANCE:
                assert self._unit is not None
                self.world.work.answered(self._unit, self._life(), dropped)
                self._step, self._unit = step, None
                self._train()
            case verb if verb == PASS_END and again:
                self._do(LEASE, epoch=epoch, count=1)
            case verb if verb == PASS_END:
                self._step = step
                self._do(REPORT, epoch=epoch)
            case verb if verb == REPORT:
                self.world.work.judge(epoch, step, numbers)
                self._begin_pass(max(self._reached, epoch + 1), set())

    def _begin_pass(self, epoch: int, done: set[int]) -> None:
        self._epoch, self._own, self._reached = epoch, done, epoch
        if epoch >= PASSES:
            # Whoever was to judge a pass may have died just then.
            unheard = [number for number in range(PASSES) if number not in self.world.work.reports]
            self._then, self._open = self._over, []
            if unheard:
                self._epoch = unheard[0]
                self._do(REPORT, epoch=self._epoch)
            return
        self._do(LEDGER_OPEN, step=self._how(), epoch=epoch, count=self.world.shape.units)

    def _how(self) -> int:
        """How a pass is handed out."""
        return STATIC * self.world.shape.static

    def _give_own(self, workers: int) -> None:
        shape = self.world.shape
        if shape.static and self._own is not None:
            self._units.extend(u for u in range(self._who, shape.units, workers) if u not in self._own)
            for unit in self._units:
                self.world.work.lease((self._epoch, unit), self._life(), self.world.lives())
        self._own = None
        self._train(last=shape.static)

    def _train(self, last: bool = False) -> None:
        """The next unit, or the next lease; `last`: where nothing is to be had the pass ends."""
        if self._units:
            self._unit = (self._epoch, self._units.popleft())
            if self.world.shape.overdue:  # as one asks that has held it for long
                self._do(KEEP, epoch=self._epoch, units=[self._unit])
            else:
                self._use()
        elif last and self._rng.random() < self.world.shape.overdue:
            self.world.work.overdue = True
            self._do(LEASE, step=OVERDUE, epoch=self._epoch, count=1)
        elif last or self.world.shape.static:
            self._do(PASS_END, epoch=self._epoch)
        else:
            self._do(LEASE, epoch=self._epoch, count=self._rng.randint(1, 3))

    def _use(self) -> None:
        assert self._unit is not None
        self.world.work.ask(self._unit, self._life())
        self._do(ADVANCE, step=self._step, weight=1.0, units=[self._unit])

    def crash(self, back_after: float) -> None:
        self.world.work.disturbed = self.world.work.disturbed or not self.down
        super().crash(back_after)


class PassWorld(RoundWorld):
    """One run."""

    client = PassClient
    shape: PassPlan

    def __init__(self, shape: PassPlan) -> None:
        self.shape = shape
        self.work = self._new_work()
        super().__init__(shape)

    def _new_work(self) -> Work:
        return Work(self.shape.units)

    def lives(self) -> set[Life]:
        """Those that go on, and that nobody has evicted."""
        clients: list[Any] = list(self._clients)
        return {c._life() for c in clients if not c.down and c.incarnation_max <= c.incarnation}

    def ask_at_once(self, client: int, incarnation: int, body: bytes) -> bool:
        """As who starts the workers asks, with no network between. False: it was refused."""
        machine = _core.protocol.Client(client, incarnation, self.plan.servers, self.placement)
        sessions = [_core.protocol.Session(server.store) for server in self._servers]
        for session in sessions:
            [challenge], _ = session.feed(machine.hello())
            session.feed(machine.proof(TOKEN, challenge))
        sync = self.placement[0]
        operation = machine.ask(SYNC, [sync], body)
        for frame in machine.outgoing(sync):
            sessions[sync].feed(frame)
        for number, reply in self._servers[sync].deliver_mail():
            if number == sessions[sync].number():
                machine.incoming(sync, reply)
        return bool(machine.done(operation)) and machine.code(operation) == 0

    def _act(self, action: Action) -> None:
        if action.kind != "evict":
            super()._act(action)
            return
        client: Any = self._clients[action.who]
        if not client.down:
            self.work.disturbed = True
            client.paused_until = max(client.paused_until, self.clock.now + action.detail[0])
            others: list[Any] = [other for other in self._clients if other is not client]
            joined = client._verb != OPEN  # whoever has not is waited for
            if joined and action.detail[0] == FOR_GOOD_MS and not all(other.gone for other in others):
                client.gone = True
                client.crash(0.0)
            client.evict()


def run_pass_plan(shape: PassPlan) -> tuple[int, int]:
    """Units that were trained, and how often one was another's when it was to be; raises Violation."""
    world = PassWorld(shape)
    world.play()
    return len(world.work.done), world.work.revoked
