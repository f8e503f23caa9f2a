"""Jobs that become larger and smaller while they train: passes are cut anew, and each batch by one cut alone.

The passes of `passes`, whose number of workers changes while they run. New workers are started with the
number that they are told, which may be another by the time they join; those that are too many are ended.
Where the job is static a pass that runs takes newcomers in at the end of a round, and its batches behind
that are cut for more. Beside what is judged there:

5. all parts of a batch that were trained are of one cut, and all of its parts were trained;
6. growing alone disturbs nothing: each unit is then trained exactly once, and a batch in one round.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from shoal.data.plan import Plan as Cutting
from shoal.data.plan import own_units

from .ledger import Violation
from .passes import (
    LEASE,
    LEDGER_OPEN,
    PASS_END,
    PASSES,
    RESUME,
    TAKE_EACH,
    Life,
    PassClient,
    PassPlan,
    PassWorld,
    Unit,
    Work,
)
from .plan import Action, make_plan
from .rounds import ADVANCE, ASK, OPEN, TAKE_ROUND

RESIZE = 10  # of store/sync_message.h
SPLIT, BACK = 1, 1
SUPERVISOR = 1000  # the first of its client numbers; it asks by a new one each time


@dataclasses.dataclass(frozen=True)
class GrowthPlan(PassPlan):
    """`units` are batches here, which are `split` or not. The plan's clients are the most there ever are."""

    first: int = 1
    split: bool = False


def make_growth_plan(seed: int) -> GrowthPlan:
    rng, plan = random.Random(f"growth {seed}"), make_plan(seed)
    most = rng.choice((2, 3, 4, 5))
    faults = [a for a in plan.actions if a.kind not in ("push", "pull") and a.who < most]
    if rng.random() < 0.5:  # nobody dies but by becoming too many
        faults = [action for action in faults if action.kind != "crash"]
    else:
        for _ in range(rng.choice((0, 1, 2))):
            at = rng.uniform(0, plan.quiet_after)
            faults.append(Action(at, "evict", rng.randrange(most), (rng.choice((0, 50)),)))
    only_grows, size = rng.random() < 0.4, rng.randint(1, most)
    first = size = rng.randint(1, most - 1) if only_grows else size
    for at in sorted(plan.quiet_after * rng.random() ** 2 for _ in range(rng.choice((1, 2, 4)))):
        size = rng.randint(min(size + 1, most), most) if only_grows else rng.randint(1, most)
        faults.append(Action(at, "resize", 0, (size,)))
    faults.sort(key=lambda action: action.at)
    plan = dataclasses.replace(plan, clients=most, actions=tuple(faults), columns=(1, 1))
    static = rng.random() < 0.7
    take = TAKE_ROUND if static else rng.choice((TAKE_EACH, TAKE_ROUND))
    quorum = 1.0 if static else rng.choice((1.0, 0.5))
    units, split = rng.randint(1, 30), rng.random() < 0.6
    return GrowthPlan(plan, take, quorum, 1, units=units, static=static, first=first, split=split)


