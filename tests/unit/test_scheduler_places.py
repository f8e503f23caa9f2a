"""Schedulers of a worker that begins in the middle: by what an earlier life, or another worker, has noted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from shoal.train.schedules import Schedules

# In a `range` scripts move them before the first step of a later life.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
BATCHES, PASSES = 5, 6
Made = list[tuple[torch.optim.Optimizer, Any]]


class Board:
    """The notes of one rank, as JSON."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def post(self, topic: int, text: str) -> None:
        self.notes.append(text)

    def text(self, rank: int, topic: int) -> str | None:
        return self.notes[-1] if self.notes else None


class Life:
    """A worker that has as many passes behind it, and so many steps of the next."""

    def __init__(self, make: Callable[[], Made], board: Board, passes: int = 0, steps: int = 0) -> None:
        begins = [SimpleNamespace(loader=SimpleNamespace(begins=passes), done=steps)]
        self.worker = SimpleNamespace(
            step=passes * BATCHES + steps, rank=0, passes=begins, has_own_store=False
        )
        self.worker.state = SimpleNamespace(board=board)
        self.worker.lives = SimpleNamespace(again=lambda call: call())
        self.worker.client = SimpleNamespace(incarnation=1 + bool(board.notes))
        self.worker.rounds = SimpleNamespace(joined=lambda: [0])
        self.passes, self.steps, self.made = passes, steps, make()

    def begin(self, before: Any = ()) -> Life:
        self.schedules = Schedules(before)
        self.schedules.joins(self.worker)
        for _, scheduler in self.made:
            self.schedules.add(scheduler)
        return self

    def run(self, script: Script, loop: str, until: tuple[int, int] = (PASSES, 0)) -> list[list[float]]:
        """The rates of each step, up to a pass and a step of it: it dies there, or behind the pass."""
        found = []
        for epoch in range(self.passes if loop == "epochs" else 0, PASSES):
            if loop == "epochs":
                self.schedules.gives(epoch)
            script.before(self.made, epoch)
            if epoch >= self.passes:
                self.schedules.begins(0, epoch, first=self.passes, done=self.steps, trains=True)
                for batch in range(self.steps if epoch == self.passes else 0, BATCHES):
                    if (epoch, batch) == until:
                        return found
                    self.schedules.drew()
                    for optimizer, _ in self.made:
                        self.schedules.stepped(optimizer)
                        optimizer.step()
                    found.append(self.rates())
                    self.worker.step += 1
                    script.within(self.made, batch)
                self.schedules.ends(0)
            if until == (epoch, BATCHES):
                return found
            script.behind(self.made, epoch)
        return found

    def rates(self) -> list[float]:
        groups = [group for optimizer, _ in self.made for group in optimizer.param_groups]
        return [float(group[key]) for group in groups for key in ("lr", "momentum")]


class Script:
    """Where a user's script moves them."""

    def __init__(self, before: str = "", within: str = "", behind: str = "", every: int = 1) -> None:
        self._before, self._within, self._behind, self._every = before, within, behind, every

    def before(self, made: Made, epoch: int) -> None:
        self._move(self._before, made, epoch)

    def within(self, made: Made, batch: int) -> None:
        if batch % self._every == self._every - 1:
            self._move(self._within, made, batch)

    def behind(self, made: Made, epoch: int) -> None:
        self._move(self._behind, made, epoch)

    def _move(self, which: str, made: Made, metric: int) -> None:
        """`which`: the numbers of those that move."""
        for _, scheduler in (made[int(at)] for at in which):
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([math.cos(metric)] if plateau else []))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def one(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[], Made]:
    def made() -> Made:
        optimizer = sgd()
        return [(optimizer, make(optimizer))]

    return made


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.8)], [3])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.3, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def two() -> Made:
    """Of one optimizer: one for its steps, one for its passes."""
    optimizer = sgd()
    steps = lr_scheduler.ExponentialLR(optimizer, 0.97)
    return [(optimizer, steps), (sgd(), lr_scheduler.ExponentialLR(optimizer, 0.6))]


