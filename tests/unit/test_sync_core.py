"""Rounds, clocks and the ledger over the embedded store, with threads as workers."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import _core

TABLE, TENSOR = 1, 2
DIM = 4
WAIT_S = 20.0
PIECE = 65536


def spec(identity: int, dim: int, dense: bool = False) -> _core.TableSpec:
    made = _core.TableSpec()
    made.id, made.name, made.dim, made.dense = identity, f"t{identity}", dim, dense
    made.optimizer = _core.OptimizerSpec("sgd")
    made.optimizer.lr = 1.0
    made.init = _core.InitSpec("zeros")
    return made


def store(shards: int = 8) -> _core.Client:
    client = _core.Client.embedded(shards=shards, threads=2)
    client.declare(spec(TABLE, DIM), 1.0)
    client.declare(spec(TENSOR, 2 * PIECE + 10, dense=True), 1.0)
    return client


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def rows(client: _core.Client, *numbers: int) -> list[float]:
    """The first element of each row, negated: SGD(lr=1) from zero shows the sum of the gradients."""
    values = client.pull(TABLE, keys(*numbers), timeout_s=WAIT_S).wait(WAIT_S)
    assert values is not None
    return [-float(value) for value in values[:, 0]]


def stage(client: _core.Client, rank: int, step: int, key: int, value: float) -> None:
    grads = np.full((1, DIM), value, np.float32)
    client.push(TABLE, keys(key), grads, lr=math.nan, step=step, stage_rank=rank, timeout_s=WAIT_S).wait(
        WAIT_S
    )


def run_workers(count: int, work: Callable[[int], None]) -> None:
    """Run `work(rank)` on a thread each; the first error is raised here."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001 - handed over to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def opened(client: _core.Client, rank: int, workers: int, take: str, **more: Any) -> int:
    return client.sync_open(rank=rank, workers=workers, take=take, timeout_s=WAIT_S, **more)[0]


def finish(client: _core.Client, rank: int, step: int, weight: float = 1.0, **more: Any) -> dict[str, Any]:
    more.setdefault("timeout_s", WAIT_S)
    return client.advance(rank=rank, step=step, weight=weight, **more)


def test_a_staged_push_shows_nothing_until_its_commit() -> None:
    client = store()
    assert opened(client, 0, 1, "round") == 0
    stage(client, 0, 0, 7, 3.0)
    assert rows(client, 7) == [0.0]
    assert client.sync_state(1.0)["staged_bytes"] == 8 + 4 * DIM
    answer = finish(client, 0, 0)
    assert (answer["step"], answer["commit"], answer["dropped"], answer["norm"]) == (1, 1, False, 0.0)
    assert rows(client, 7) == [3.0]
    assert client.sync_state(1.0)["staged_bytes"] == 0


def test_a_tensor_is_staged_by_pieces_and_stepped_once() -> None:
    client = store()
    opened(client, 0, 2, "round")
    other = client.fork()
    opened(other, 1, 2, "round")
    value = np.arange(2 * PIECE + 10, dtype=np.float32)
    pushing = {"lr": math.nan, "timeout_s": WAIT_S}

    def work(rank: int) -> None:
        mine = (client, other)[rank]
        mine.push_tensor(TENSOR, value * (rank + 1), stage_rank=rank, **pushing).wait(WAIT_S)
        finish(mine, rank, 0)

    run_workers(2, work)
    pulled = client.pull_tensor(TENSOR, timeout_s=WAIT_S).wait(WAIT_S)
    np.testing.assert_array_equal(pulled, -1.5 * value)


