"""A worker made slow on purpose: how it is said, and how long it sleeps."""

import pytest

from shoal.errors import BadInput
from shoal.launch.options import JobOptions
from shoal.launch.worker_environment import JobAddress, worker_environment
from shoal.train import straggler
from shoal.train.environment import read_worker_environment
from shoal.train.straggler import Straggler, parse_stragglers


class Clock:
    """Time that passes only when told to, or when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(straggler, "time", clock)
    return clock


def test_it_sleeps_by_its_own_computation_and_not_by_its_waiting(clock: Clock) -> None:
    waited = [7.0]
    slow = Straggler("5x", lambda: waited[0])
    clock.now += 3.0
    waited[0] += 2.0
    slow.slow_down()
    slow.begin()
    clock.now += 0.5
    slow.slow_down()
    assert clock.slept == [pytest.approx(4.0), pytest.approx(2.0)]


def test_it_sleeps_a_fixed_time(clock: Clock) -> None:
    slow = Straggler("50ms")
    clock.now += 3.0
    slow.slow_down()
    assert clock.slept == [pytest.approx(0.05)]


def test_it_is_slow_now_and_then_and_by_its_seed_alone(clock: Clock) -> None:
    def slow_steps(seed: str) -> list[int]:
        slow, found = Straggler("50ms@20%", seed=seed), []
        for step in range(1000):
            before = len(clock.slept)
            slow.slow_down()
            found += [step] if len(clock.slept) > before else []
        return found

    first = slow_steps("3 0")
    assert set(clock.slept) == {0.05}
    assert 150 < len(first) < 250
    assert slow_steps("3 0") == first
    assert slow_steps("3 1") != first


def test_waiting_that_is_longer_than_the_time_is_no_reason_to_fail(clock: Clock) -> None:
    waited = [0.0]
    slow = Straggler("2x", lambda: waited[0])
    waited[0] = 1.0
    slow.slow_down()
    assert clock.slept == [0.0]


def test_several_ranks() -> None:
    assert parse_stragglers("0:1x, 3:2.5ms", 4) == {0: "1x", 3: "2.5ms"}
    assert parse_stragglers("", 4) == {}
    assert parse_stragglers("all:2ms@0.5%", 2) == {0: "2ms@0.5%", 1: "2ms@0.5%"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2:5x", "there are 2 workers, so ranks are 0 to 1"),
        ("1:0.5x", "a factor of 1 to 1000"),
        ("1:1001x", "a factor of 1 to 1000"),
        ("1:nanx", "a factor of 1 to 1000"),
        ("1:-1ms", "0 to 60,000 ms"),
        ("1:infms", "0 to 60,000 ms"),
        ("1:5", "as 5x"),
        ("1:", "as 5x"),
        ("1:s", "as 5x"),
        ("5x", "rank:slowness"),
        ("-1:5x", "rank:slowness"),
        ("1:5x,1:6x", "rank 1 is given twice"),
        ("1:5x,", "rank:slowness"),
        ("any:5x", "all:50ms@20%"),
        ("all:5x,1:6x", "rank 1 is given twice"),
        ("1:5x@", "as 50ms@20%"),
        ("1:5x@20", "as 50ms@20%"),
        ("1:5x@0%", "more than 0 and at most 100"),
        ("1:5x@101%", "more than 0 and at most 100"),
        ("1:5x@nan%", "more than 0 and at most 100"),
        ("1:@20%", "as 5x"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_stragglers(text, 2)


def test_only_the_rank_that_is_meant_is_told(tmp_path) -> None:
    where = JobAddress(address="shoal://h:1", token_file=tmp_path, directory=tmp_path, master_port=1)
    options = JobOptions(command=(__file__,), straggler="1:5x", history=True)
    told = [
        read_worker_environment(worker_environment(options, where, rank, {"SHOAL_STRAGGLER": "9x"}))
        for rank in range(2)
    ]
    assert [one.straggler for one in told] == [None, "5x"]
    assert all(one.history for one in told)


def test_a_job_refuses_a_straggler_that_is_not_there() -> None:
    with pytest.raises(BadInput, match="ranks are 0 to 2"):
        JobOptions(command=(__file__,), workers=3, straggler="3:5x")