STEP = one(lambda o: lr_scheduler.StepLR(o, 1, 0.7))
EXP = one(lambda o: lr_scheduler.ExponentialLR(o, 0.9))
CYCLE = one(lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=PASSES * BATCHES + 1))
CYCLE_OF_PASSES = one(lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=PASSES + 2))
PLATEAU = one(lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0))
CASES = [
    (STEP, Script(behind="0")),
    (STEP, Script(before="0")),
    (EXP, Script(within="0")),
    (EXP, Script(within="00")),
    (EXP, Script(within="0", every=BATCHES)),
    (CYCLE, Script(within="0")),
    (CYCLE_OF_PASSES, Script(behind="0")),
    (one(lambda o: lr_scheduler.MultiStepLR(o, [2, 4])), Script(behind="0")),
    (one(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2)), Script(behind="0")),
    (one(warm_up), Script(behind="0")),
    (one(warm_up), Script(within="0")),
    (one(chained), Script(behind="0")),
    (one(chained), Script(within="0")),
    (two, Script(within="0", behind="1")),
]
# What these do behind the first pass, or any, cannot be known before they do it.
UNKNOWN = [
    (PLATEAU, Script(behind="0")),
    (EXP, Script(within="0", behind="0")),
    (STEP, Script(before="0", behind="00")),
]
# Within the first pass, a later one, and behind them; then a second death, in the life after that.
BEHIND = [(0, BATCHES), (3, BATCHES)]
DEATHS = [(0, 3), (1, 0), (3, 2), *BEHIND]


def undisturbed(make: Callable[[], Made], script: Script) -> list[list[float]]:
    return Life(make, Board()).begin().run(script, "range")


def places(death: tuple[int, int]) -> tuple[int, int]:
    return divmod(death[0] * BATCHES + death[1], BATCHES)


# Where the script has moved nothing yet behind a pass, nobody knows what it will do in some cases.
KNOWN = [
    (case, place)
    for case in range(len(CASES) + len(UNKNOWN))
    for place in DEATHS
    if case < len(CASES) or place not in BEHIND
]


@pytest.mark.parametrize("loop", ["epochs", "range"])
@pytest.mark.parametrize(("case", "death"), KNOWN)
def test_a_later_life_goes_on_where_the_earlier_ones_were(
    case: int, death: tuple[int, int], loop: str
) -> None:
    make, script = [*CASES, *UNKNOWN][case]
    whole, board = undisturbed(make, script), Board()
    again = (4, 1)
    found = Life(make, board).begin().run(script, loop, death)
    found += Life(make, board, *places(death)).begin().run(script, loop, again)
    found += Life(make, board, *again).begin().run(script, loop)
    assert found == [pytest.approx(rates) for rates in whole]


@pytest.mark.parametrize("loop", ["epochs", "range"])
@pytest.mark.parametrize(("case", "cut"), KNOWN)
def test_a_job_that_goes_on_from_a_checkpoint(case: int, cut: tuple[int, int], loop: str) -> None:
    make, script = [*CASES, *UNKNOWN][case]
    whole, first = undisturbed(make, script), Life(make, Board()).begin()
    found = first.run(script, loop, cut)
    told = json.loads(json.dumps(first.schedules.due()))
    found += Life(make, Board(), *places(cut)).begin(told).run(script, loop)
    assert found == [pytest.approx(rates) for rates in whole]


def test_a_cut_behind_a_step_is_before_the_move_with_it() -> None:
    first = Life(EXP, Board()).begin()
    first.run(Script(within="0"), "epochs", (1, 3))
    optimizer = first.made[0][0]
    first.schedules.stepped(optimizer)
    optimizer.step()
    first.worker.step += 1
    second = Life(EXP, Board(), 1, 4).begin(first.schedules.due())
    assert second.rates()[0] == pytest.approx(0.1 * 0.9**9)
    second.schedules.gives(1)
    second.schedules.begins(0, 1, first=1, done=4, trains=True)
    assert second.rates()[0] == pytest.approx(0.1 * 0.9**9)


def test_checkpoints_of_earlier_releases_know_how_far_those_are_that_move_with_the_steps() -> None:
    by_steps = Life(EXP, Board(), 2, 1).begin([11])
    by_steps.schedules.gives(2)
    assert by_steps.rates()[0] == pytest.approx(0.1 * 0.9**11)
    by_passes = Life(EXP, Board(), 2, 1).begin([-1])
    by_passes.schedules.gives(2)
    assert by_passes.rates()[0] == pytest.approx(0.1 * 0.9**2)


def test_a_worker_that_stood_still_moves_those_that_move_with_the_steps() -> None:
    for make, script, moves in ((EXP, Script(within="0"), 7), (STEP, Script(behind="0"), 0)):
        life = Life(make, Board()).begin()
        life.run(script, "epochs", (0, 4))
        before = life.made[0][1].last_epoch
        life.worker.step += 7
        life.schedules.missed(7)
        assert life.made[0][1].last_epoch == before + moves


def test_a_schedule_with_an_end_is_not_moved_behind_it() -> None:
    """In the last pass, after deaths whose rounds were made up for: the clock is ahead of the data."""
    board, script = Board(), Script(within="0")
    whole = undisturbed(CYCLE, script)
    Life(CYCLE, board).begin().run(script, "epochs", (5, 1))
    again = Life(CYCLE, board, 5, 1)
    again.worker.step += 9
    assert again.begin().run(script, "epochs") == [pytest.approx(rates) for rates in whole[-4:]]