class GrowingWork(Work):
    """What the workers did, and by which cut."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.batches = batches
        self.cuttings: dict[int, Cutting] = {}  # by pass: the one that is heard of and has most units
        self._cut_by: dict[tuple[Unit, Life], Cutting] = {}
        self.grown: set[int] = set()  # passes that took somebody in while they ran

    def hear(self, epoch: int, cutting: Cutting) -> None:
        known = self.cuttings.get(epoch)
        if known is None or cutting.first > known.first:
            self.cuttings[epoch] = cutting
        if cutting.before is not None:
            self.grown.add(epoch)

    def units(self, epoch: int) -> int:
        return self.cuttings[epoch].units(self.batches)

    def begin(self, unit: Unit, life: Life, cutting: Cutting) -> None:
        self._cut_by[unit, life] = cutting

    def judge(self, epoch: int, ranks: int, report: tuple[int, ...]) -> None:
        super().judge(epoch, ranks, report)
        trained: dict[int, set[tuple[int, int]]] = {}
        asked: dict[int, set[tuple[int, int]]] = {}
        for found, those in ((trained, self.done), (asked, self.asked)):
            for unit, lives in those.items():
                for life in lives if unit[0] == epoch else ():
                    cutting = self._cut_by[unit, life]
                    batch, part = cutting.place(unit[1])
                    found.setdefault(batch, set()).add((part, cutting.at(batch).parts))
        for batch in range(self.batches):
            parts = self.cuttings[epoch].at(batch).parts
            sure = trained.get(batch, set())
            if not {of for _, of in sure} <= {parts}:
                raise Violation(f"pass {epoch}: batch {batch} is cut in {parts}, and trained as {sure}")
            if missing := {(part, parts) for part in range(parts)} - sure - asked.get(batch, set()):
                raise Violation(f"pass {epoch} is over, and of batch {batch} nobody trained {missing}")


class GrowingClient(PassClient):
    """A worker of a job that changes its size."""

    world: GrowingWorld

    def idle(self) -> bool:
        return not self.world.wants(self._who) or super().idle()

    def workers(self) -> int:
        return self._told

    def start(self) -> None:
        if not self.down or not self.world.wants(self._who):
            return
        self._told = self.world.size
        self._growths = 0
        self._follows = False  # it asks anew what it has of the pass that it is in
        super().start()

    def end(self) -> None:
        """The job is smaller now, and this one is ended; if it is larger again, it comes back."""
        self.world.work.disturbed = True
        self.crash(0.0)
        self.evict()

    def _settle(self, seq: int) -> None:
        done = [operation for operation in self._open if self._machine.done(operation)]
        refused = any(self._machine.code(operation) for operation in done)
        if refused and not self.world.wants(self._who):
            self._open = []  # it is about to be ended, whatever it is told
        else:
            super()._settle(seq)

    def _ask(self, verb: int, weight: float = 0.0) -> None:
        self._do(verb, step=BACK)  # the one question that is asked so is to join

    def _go_on(self, step: int, dropped: bool, again: bool, numbers: tuple[int, ...]) -> None:
        verb, epoch, static = self._verb, self._epoch, self.world.shape.static
        grown = False
        if verb in (OPEN, ADVANCE, PASS_END):
            grown = static and verb != OPEN and numbers[0] != self._growths
            self._growths = numbers[0]
        if verb == RESUME and self._follows:
            self._follows = False
            if step == epoch:
                self._begin_pass(epoch, set(numbers))
            else:  # it is over
                self._do(PASS_END, step=self._growths, epoch=epoch)
        elif verb == LEDGER_OPEN:
            pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
            self._cutting = Cutting.of(pairs, "split" if self.world.shape.split else "each")
            self._own_units = own_units(tuple(pairs), self._who, self._cutting.units(self.world.shape.units))
            self.world.work.hear(epoch, self._cutting)
            self._give_own(workers=step)
        elif verb == ADVANCE and grown:
            assert self._unit is not None
            self.world.work.answered(self._unit, self._life(), dropped)
            self._step, self._unit = step, None
            self._follow()
        elif verb == PASS_END and again and static:
            self._step = step  # others have made steps meanwhile
            if grown:
                self._follow()
            else:
                self._do(LEASE, epoch=epoch, count=1)
        else:
            super()._go_on(step, dropped, again, numbers)

    def _follow(self) -> None:
        self._units.clear()
        self._follows = True
        self._do(RESUME, epoch=self._epoch)

    def _how(self) -> int:
        return super()._how() + SPLIT * self.world.shape.split

    def _give_own(self, workers: int) -> None:
        static = self.world.shape.static
        if static and self._own is not None:
            self._units.extend(unit for unit in self._own_units if unit not in self._own)
        self._own = None
        self._train(last=static)

    def _train(self, last: bool = False) -> None:
        if self._units:
            self.world.work.begin((self._epoch, self._units[0]), self._life(), self._cutting)
            super()._train(last)
        elif last or self.world.shape.static:
            self._do(PASS_END, step=self._growths, epoch=self._epoch)
        else:
            super()._train(last)


class GrowingWorld(PassWorld):
    """One run."""

    client = GrowingClient
    shape: GrowthPlan
    work: GrowingWork

    def __init__(self, shape: GrowthPlan) -> None:
        self.size, self.resizes = shape.first, 0
        super().__init__(shape)

    def _new_work(self) -> GrowingWork:
        return GrowingWork(self.shape.units)

    def wants(self, who: int) -> bool:
        return who < self.size

    def _act(self, action: Action) -> None:
        if action.kind != "resize":
            super()._act(action)
            return
        shape, size = self.shape, action.detail[0]
        self.resizes += 1
        body = ASK.pack(
            RESIZE,
            0,
            0,
            0,
            0,
            1,
            0,
            size,
            shape.take,
            shape.quorum,
            shape.count,
            shape.slack,
            0.0,
            0.0,
            0.0,
            0,
        )
        # Nobody has joined yet: it is refused, and the job stays as it is.
        if not self.ask_at_once(SUPERVISOR + self.resizes, 1, body + bytes(8)):
            return
        clients: list[Any] = list(self._clients)
        before, self.size = self.size, size
        for client in clients[before:size]:
            client.start()
        for client in clients[size:before]:
            self.clock.at(self.clock.now + self._rng.choice((0.0, 5.0, 60.0)), client.end)


def run_growth_plan(shape: GrowthPlan) -> tuple[int, int]:
    """How often the job changed its size, and how many passes took somebody in; raises Violation."""
    world = GrowingWorld(shape)
    world.play()
    rounds, work = max(world.judged.commits, default=0), world.work
    if shape.static and shape.split and not work.disturbed and rounds != PASSES * shape.units:
        raise Violation(f"{PASSES} passes of {shape.units} batches were trained in {rounds} rounds")
    return world.resizes, len(world.work.grown)
