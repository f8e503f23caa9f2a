"""Exactly once with real processes and sockets: cut connections, killed and paused processes."""

import itertools
import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
from cutting_proxy import CuttingProxy
from exactness_world import CUTS, LANES, SGD, CounterTable, direct, join, proxies_before, stopped, through

import shoal
from shoal import _core

pytestmark = pytest.mark.process

SEEDS = range(8)
SERVERS, CLIENTS, THREADS = 2, 2, 2
PUSHES = 25  # a thread's
KEYS = np.arange(-20, 20)
names = (f"client-{number}" for number in itertools.count())


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.soak)], ids="copies={}".format)
def cluster(request: pytest.FixtureRequest) -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=SERVERS, replicas=request.param) as cluster:
        yield cluster


def push_counters(table: CounterTable, column: int, seed: int) -> np.ndarray:
    """Push to random keys, some twice; how often each was acknowledged."""
    rng = np.random.default_rng([seed, column])
    acked = np.zeros(len(KEYS), np.float32)
    for _ in range(PUSHES):
        chosen = rng.integers(0, len(KEYS), rng.integers(1, 30))
        table.add(KEYS[chosen], column)
        np.add.at(acked, chosen, 1.0)
    return acked


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("seed", SEEDS)
def test_cut_connections_lose_and_double_nothing(cluster: shoal.LocalCluster, lane: str, seed: int) -> None:
    dim = 100 * LANES.index(lane) + 8 * seed + CLIENTS * THREADS  # a table for each schedule
    with ExitStack() as stack:
        proxies = [stack.enter_context(p) for p in proxies_before(cluster, lane, seed)]
        tables = [CounterTable(cluster, next(names), lane, dim, through(proxies)) for _ in range(CLIENTS)]
        for table in tables:
            stack.enter_context(closing(table))
        workers = stack.enter_context(ThreadPoolExecutor(CLIENTS * THREADS))
        jobs = [workers.submit(push_counters, tables[i % CLIENTS], i, seed) for i in range(CLIENTS * THREADS)]
        acked = np.stack([job.result(60) for job in jobs], axis=1)
        reader = stack.enter_context(closing(CounterTable(cluster, next(names), lane, dim)))
        assert np.array_equal(reader.read(KEYS)[:, : CLIENTS * THREADS], acked)
        assert sum(sum(proxy.cuts.values()) for proxy in proxies) >= CUTS
        assert sum(table.core.counters()["retries"] for table in tables) > 0


def test_a_reply_that_is_swallowed_is_asked_for_again(cluster: shoal.LocalCluster) -> None:
    """The one cut of the mission, by itself: applied, not heard, sent again, applied once."""
    with ExitStack() as stack:
        proxies = proxies_before(cluster, "tcp", 0)
        for proxy in proxies:
            proxy.ways = ("swallow",)
            stack.enter_context(proxy)
        table = stack.enter_context(closing(CounterTable(cluster, next(names), "tcp", 1, through(proxies))))
        for _ in range(50):
            table.add(KEYS, 0)
        assert table.read(KEYS).tolist() == [[50.0]] * len(KEYS)
        assert sum(proxy.cuts["swallow"] for proxy in proxies) >= CUTS


def test_a_push_in_shared_memory_is_retried_by_the_same_lane(cluster: shoal.LocalCluster) -> None:
    """Lane "auto" must not send again by tcp what lies in memory that only the shm lane can reach."""
    server = join(cluster, "proxy").placement.servers[0]
    path = cluster.directory / "comes-and-goes"
    grads = -np.ones((len(KEYS), 2), np.float32)
    with ExitStack() as stack:
        proxy = stack.enter_context(CuttingProxy(server.unix_path, seed=0, cuts=0, path=str(path)))
        to = {0: _core.ServerAddress(0, server.host, server.port, str(path))}
        table = CounterTable(cluster, next(names), "auto", 2, lambda s: to.get(s.index, direct(s)))
        stack.enter_context(closing(table))
        with stopped([server.pid]):
            ticket = table.core.push(table.spec.id, KEYS, grads, lr=math.nan, timeout_s=5)
            path.unlink()
            proxy.close()
        with pytest.raises(_core.CoreError, match=f"server 0 .*{server.port}"):
            ticket.wait(0.2)
        stack.enter_context(CuttingProxy(server.unix_path, seed=0, cuts=0, path=str(path)))
        ticket.wait(30)
        assert (table.read(KEYS) == 1).all()


@pytest.mark.parametrize("lane", LANES)
def test_threads_of_one_client_lose_nothing_on_the_same_rows(cluster: shoal.LocalCluster, lane: str) -> None:
    with cluster.connect(lane=lane) as client, ThreadPoolExecutor(4) as workers:
        table = client.table(f"threads-{lane}", dim=4, optimizer=SGD)
        grads = -np.ones((len(KEYS), 4), np.float32)
        jobs = [workers.submit(table.push, KEYS, grads) for _ in range(200)]
        for job in jobs:
            job.result(60)
        assert (table.pull(KEYS) == 200).all()


@pytest.mark.parametrize("lane", LANES)
def test_more_pushes_than_the_window_all_count(cluster: shoal.LocalCluster, lane: str) -> None:
    with cluster.connect(lane=lane) as client:
        table = client.table(f"window-{lane}", dim=2, optimizer=SGD)
        grads = -np.ones((len(KEYS), 2), np.float32)
        tickets = [table.push_async(KEYS, grads) for _ in range(600)]
        for ticket in tickets:
            ticket.wait(60)
        assert (table.pull(KEYS) == 600).all()


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("seed", range(3))
def test_servers_that_pause_lose_and_double_nothing(
    cluster: shoal.LocalCluster, lane: str, seed: int
) -> None:
    """Pushes wait with a short deadline, and again, while servers stand still now and then."""
    rng = random.Random(seed)
    done = threading.Event()

    def push_all(table: shoal.Table) -> int:
        try:
            return sum(push_and_wait_again(table) for _ in range(40))
        finally:
            done.set()

    with cluster.connect(lane=lane) as client, ThreadPoolExecutor(1) as worker:
        table = client.table(f"pausing-{lane}-{seed}", dim=1, optimizer=SGD)
        job = worker.submit(push_all, table)
        while not done.is_set():
            with stopped([rng.choice(cluster.servers).pid]):
                done.wait(rng.uniform(0, 0.04))
            done.wait(rng.uniform(0, 0.02))
        assert job.result(60) == 40
        assert (table.pull(KEYS) == 40).all()


def push_and_wait_again(table: shoal.Table) -> int:
    ticket = table.push_async(KEYS, -np.ones((len(KEYS), 1), np.float32))
    for _ in range(3000):
        try:
            ticket.wait(timeout=0.01)
            return 1
        except shoal.Timeout:
            continue
    return 0