@settings(max_examples=25, deadline=None)
@given(workers=st.sampled_from([2, 4]), steps=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_a_round_is_the_exact_mean(workers: int, steps: int, seed: int) -> None:
    client = store()
    rng = np.random.default_rng(seed)
    gradients = rng.integers(-8, 8, (workers, steps, 5)).astype(np.float32)

    def work(rank: int) -> None:
        mine, step = client.fork(), 0
        assert opened(mine, rank, workers, "round") == 0
        while step < steps:
            for key in range(5):
                stage(mine, rank, step, key, float(gradients[rank, step, key]))
            answer = finish(mine, rank, step, weight=3.0)
            assert (answer["step"], answer["commit"], answer["dropped"]) == (step + 1, step + 1, False)
            step += 1
            seen = rows(mine, *range(5))
            assert seen == [float(v) for v in gradients[:, :step].sum((0, 1)) / workers]

    run_workers(workers, work)
    state = client.sync_state(1.0)
    assert (state["clocks"], state["closed"], state["staged_bytes"]) == ([steps] * workers, steps, 0)


def test_weights_are_samples_and_an_abstainer_is_in_no_sum() -> None:
    client = store()

    def work(rank: int) -> None:
        mine = client.fork()
        opened(mine, rank, 3, "round")
        if rank < 2:
            stage(mine, rank, 0, 1, 8.0 * (rank + 1))
        finish(mine, rank, 0, weight=(3.0, 1.0, 0.0)[rank])

    run_workers(3, work)
    assert rows(client, 1) == [0.75 * 8 + 0.25 * 16]


def test_a_round_that_all_abstain_from_changes_nothing() -> None:
    client = store()
    opened(client, 0, 1, "round")
    assert finish(client, 0, 0, weight=0.0)["commit"] == 1
    assert finish(client, 0, 1, weight=0.0)["step"] == 2


def test_a_late_contribution_is_dropped_whole_and_the_late_worker_goes_on_with_the_open_round() -> None:
    client = store()
    for rank in range(3):
        opened(client, rank, 3, "round", quorum=0.6)
    for rank in range(3):
        stage(client, rank, 0, rank, 4.0)
    with pytest.raises(_core.CoreError, match=r"rank 1 \(in step 0, .*rank 2 \(in step 0, "):
        finish(client, 0, 0, timeout_s=0.05)
    assert finish(client, 1, 0)["step"] == 1
    assert finish(client, 0, 0)["step"] == 1  # asked again
    for rank in (0, 1):
        stage(client, rank, 1, rank, 2.0)
    with pytest.raises(_core.CoreError):
        finish(client, 0, 1, timeout_s=0.01)
    assert finish(client, 1, 1)["step"] == 2
    late = finish(client, 2, 0)
    assert (late["step"], late["dropped"]) == (2, True)
    assert finish(client, 2, 0) == late | {"waited_s": pytest.approx(0, abs=5)}
    assert rows(client, 0, 1, 2) == [3.0, 3.0, 0.0]
    assert client.sync_state(1.0)["dropped"] == 1
    stage(client, 2, 2, 2, 6.0)
    with pytest.raises(_core.CoreError):
        finish(client, 2, 2, timeout_s=0.01)
    finish(client, 0, 2, weight=0.0)
    assert rows(client, 2) == [6.0]
    assert client.sync_state(1.0)["staged_bytes"] == 0


@settings(max_examples=15, deadline=None)
@given(workers=st.integers(2, 4), slack=st.integers(0, 3), seed=st.integers(0, 2**16))
def test_nobody_is_further_ahead_than_the_slack(workers: int, slack: int, seed: int) -> None:
    client, steps = store(), 12
    clocks, lock = [0] * workers, threading.Lock()

    def work(rank: int) -> None:
        mine, rng = client.fork(), random.Random(seed + rank)
        step = opened(mine, rank, workers, "each", slack=slack)
        while step < steps:
            with lock:
                assert min(clocks) >= step - slack
            time.sleep(rng.choice((0, 0, 0.001, 0.003)))  # a worker's own work takes time, by the case
            with lock:
                clocks[rank] = step + 1  # before it says so: the bound seen here is never too kind
            step = finish(mine, rank, step)["step"]
        mine.leave(rank=rank)

    run_workers(workers, work)


@settings(max_examples=15, deadline=None)
@given(workers=st.integers(2, 4), count=st.integers(1, 5), steps=st.integers(1, 6))
def test_every_so_many_gradients_make_an_update(workers: int, count: int, steps: int) -> None:
    client = store()

    def work(rank: int) -> None:
        mine = client.fork()
        opened(mine, rank, workers, "count", count=count)
        for step in range(steps):
            stage(mine, rank, step, 5, 1.0)
            finish(mine, rank, step)
        assert not mine.pass_end(rank=rank, epoch=0, timeout_s=WAIT_S)[1]

    run_workers(workers, work)
    whole, rest = divmod(workers * steps, count)
    assert client.sync_state(1.0)["closed"] == whole + (rest > 0)
    assert rows(client, 5) == [workers * steps]  # a sum: workers say what part of an update each is


def test_clipping_scales_the_whole_sum_and_tells_everybody_its_norm() -> None:
    client = store()
    norms = {}

    def work(rank: int) -> None:
        mine = client.fork()
        opened(mine, rank, 2, "round")
        stage(mine, rank, 0, rank, (12.0, 16.0)[rank] / 2)
        norms[rank] = finish(mine, rank, 0, clip=5.0)["norm"]

    run_workers(2, work)
    assert norms[0] == norms[1] == pytest.approx(math.sqrt(DIM) * 5.0)
    assert rows(client, 0, 1) == pytest.approx([1.5, 2.0], rel=1e-5)


def test_lr_comes_with_the_lowest_rank() -> None:
    client = store()

    def work(rank: int) -> None:
        mine = client.fork()
        opened(mine, rank, 2, "round")
        stage(mine, rank, 0, 1, 2.0)
        finish(mine, rank, 0, lr=(0.5, 0.25)[rank])

    run_workers(2, work)
    assert rows(client, 1) == [1.0]


def test_all_must_agree_about_the_sync() -> None:
    client = store()
    opened(client, 0, 2, "round")
    with pytest.raises(_core.CoreError, match=r"workers=2 take=round .*rank 1 asks for workers=2 take=each"):
        opened(client, 1, 2, "each")
    with pytest.raises(_core.CoreError, match="rank 2 is not below"):
        finish(client, 2, 0)


def test_units_are_leased_done_and_returned() -> None:
    client = store()
    for rank in range(2):
        opened(client, rank, 2, "each")
    client.ledger_open(epoch=0, units=10, timeout_s=1.0)
    assert client.lease(rank=0, epoch=0, want=4, timeout_s=1.0) == [(0, 4)]
    assert client.lease(rank=1, epoch=0, want=100, timeout_s=1.0) == [(4, 10)]
    assert client.lease(rank=0, epoch=0, want=1, timeout_s=1.0) == []
    finish(client, 0, 0, units=[(0, 0), (0, 1)])
    finish(client, 1, 0, units=[(0, unit) for unit in range(4, 10)])
    assert client.pass_end(rank=0, epoch=0, timeout_s=1.0)[1]  # what it held came back
    assert client.lease(rank=1, epoch=0, want=9, timeout_s=1.0) == [(2, 4)]
    client.leave(rank=1)
    assert client.pass_end(rank=0, epoch=0, timeout_s=1.0)[1]
    assert client.lease(rank=0, epoch=0, want=9, timeout_s=1.0) == [(2, 4)]
    finish(client, 0, 1, units=[(0, 2), (0, 3)])
    assert not client.pass_end(rank=0, epoch=0, timeout_s=1.0)[1]
    assert client.ledger_report(epoch=0, timeout_s=1.0) == {
        "units": 10,
        "done": 10,
        "used": {1: 10},
        "by_rank": {0: 4, 1: 6},
    }
    with pytest.raises(_core.CoreError, match="10 units, rank 0 says 9"):
        client.ledger_open(epoch=0, units=9, timeout_s=1.0)


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    client = store()
    for rank in range(2):
        opened(client, rank, 2, "round")
    stage(client, 0, 0, 1, 2.0)
    stage(client, 1, 0, 1, 32.0)
    client.leave(rank=1)
    assert finish(client, 0, 0)["step"] == 1
    assert rows(client, 1) == [2.0]
    assert client.sync_state(1.0)["staged_bytes"] == 0


def test_too_much_staged_is_refused_whole() -> None:
    client = _core.Client.embedded(shards=1, threads=1)
    client.declare(spec(TENSOR, 1 << 26, dense=True), 1.0)
    grad = np.ones(1 << 26, np.float32)
    stages = {"lr": math.nan, "stage_rank": 0, "timeout_s": WAIT_S}
    opened(client, 0, 1, "round")
    for _ in range(3):
        client.push_tensor(TENSOR, grad, **stages).wait(WAIT_S)
    before = client.sync_state(1.0)["staged_bytes"]
    with pytest.raises(_core.CoreError, match="at most 1073741824 may wait for a commit"):
        client.push_tensor(TENSOR, grad, **stages)
    assert before <= client.sync_state(1.0)["staged_bytes"] <= 1 << 30


def test_who_was_started_before_the_job_changed_its_size_need_not_know_it() -> None:
    client = store()
    opened(client, 0, 2, "round")
    client.sync_open(rank=0, workers=4, take="round", resize=True, timeout_s=WAIT_S)
    with pytest.raises(_core.CoreError, match="opened with workers=4"):
        opened(client.fork(), 1, 2, "round")
    assert opened(client.fork(), 1, 2, "round", back=True) == 0
    with pytest.raises(_core.CoreError, match="opened with workers=4 take=round"):
        opened(client.fork(), 2, 2, "each", back=True)
    client.sync_open(rank=0, workers=3, take="round", resize=True, timeout_s=WAIT_S)
    assert opened(client.fork(), 2, 4, "round", back=True) == 0  # it never came while there were four
    with pytest.raises(_core.CoreError, match="opened with workers=3"):
        opened(client.fork(), 3, 4, "round", back=True)
