"""`ssp` under the same bad network: workers that push at once, finish, and may not run ahead; judged by G4.

A worker's pushes of a step go to single keys in random order, so that a server may have some and another
none; its step is finished when all are acknowledged. There are no crashes here: a life that ends has steps
of its own, and `rounds` looks after those.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tests.train.history import History, UnboundedError, check

from .ledger import KEY_ARRAY, Violation
from .plan import KEYS, TABLES, Plan, make_plan
from .rounds import REPLY_HEAD, RoundClient, RoundPlan, RoundWorld

if TYPE_CHECKING:
    from .chain_rounds import ChainBoundedWorld

TAKE_EACH, ADVANCE = 0, 2
STEPS = 8


def make_bounded_plan(bound: int) -> Callable[[int], RoundPlan]:
    """Plans of seeds, for workers that may be so many steps ahead."""
    return lambda seed: _make_plan(seed, bound)


def _make_plan(seed: int, bound: int) -> RoundPlan:
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


def play_bounded(world: BoundedWorld | ChainBoundedWorld) -> int:
    """The largest lead of any worker; raises Violation."""
    world.play()
    try:
        check(world.history, world.shape.slack)
    except UnboundedError as error:
        raise Violation(str(error)) from None
    return world.history.largest_lead()


def run_bounded_plan(shape: RoundPlan) -> int:
    return play_bounded(BoundedWorld(shape))
