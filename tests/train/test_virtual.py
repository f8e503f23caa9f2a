"""What words do to time and to staleness, in virtual time over the real store and sync shard."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.train.history import History, UnboundedError, check
from tests.train.virtual import VirtualCrew

ROUNDS = 40


def duration(word: str, straggler: float) -> float:
    """Virtual seconds of a job of four workers, one of them slower by that factor."""
    rng = random.Random(5)
    crew = VirtualCrew(4, word, keys=8)
    done = lambda crew: crew.state()["closed"] >= ROUNDS  # noqa: E731
    return crew.run(done, lambda rank, _: rng.uniform(0.95, 1.05) * (straggler if rank == 3 else 1.0))


def test_a_straggler_slows_bsp_and_not_a_quorum() -> None:
    assert duration("bsp", 10.0) > 3.0 * duration("bsp", 1.0)
    assert duration("quorum:0.75", 10.0) < 1.3 * duration("quorum:0.75", 1.0)
    assert duration("quorum:0.75", 10.0) < 1.3 * duration("bsp", 1.0)


def test_delays_now_and_then_slow_bsp_and_less_those_who_may_lead() -> None:
    """Each of four workers takes five times as long in a fifth of its steps: 1.8 usual steps by itself."""

    def seconds_a_step(word: str) -> float:
        rng, crew = random.Random(7), VirtualCrew(4, word, keys=8)
        steps = 200
        took = crew.run(
            lambda crew: sum(crew.state()["clocks"]) >= 4 * steps,
            lambda rank, _: 5.0 if rng.random() < 0.2 else 1.0,
        )
        return took / steps

    took = {word: seconds_a_step(word) for word in ("bsp", "ssp:3", "ssp:10", "asp")}
    assert took["bsp"] > 3.0  # one of four is late in 59 % of the rounds
    assert took["ssp:3"] < 0.8 * took["bsp"]
    assert took["ssp:10"] < 0.7 * took["bsp"]
    assert took["asp"] < took["ssp:10"] < took["ssp:3"]


def test_a_step_has_the_same_workers_on_every_shard() -> None:
    class Rows(History):
        def read(self, rank: int, step: int, rows: Any) -> None:
            assert (rows == rows[0]).all()  # keys of all shards: who is in an update is in it everywhere
            super().read(rank, step, rows)

    rng, history = random.Random(1), Rows(4)
    crew = VirtualCrew(4, "quorum:0.75")
    crew.run(lambda crew: crew.state()["closed"] >= ROUNDS, lambda rank, _: rng.uniform(0.5, 2.0), history)
    state = crew.state()
    assert 0 < state["dropped"] < 4 * ROUNDS
    # An update is a mean: its weights are 1 in all, so dropped ones have left no trace.
    assert float(crew.rows(0)[0].sum()) == pytest.approx(ROUNDS, rel=1e-5)
    assert len(history.reads) > 3 * ROUNDS


def staleness(workers: int, word: str, seed: int = 3) -> float:
    rng = random.Random(seed)
    crew = VirtualCrew(workers, word, keys=8)
    crew.run(
        lambda crew: crew.state()["staleness"]["count"] >= 8 * 60 * workers,
        lambda rank, _: rng.uniform(0.9, 1.1),
    )
    found = crew.state()["staleness"]
    return float(found["sum"] / found["count"])


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("word", ["asp", "asp:staleness", "softsync:1", "softsync:1,scale=staleness"])
def test_mean_staleness_is_the_number_of_workers(word: str, n: int) -> None:
    assert 0.7 * n <= staleness(n, word) <= 1.3 * n


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("scale", ["share", "staleness"])
def test_mean_staleness_of_updates_from_several_gradients(scale: str, n: int) -> None:
    """The literature's n-softsync: 2n workers, two gradients an update."""
    assert 0.7 * n <= staleness(2 * n, f"softsync:2,scale={scale}") <= 1.3 * n


def test_workers_in_turn_have_the_staleness_of_their_number() -> None:
    assert staleness(4, "asp") == pytest.approx(4, rel=0.05)
    crew = VirtualCrew(1, "asp:staleness", keys=8)
    crew.run(lambda crew: crew.state()["staleness"]["count"] >= 80, lambda rank, step: 1.0)
    assert crew.state()["staleness"] == {"count": 80, "sum": 80, "max": 1}


def test_rounds_are_never_stale() -> None:
    assert staleness(4, "bsp") == 1.0


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_every_simulated_history_is_bounded(bound: int) -> None:
    leads = []
    for seed in range(15):
        rng = random.Random(f"{bound} {seed}")
        workers = rng.choice((2, 3, 4))
        crew, history = VirtualCrew(workers, f"ssp:{bound},scale=1", keys=8), History(workers)
        speeds = [rng.choice((0.2, 1.0, 5.0)) for _ in range(workers)]
        draw = lambda rank, step: rng.expovariate(1 / speeds[rank])  # noqa: B023, E731 - used in this turn
        crew.run(lambda crew: min(crew.state()["clocks"]) >= 12, draw, history)
        check(history, bound)
        leads.append(history.largest_lead())
    assert max(leads) == bound  # and as far ahead as it allows


def history_of(bound: int) -> History:
    rng, history = random.Random(9), History(3)
    crew = VirtualCrew(3, f"ssp:{bound},scale=1", keys=8)
    crew.run(lambda crew: min(crew.state()["clocks"]) >= 12, lambda *_: rng.expovariate(1.0), history)
    return history


def test_the_checker_catches_runs_that_are_not_bounded() -> None:
    history = history_of(3)
    check(history, 3)
    with pytest.raises(UnboundedError, match="started step"):  # a run under a looser bound than claimed
        check(history, 1)
    del history.finished[2, 4]
    with pytest.raises(UnboundedError, match="before worker 2 finished 4"):
        check(history, 3)


@pytest.mark.parametrize(("column", "change", "said"), [(0, -1, "its own"), (1, -4, "updates of worker 1"),
                                                        (1, 9, "updates of worker 1")])  # fmt: skip
def test_the_checker_catches_reads_that_are_not_bounded(column: int, change: int, said: str) -> None:
    history = history_of(1)
    at = next(i for i, (rank, step, *_) in enumerate(history.reads) if rank == 0 and step == 6)
    low, high = history.reads[at][2:]
    low[column], high[column] = low[column] + change, high[column] + change
    with pytest.raises(UnboundedError, match=said):
        check(history, 1)
