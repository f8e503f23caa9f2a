"""Rounds under the same bad network: workers that stage, finish, and carry commits, and a judge of the sums.

Every attempt at a step has a column of its own, so that the rows show which attempts were summed, with what
weight. A worker that crashes comes back as another life of its rank and does its step again. Then, for all
that any worker was told:

1. a commit is the same for all who hear of it, and commits are numbered without gaps;
2. what it names shows with its weight, once, on every shard, in every read after a worker was let go on;
3. everything else (dropped, broken off by a crash, not finished) never shows.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .ledger import KEY_ARRAY, Violation
from .nodes import SimulatedClient, SimulatedServer, Verifier
from .plan import KEYS, TABLES, Plan, make_plan
from .simulator import World

SYNC, COMMIT = 22, 23  # of wire/frame.h
MOVED = 10  # of base/status.h
OPEN, ADVANCE = 1, 2  # of store/sync_message.h
TAKE_ROUND, TAKE_COUNT = 1, 2
ASK = struct.Struct("<IIQQQQQIIdIifffI")
REPLY_HEAD = struct.Struct("<QQIIII")
COMMIT_HEAD = struct.Struct("<QfffI")
ENTRY = struct.Struct("<QQIIfI")
STEPS = 6
ATTEMPTS_MAX = 64  # columns of the table


@dataclass(frozen=True)
class RoundPlan:
    """What the workers do; the network and the faults are those of the plan."""

    plan: Plan
    take: int
    quorum: float
    count: int
    slack: int = -1


def make_round_plan(seed: int) -> RoundPlan:
    rng = random.Random(f"rounds {seed}")
    plan = make_plan(seed)
    faults = tuple(action for action in plan.actions if action.kind not in ("push", "pull"))
    plan = Plan(**{**plan.__dict__, "actions": faults, "columns": (ATTEMPTS_MAX, 1)})
    take = rng.choice((TAKE_ROUND, TAKE_ROUND, TAKE_COUNT))
    return RoundPlan(plan, take, rng.choice((1.0, 1.0, 0.5)), rng.choice((1, 2, 3)))


@dataclass
class Attempt:
    """One life's work on one step."""

    name: tuple[int, int, int, int]  # rank, step, client, incarnation
    column: int
    keys: np.ndarray


@dataclass
class Judge:
    """What was staged, and what was committed."""

    attempts: dict[tuple[int, int, int, int], Attempt] = field(default_factory=dict)
    commits: dict[int, bytes] = field(default_factory=dict)

    def freeze(self, *_: object) -> None:
        """A newer life was welcomed: nothing to note, for commits name the life they mean."""

    def hear(self, seq: int, commit: bytes) -> None:
        if self.commits.setdefault(seq, commit) != commit:
            raise Violation(f"commit {seq} is not the same for all")

    def expected(self, closed: int) -> np.ndarray:
        rows = np.zeros((len(KEYS), ATTEMPTS_MAX), np.float32)
        for seq in range(1, closed + 1):
            if seq not in self.commits:
                raise Violation(f"commit {seq} was never handed out")
            for client, step, incarnation, rank, weight, _ in ENTRY.iter_unpack(
                self.commits[seq][COMMIT_HEAD.size :]
            ):
                attempt = self.attempts.get((rank, step, client, incarnation))
                if weight >= 0 and attempt is not None:
                    np.add.at(rows[:, attempt.column], attempt.keys, np.float32(weight))
        return rows

    def judge(self, rows: np.ndarray, closed: int, exactly: bool) -> None:
        known = self.expected(closed)
        fine = rows == known if exactly else (rows == known) | (known == 0)
        if not fine.all():
            key, column = np.argwhere(~fine)[0]
            raise Violation(
                f"key {KEYS[key]}, attempt {column}: read {rows[key, column]:g}, "
                f"{known[key, column]:g} expected after commit {closed}"
            )


