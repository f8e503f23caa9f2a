"""Thousands of seeded schedules; each failure names its seed and how to replay it."""

import struct

import pytest

from shoal import _core

from .bounded import run_bounded_seed
from .chain_rounds import run_chain_bounded_seed, run_chain_round_seed
from .chains import run_chain_seed
from .nodes import TOKEN
from .plan import BURST_EVERY, make_plan
from .rounds import ADVANCE, ASK, OPEN, SYNC, run_round_seed
from .simulator import LIVENESS_MS, Summary, run_seed

SEEDS = 3000


def total(summaries: list[Summary], name: str) -> float:
    return sum(getattr(summary, name) for summary in summaries)


@pytest.mark.slow
def test_every_schedule_is_exact() -> None:
    for seed in range(SEEDS):
        run_seed(seed)


def test_rounds_are_exact() -> None:
    runs = [run_round_seed(seed) for seed in range(300)]
    assert sum(commits for commits, _ in runs) > 1500
    assert sum(attempts for _, attempts in runs) > 3000
    assert run_round_seed(7) == runs[7]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_bounded_workers_are_bounded(bound: int) -> None:
    leads = [run_bounded_seed(seed, bound) for seed in range(40)]
    assert max(leads) == bound  # nobody was further ahead, and somebody was as far
    assert run_bounded_seed(7, bound) == leads[7]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_bounded_workers_are_bounded_under_many_more_schedules(bound: int) -> None:
    for seed in range(40, 500):
        run_bounded_seed(seed, bound)


@pytest.mark.slow
def test_rounds_are_exact_under_many_more_schedules() -> None:
    for seed in range(300, 3000):
        run_round_seed(seed)


def test_chains_are_exact() -> None:
    runs = [run_chain_seed(seed) for seed in range(500)]
    assert sum(kills for _, kills in runs) > 300
    assert run_chain_seed(7) == runs[7]


def test_rounds_over_chains_are_exact() -> None:
    runs = [run_chain_round_seed(seed) for seed in range(300)]
    assert sum(commits for commits, _ in runs) > 1500
    assert run_chain_round_seed(7) == runs[7]


def test_bounded_workers_are_bounded_over_chains() -> None:
    for seed in range(150):
        run_chain_bounded_seed(seed)


@pytest.mark.soak
def test_chains_are_exact_under_many_more_schedules() -> None:
    for seed in range(500, 3000):
        run_chain_seed(seed)
        run_chain_round_seed(seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(10))
def test_chains_are_exact_under_very_many_schedules(block: int) -> None:
    for seed in range((block + 1) * 10_000, (block + 2) * 10_000):
        run_chain_seed(seed)
        run_chain_round_seed(seed)
        run_chain_bounded_seed(seed)


def _placement(version: int) -> _core.Placement:
    address = _core.ServerAddress(0, "sim", 1)
    return _core.Placement(version=version, weak=False, servers=[address], terms=[version], chains=[[0]])


def test_whoever_is_let_go_on_learns_the_placement_first() -> None:
    """Else it could read at a server that slept, was replaced, and does not know it."""
    server = _core.protocol.Server(1, TOKEN, placed=False)
    server.place(0, _placement(1))
    workers = [_core.protocol.Client(who + 1, 1, 1, [0]) for who in range(2)]
    sessions = [_core.protocol.Session(server) for _ in workers]
    for worker, session in zip(workers, sessions, strict=True):
        worker.set_placement(_placement(1))
        [challenge], _ = session.feed(worker.hello())
        session.feed(worker.proof(TOKEN, challenge))

    def carry() -> None:
        for worker, session in zip(workers, sessions, strict=True):
            for frame in worker.outgoing(0):
                for reply in session.feed(frame)[0]:
                    worker.incoming(0, reply)
        for number, reply in server.mail():
            [at] = [i for i, session in enumerate(sessions) if session.number() == number]
            workers[at].incoming(0, reply)

    def ask(who: int, verb: int, number: int) -> int:
        bounded = (2, 0, 1.0, 1, 0, 1.0, float("nan"), 0.0, 0)  # two workers, none ahead of the other
        body = ASK.pack(verb, who, 0, 0, 0, number, 0, *bounded) + struct.pack("<Q", 0)
        operation = workers[who].ask(SYNC, [0], body)
        carry()
        return operation

    for who in range(2):
        assert workers[who].done(ask(who, OPEN, 1))
    early = ask(0, ADVANCE, 2)
    assert not workers[0].done(early)  # the other is still at step 0
    server.place(0, _placement(2))
    workers[1].set_placement(_placement(2))
    assert workers[1].done(ask(1, ADVANCE, 2))
    assert not workers[0].done(early)
    assert workers[0].homeless()
    workers[0].send_homeless()
    carry()
    assert not workers[0].done(early)  # asked again, and refused: it has yet to learn
    workers[0].set_placement(_placement(2))
    carry()
    assert workers[0].done(early)
    assert workers[0].code(early) == 0


@pytest.mark.soak
@pytest.mark.parametrize("block", range(10))
def test_many_more_schedules_are_exact(block: int) -> None:
    for seed in range((block + 1) * 50_000, (block + 2) * 50_000):
        run_seed(seed)


def test_a_seed_replays_exactly() -> None:
    for seed in range(50):
        assert make_plan(seed) == make_plan(seed)
        assert run_seed(seed) == run_seed(seed)


@pytest.mark.parametrize("hard", ["duplicates", "applied_unacked", "fenced_frames", "blocked"])
def test_schedules_reach_the_hard_cases(hard: str) -> None:
    """A simulator that meets no trouble proves nothing."""
    summaries = [run_seed(seed) for seed in range(200)]
    assert total(summaries, hard) >= 20


def test_a_client_with_more_pushes_than_its_window_waits_and_finishes() -> None:
    for seed in range(0, 10 * BURST_EVERY, BURST_EVERY):
        assert run_seed(seed).pushes > 256


def test_everything_ends_soon_after_the_last_fault() -> None:
    plans = [make_plan(seed) for seed in range(100)]
    assert max(run_seed(plan.seed).virtual_ms - plan.quiet_after for plan in plans) < LIVENESS_MS / 10
