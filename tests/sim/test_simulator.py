"""Thousands of seeded schedules; each failure names its seed and how to replay it."""

import pytest

from .bounded import run_bounded_seed
from .plan import BURST_EVERY, make_plan
from .rounds import run_round_seed
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