class RoundClient(SimulatedClient):
    """A worker: opens, and for each step stages, finishes, carries what it is told."""

    world: RoundWorld

    def __init__(self, world: RoundWorld, who: int) -> None:
        self.world = world
        self._asked = 0
        self.applied = 0
        super().__init__(world, who)

    def start(self) -> None:
        self._open: list[int] = []
        super().start()
        self.applied = 0  # of a life
        self._step = 0
        self._carrying: list[bytes] = []
        self._then = self._opened
        self._reading = 0
        self._closed = 0
        self._ask(OPEN)

    def idle(self) -> bool:
        return not self.down and self._then == self._over

    def sync_server(self) -> int:
        return self.world.placement[0]

    def everywhere(self) -> list[int]:
        return list(range(self.world.plan.servers))

    def workers(self) -> int:
        """How many there are, as far as it knows."""
        return self.world.plan.clients

    def _ask(self, verb: int, weight: float = 0.0) -> None:
        self._question(verb, self._step, weight)

    def _question(
        self, verb: int, step: int = 0, weight: float = 0.0, epoch: int = 0, count: int = 0,
        units: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        shape = self.world.shape
        self._asked += 1
        body = ASK.pack(
            verb, self._who, step, epoch, count, self._asked, self.applied, self.workers(),
            shape.take, shape.quorum, shape.count, shape.slack, weight, float("nan"), 0.0, 0,
        )  # fmt: skip
        named = b"".join(struct.pack("<QQ", *unit) for unit in units)
        body += struct.pack("<Q", len(units)) + named
        self._open = [self._machine.ask(SYNC, [self.sync_server()], body)]

    def _settle(self, seq: int) -> None:
        while self._open and all(self._machine.done(operation) for operation in self._open):
            done, self._open = self._open, []
            if any(self._machine.code(operation) == MOVED for operation in done):
                self._ask_again()
                return
            for operation in done:
                self._succeeded(operation, f"in {self._then.__name__}, operation {operation}")
            self._then(done)

    def _ask_again(self) -> None:
        raise Violation("a server refuses, and none has moved")

    def _opened(self, done: list[int]) -> None:
        self._step = self._take_answer(self._machine.answer(done[0]))[0]
        self._carry()

    def _take_answer(self, answer: bytes) -> tuple[int, bool, bool, tuple[int, ...]]:
        """The step, whether it was dropped, whether to ask again, numbers; its commits are to be carried."""
        step, self._closed, dropped, again, numbers, commits = REPLY_HEAD.unpack_from(answer)
        at = REPLY_HEAD.size + 8 * numbers
        self._carrying = []
        for _ in range(commits):
            seq, *_rest, entries = COMMIT_HEAD.unpack_from(answer, at)
            size = COMMIT_HEAD.size + ENTRY.size * entries
            self.world.judged.hear(seq, answer[at : at + size])
            self._carrying.append(answer[at : at + size])
            at += size
        return step, bool(dropped), bool(again), struct.unpack_from(f"<{numbers}Q", answer, REPLY_HEAD.size)

    def _carry(self) -> None:
        if self._carrying:
            self._open = [self._machine.ask(COMMIT, self.everywhere(), self._carrying[0])]
            self._then = self._carried
            return
        self.applied = max(self.applied, self._closed)
        self._reading = self._machine.pull(TABLES[0], KEY_ARRAY)
        self._open, self._then = [self._reading], self._read

    def _carried(self, _done: list[int]) -> None:
        commit = self._carrying.pop(0)
        self.applied = max(self.applied, COMMIT_HEAD.unpack_from(commit)[0])
        self._carry()

    def _read(self, done: list[int]) -> None:
        self.world.judged.judge(self._machine.rows(done[0]), self._closed, exactly=False)
        if self._step >= STEPS:
            self._then = self._over
            return
        self._stage()

    def _stage(self) -> None:
        judged = self.world.judged
        name = (self._who, self._step, self._who + 1, self.incarnation)
        column = len(judged.attempts)
        numbers = self._rng.sample(range(len(KEYS)), self._rng.randint(0, 6))
        attempt = judged.attempts.setdefault(name, Attempt(name, column, np.array(numbers, np.int64)))
        grads = np.zeros((1, ATTEMPTS_MAX), np.float32)
        grads[:, attempt.column] = -1.0
        self._then = self._staged
        self._open = [
            self._machine.push(TABLES[0], KEY_ARRAY[number : number + 1], grads, self._who, self._step)
            for number in attempt.keys.tolist()
        ]
        if not self._open:
            self._staged([])

    def _staged(self, _done: list[int]) -> None:
        self._then = self._opened
        self._ask(ADVANCE, weight=float(2 ** self._rng.randint(0, 2)))

    def _over(self, done: list[int]) -> None:
        """Nothing more to do."""

    def _check_window(self, seq: int, low: int) -> None:
        """Judged elsewhere."""

    def check_end(self) -> None:
        """Judged by the rows."""


class RoundWorld(World):
    """One run of rounds."""

    client: type[RoundClient] = RoundClient

    def __init__(self, shape: RoundPlan) -> None:
        self.shape = shape
        self.judged = Judge()
        super().__init__(shape.plan)

    def _populate(self) -> None:
        plan = self.plan
        self.ledger = self.judged  # type: ignore[assignment] # what a server tells of new lives
        self._servers = [SimulatedServer(self, index) for index in range(plan.servers)]
        self.verifier = Verifier(self, self._servers)
        self._clients = [self.client(self, who) for who in range(plan.clients)]

    def play(self) -> None:
        """Until all workers are done; raises Violation."""
        limit = self.plan.quiet_after + 60_000.0
        while self.clock.step():
            if self.clock.now > limit:
                raise Violation("not finished a minute after the last fault")
        if not self.finished():
            doing = [client._then.__name__ for client in self._clients]  # type: ignore[attr-defined]
            raise Violation(f"it stands still; {doing}")

    def run_rounds(self) -> tuple[int, int]:
        """The number of commits and of attempts; raises Violation."""
        self.play()
        closed = max((client.applied for client in self._clients), default=0)
        self.judged.judge(self._final_tables()[0], closed, exactly=True)
        return closed, len(self.judged.attempts)


def run_round_plan(shape: RoundPlan) -> tuple[int, int]:
    """The number of commits and of attempts; raises Violation."""
    return RoundWorld(shape).run_rounds()
