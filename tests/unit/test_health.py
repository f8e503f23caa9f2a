"""Which workers are in trouble, by what they report: a pure function of histories."""

import pytest

from shoal.errors import BadInput
from shoal.launch.health import Look, find_trouble, parse_policies


def looks(count: int = 100, *, step_s: float = 0.1, waits: float = 0.0, losses=None) -> list[Look]:
    """One a second, of a worker whose steps take so long, that waits such a part of the time."""
    return [
        Look(
            time=float(second),
            step=int(second * (1 - waits) / step_s),
            loss=None if losses is None else losses[second],
            waited_s=second * waits,
        )
        for second in range(count)
    ]


def kinds(histories: dict[int, list[Look]], now: float = 100.0) -> dict[int, str]:
    return {trouble.rank: trouble.kind for trouble in find_trouble(histories, now)}


def test_workers_that_do_the_same_are_well() -> None:
    assert kinds({rank: looks(losses=[1 / (1 + t + rank) for t in range(100)]) for rank in range(4)}) == {}


def test_a_worker_that_is_far_slower_than_its_peers_is_slow() -> None:
    assert kinds({0: looks(), 1: looks(step_s=0.11), 2: looks(step_s=0.5)}) == {2: "slow"}
    assert kinds({0: looks(), 1: looks(step_s=0.5)}) == {1: "slow"}


def test_a_worker_that_waits_for_others_is_not_slow() -> None:
    assert kinds({0: looks(waits=0.8), 1: looks(), 2: looks()}) == {}


def test_peers_that_differ_allow_more() -> None:
    mixed = {rank: looks(step_s=0.1 * (1 + rank)) for rank in range(4)}
    assert kinds({**mixed, 9: looks(step_s=0.9)}) == {}
    assert kinds({**mixed, 9: looks(step_s=3.0)}) == {9: "slow"}


def test_a_few_milliseconds_are_not_slow() -> None:
    assert kinds({0: looks(step_s=0.001), 1: looks(step_s=0.004)}) == {}


def test_a_pause_is_not_slow() -> None:
    late = [Look(look.time + 60 * (look.time > 50), look.step) for look in looks()]
    assert kinds({0: looks(), 1: late}, now=160.0) == {0: "stuck"}


def test_of_a_few_steps_nothing_is_said() -> None:
    assert kinds({0: looks(), 1: looks(4, step_s=1.0)}, now=4.0) == {}


@pytest.mark.parametrize(("last", "expected"), [(1.5, {}), (9.0, {}), (50.0, {0: "exploding"})])
def test_a_loss_that_jumps_far_above_its_past_explodes(last: float, expected: dict[int, str]) -> None:
    assert kinds({0: looks(losses=[1.0 + t % 3 / 10 for t in range(99)] + [last])}) == expected


def test_a_loss_below_zero_does_not_explode_by_its_sign() -> None:
    assert kinds({0: looks(losses=[-5.0 - t % 3 for t in range(99)] + [-1.0])}) == {}


def test_a_loss_that_stands_still_is_flat() -> None:
    assert kinds({0: looks(losses=[0.7] * 100)}) == {0: "flat"}
    assert kinds({0: looks(losses=[0.7] * 99 + [0.6])}) == {}


def test_a_worker_that_makes_no_step_is_stuck_unless_it_waits() -> None:
    assert kinds({0: looks()}, now=120.0) == {}
    assert kinds({0: looks()}, now=140.0) == {0: "stuck"}
    waiting = [*looks(), Look(time=100.0, step=990, waiting=True)]
    assert kinds({0: waiting}, now=140.0) == {}


def test_slow_steps_give_more_time_before_one_is_stuck() -> None:
    assert kinds({0: looks(step_s=9.0)}, now=200.0) == {}
    assert kinds({0: looks(step_s=9.0)}, now=300.0) == {0: "stuck"}


@pytest.mark.parametrize("text", ["slow", "slow=", "slow=sell", "lazy=report", "slow=report;stuck=replace"])
def test_an_unknown_policy_is_refused(text: str) -> None:
    with pytest.raises(
        BadInput, match=r"kind of exploding, flat, stuck, slow, nan and a policy of report, scale"
    ):
        parse_policies(text)


def test_what_is_not_finite_is_told_of_where_the_worker_goes_on() -> None:
    assert kinds({0: looks(), 1: [*looks(99), Look(time=99.0, step=990, nan_step=7)]}) == {1: "nan"}


def test_what_is_not_finite_cannot_be_scaled() -> None:
    assert parse_policies("nan=refuse")["nan"] == "refuse"
    with pytest.raises(BadInput, match=r"on-trouble is 'nan=scale'.*nan cannot be scaled"):
        parse_policies("nan=scale")
