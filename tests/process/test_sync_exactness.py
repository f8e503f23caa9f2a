"""Rounds with real servers and sockets: exact sums, whatever connections are cut and workers restarted."""

import itertools
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from cutting_proxy import CuttingProxy
from exactness_world import DEADLINE_S, LANES, CounterTable, proxies_before, through

import shoal
from shoal import _core

pytestmark = pytest.mark.process

KEYS = np.arange(-20, 20)
STEPS = 12
names = (f"sync-{number}" for number in itertools.count())
dims = itertools.count(2000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=2) as cluster:
        yield cluster


class Worker:
    """One rank with a client of its own; column 0 of each row is what the workers sum up."""

    def __init__(self, table: CounterTable, rank: int, workers: int, take: str, **more: Any) -> None:
        self.table, self.rank = table, rank
        place = {"rank": rank, "workers": workers}
        self.step, _ = table.core.sync_open(**place, take=take, timeout_s=DEADLINE_S, **more)

    def stage(self, value: float) -> None:
        grads = np.zeros((len(KEYS), self.table.spec.dim), np.float32)
        grads[:, 0] = -value
        pushing = {"lr": math.nan, "step": self.step, "stage_rank": self.rank, "timeout_s": DEADLINE_S}
        self.table.core.push(self.table.spec.id, KEYS, grads, **pushing).wait(DEADLINE_S)

    def finish(self, **more: Any) -> dict[str, Any]:
        more = {"weight": 1.0, "timeout_s": DEADLINE_S} | more
        answer = self.table.core.advance(rank=self.rank, step=self.step, **more)
        self.step = answer["step"]
        return answer

    def column(self) -> list[float]:
        return self.table.read(KEYS)[:, 0].tolist()

    def leave(self) -> None:
        self.table.core.leave(rank=self.rank)


def run(work: Any, workers: int) -> list[Any]:
    with ThreadPoolExecutor(workers) as pool:
        return [job.result(60) for job in [pool.submit(work, rank) for rank in range(workers)]]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("seed", range(3))
def test_a_round_is_exact_while_connections_are_cut(
    cluster: shoal.LocalCluster, lane: str, seed: int
) -> None:
    workers, dim = 2, next(dims)

    with ExitStack() as stack:
        proxies: list[CuttingProxy] = [
            stack.enter_context(p) for p in proxies_before(cluster, lane, 100 + 10 * seed + len(lane))
        ]

        def work(rank: int) -> int:
            with closing(CounterTable(cluster, next(names), lane, dim, through(proxies))) as table:
                worker = Worker(table, rank, workers, "round")
                for step in range(STEPS):
                    worker.stage(2.0 * (rank + 1) * (step + 1))
                    answer = worker.finish()
                    assert worker.step == step + 1
                    assert worker.column() == [3.0 * (step + 1) * (step + 2) / 2] * len(KEYS)
                worker.leave()
                return int(answer["commit"])

        commits = run(work, workers)
        assert commits[0] == commits[1]


def test_every_shard_takes_the_same_set_of_a_quorum(cluster: shoal.LocalCluster) -> None:
    workers, dim = 3, next(dims)

    def work(rank: int) -> None:
        with closing(CounterTable(cluster, next(names), "shm", dim)) as table:
            worker = Worker(table, rank, workers, "round", quorum=0.6)
            for _ in range(STEPS):
                worker.stage(float(4**rank))
                worker.finish()
            worker.leave()

    with closing(CounterTable(cluster, next(names), "shm", dim)) as reader:
        for _ in range(3):
            run(work, workers)
            # Only now: a read of two shards is no snapshot while others close rounds.
            assert len(set(reader.read(KEYS)[:, 0].tolist())) == 1
            assert reader.core.sync_state(DEADLINE_S)["staged_bytes"] == 0


def test_a_worker_that_died_in_a_step_does_it_again_and_it_counts_once(cluster: shoal.LocalCluster) -> None:
    dim = next(dims)
    with ExitStack() as stack:
        tables = [stack.enter_context(closing(CounterTable(cluster, next(names), "tcp", dim))) for _ in "012"]
        first, dying = (Worker(tables[rank], rank, 2, "round") for rank in range(2))
        first.stage(2.0)
        dying.stage(1000.0)
        again = Worker(tables[2], 1, 2, "round")
        assert again.step == 0
        again.stage(4.0)
        other = threading.Thread(target=first.finish)
        other.start()
        again.finish()
        other.join(DEADLINE_S)
        assert first.column() == [3.0] * len(KEYS)
        assert again.table.core.sync_state(DEADLINE_S)["staged_bytes"] == 0
        for worker in (first, again):
            worker.leave()


def test_a_deadline_names_who_is_waited_for(cluster: shoal.LocalCluster) -> None:
    with ExitStack() as stack:
        dim = next(dims)
        tables = [stack.enter_context(closing(CounterTable(cluster, next(names), "tcp", dim))) for _ in "01"]
        workers = [Worker(table, rank, 3, "round") for rank, table in enumerate(tables)]
        with pytest.raises(_core.CoreError, match=r"rank 1 \(in step 0, .*rank 2 \(not here yet"):
            workers[0].finish(timeout_s=0.2)
        tables[0].core.leave(rank=2)  # nobody waits for it any more, but it may still come
        other = threading.Thread(target=workers[1].finish)
        other.start()
        assert workers[0].finish()["step"] == 1
        other.join(DEADLINE_S)
        for worker in [*workers, Worker(tables[0], 2, 3, "round")]:
            worker.leave()


def test_clipping_is_the_same_on_all_servers(cluster: shoal.LocalCluster) -> None:
    dim = next(dims)

    def work(rank: int) -> float:
        with closing(CounterTable(cluster, next(names), "shm", dim)) as table:
            worker = Worker(table, rank, 2, "round")
            worker.stage(10.0)
            norm = worker.finish(clip=1.0)["norm"]
            assert worker.column() == pytest.approx([1 / math.sqrt(len(KEYS))] * len(KEYS), rel=1e-4)
            worker.leave()
            return float(norm)

    norms = run(work, 2)
    assert norms[0] == norms[1] == pytest.approx(10 * math.sqrt(len(KEYS)))
