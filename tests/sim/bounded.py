"""`ssp` under the same bad network: workers that push at once, finish, and may not run ahead; judged by G4.

A worker's pushes of a step go to single keys in random order, so that a server may have some and another
none; its step is finished when all are acknowledged. There are no crashes here: a life that ends has steps
of its own, and `rounds` looks after those.
"""

from __future__ import annotations

import random

import numpy as np
from tests.train.history import History, UnboundedError, check

from .ledger import KEY_ARRAY, Violation
from .plan import KEYS, TABLES, Plan, make_plan
from .rounds import REPLY_HEAD, RoundClient, RoundPlan, RoundWorld

TAKE_EACH, ADVANCE = 0, 2
STEPS = 8


def make_bounded_plan(seed: int, bound: int) -> RoundPlan:
    rng = random.Random(f"bounded {seed}")
    plan = make_plan(seed)
    clients = rng.choice((2, 3, 4))
    faults = tuple(
        action
        for action in plan.actions
        if action.kind == "pause_server"
        or (action.kind not in ("push", "pull", "crash") and action.who < clients)
    )
    plan = Plan(**{**plan.__dict__, "actions": faults, "clients": clients, "columns": (clients, 1)})
    return RoundPlan(plan, TAKE_EACH, 1.0, 1, bound)


class BoundedClient(RoundClient):
    """A worker: reads all keys, pushes 1 to each in its own column, finishes, asks to go on."""

    world: BoundedWorld

    def _opened(self, done: list[int]) -> None:
        answer = self._machine.answer(done[0])
        self._step = REPLY_HEAD.unpack_from(answer)[0]
        self.world.history.start(self._who, self._step)
        self._open, self._then = [self._machine.pull(TABLES[0], KEY_ARRAY)], self._read

    def _read(self, done: list[int]) -> None:
        if self._step >= STEPS:
            self._then = self._over
            return
        self.world.history.read(self._who, self._step, self._machine.rows(done[0]))
        grads = np.zeros((1, self.world.plan.clients), np.float32)
        grads[:, self._who] = -1.0
        self._then = self._pushed
        self._open = [
            self._machine.push(TABLES[0], KEY_ARRAY[number : number + 1], grads)
            for number in self._rng.sample(range(len(KEYS)), len(KEYS))
        ]

    def _pushed(self, _done: list[int]) -> None:
        self.world.history.finish(self._who, self._step)
        self._then = self._opened
        self._ask(ADVANCE, weight=1.0)


class BoundedWorld(RoundWorld):
    """One run."""

    client = BoundedClient

    def __init__(self, shape: RoundPlan) -> None:
        self.history = History(shape.plan.clients)
        super().__init__(shape)


def run_bounded_seed(seed: int, bound: int) -> int:
    """The largest lead of any worker; raises Violation."""
    world = BoundedWorld(make_bounded_plan(seed, bound))
    try:
        world.play()
        check(world.history, bound)
    except (Violation, UnboundedError) as violation:
        raise Violation(f"ssp:{bound} of seed {seed}: {violation}") from None
    return world.history.largest_lead()
