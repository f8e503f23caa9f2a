"""One suite for every lane: what a client promises holds whatever lies between it and the rows.

The lanes shm, unix and tcp lead to the same two real servers. Adding a lane is adding its name to LANES.
"""

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal

LANES = ("memory", "shm", "unix", "tcp")
SGD = shoal.optim.SGD(lr=1.0)
NAMES = itertools.count()
# Beyond what one frame holds and what may be in flight to a server.
MANY, WIDE = 200_000, 64

MakeTable = Callable[..., shoal.Table]


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def connect(lane: str, request: pytest.FixtureRequest) -> Callable[[], shoal.Client]:
    if lane == "memory":
        return lambda: shoal.connect("memory://")
    cluster = request.getfixturevalue("cluster")
    return lambda: cluster.connect(lane=lane)


@pytest.fixture(scope="module")
def client(connect: Callable[[], shoal.Client]) -> Iterator[shoal.Client]:
    with connect() as client:
        yield client


@pytest.fixture
def make(client: shoal.Client) -> MakeTable:
    """A table that nobody has used before."""

    def make_table(dim: int = 3, **settings: object) -> shoal.Table:
        settings = {"optimizer": SGD, **settings}
        return client.table(f"table{next(NAMES)}", dim=dim, **settings)

    return make_table


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def rows_like(keys: np.ndarray, dim: int) -> np.ndarray:
    """A row for each key that no other key has."""
    return (keys[:, None] * 4 + np.arange(dim) % 4).astype(np.float32)


def test_the_lane_is_the_one_asked_for(client: shoal.Client, lane: str) -> None:
    assert set(client.stats()["lanes"]) == {lane}


def test_on_one_host_shared_memory_is_chosen(cluster: shoal.LocalCluster) -> None:
    with cluster.connect() as client:
        client.table("auto", dim=1, optimizer=SGD).pull(range(1000))
        assert client.stats()["lanes"] == ["shm", "shm"]


def test_a_server_whose_unix_socket_cannot_be_reached_is_spoken_to_by_tcp() -> None:
    with shoal.LocalCluster(servers=2) as cluster:
        (cluster.directory / f"{cluster.servers[1].pid}.sock").unlink()
        with cluster.connect() as client:
            client.table("auto", dim=1, optimizer=SGD).pull(range(1000))
            assert client.stats()["lanes"] == ["shm", "tcp"]


def test_an_absent_key_reads_as_its_first_value_and_is_not_stored(make: MakeTable) -> None:
    table = make(init=shoal.init.Uniform(0.5), seed=3)
    keys = np.arange(-500, 500)
    rows = table.pull(keys)
    assert np.array_equal(rows, table.pull(keys))
    assert len(np.unique(rows)) > 2000
    assert len(table) == 0


def test_first_values_are_the_same_on_every_lane(client: shoal.Client) -> None:
    settings = {"dim": 5, "optimizer": SGD, "init": shoal.init.Normal(std=1.0), "seed": 11}
    with shoal.connect("memory://") as other:
        expected = other.table("first values", **settings).pull(range(200))
    assert np.array_equal(client.table("first values", **settings).pull(range(200)), expected)


@pytest.mark.parametrize("dim", [1, 3, 64, 4096])
def test_what_is_pushed_is_pulled(make: MakeTable, dim: int) -> None:
    table = make(dim)
    keys = np.random.default_rng(dim).permutation(1000 if dim < 1000 else 200) - 100
    rows = rows_like(keys, dim)
    table.push(keys, -rows)
    assert np.array_equal(table.pull(keys), rows)
    assert np.array_equal(table.pull(keys[::-1]), rows[::-1])
    assert len(table) == len(keys)


def test_rows_are_born_with_their_first_value_before_the_step(make: MakeTable) -> None:
    table = make(init=shoal.init.Constant(7.0))
    table.push([1, 2], ones(2, 3))
    assert table.pull([1, 3]).tolist() == [[6, 6, 6], [7, 7, 7]]


def test_duplicates_are_summed_before_the_step(make: MakeTable) -> None:
    table = make(2, optimizer=shoal.optim.Adagrad(lr=1.0))
    table.push([5] * 1000 + [6], ones(1001, 2))
    assert np.allclose(table.pull([5, 6]), -1.0)  # one step each: lr * g / |g|


def test_duplicates_of_a_pull_are_equal(make: MakeTable) -> None:
    table = make()
    table.push([1, 2], rows_like(np.array([-1, -2]), 3))
    assert np.array_equal(table.pull([2, 1, 2, 2]), table.pull([1, 2])[[1, 0, 1, 1]])


def test_of_assigned_duplicates_the_last_stays(make: MakeTable) -> None:
    table = make(1)
    table.assign([1, 2, 1], np.array([[1], [2], [3]], np.float32))
    assert table.pull([1, 2]).tolist() == [[3], [2]]


def test_assign_keeps_the_state_of_the_optimizer(make: MakeTable) -> None:
    table = make(1, optimizer=shoal.optim.Adagrad(lr=1.0))
    table.push([1], ones(1, 1))
    table.assign([1], 10 * ones(1, 1))
    table.push([1], ones(1, 1))
    assert table.pull([1])[0, 0] == pytest.approx(10 - 1 / np.sqrt(2))


def test_lr_comes_with_a_push(make: MakeTable) -> None:
    table = make(1)
    table.push([1], ones(1, 1), lr=0.25)
    table.push([1], ones(1, 1), lr=0.0)
    table.push([1], ones(1, 1))
    assert table.pull([1]).tolist() == [[-1.25]]


def test_an_empty_batch_is_nothing(make: MakeTable) -> None:
    table = make()
    assert table.pull([]).shape == (0, 3)
    table.push([], ones(0, 3))
    table.assign([], ones(0, 3))
    assert table.pull(np.empty((4, 0), np.int64)).shape == (4, 0, 3)
    assert table.pull_async([]).wait(5).shape == (0, 3)
    assert len(table) == 0


def test_large_batches(make: MakeTable) -> None:
    table = make(WIDE)
    keys = np.random.default_rng(1).permutation(MANY)
    rows = rows_like(keys % 1000, WIDE)
    table.push(keys, -rows)
    assert np.array_equal(table.pull(keys), rows)
    table.push(np.concatenate([keys, keys]), -np.concatenate([rows, rows]))
    assert np.array_equal(table.pull(keys), 3 * rows)
    assert len(table) == MANY


def test_several_large_batches_at_once(make: MakeTable) -> None:
    table = make(WIDE)
    keys = np.arange(50_000)
    pushes = [table.push_async(keys, -ones(len(keys), WIDE)) for _ in range(5)]
    for ticket in pushes:
        ticket.wait()
    pulls = [table.pull_async(keys) for _ in range(5)]
    assert all((ticket.wait() == 5).all() for ticket in pulls)


def test_more_pushes_than_may_be_open(make: MakeTable) -> None:
    table = make(1)
    tickets = [table.push_async([1], -ones(1, 1)) for _ in range(600)]
    for ticket in tickets:
        ticket.wait()
    assert table.pull([1]).tolist() == [[600]]


def test_a_ticket_that_nobody_waits_for_ends_by_itself(make: MakeTable) -> None:
    table = make()
    table.push([1], -ones(1, 3))
    ticket = table.pull_async([1])
    end = time.monotonic() + 20
    while not ticket.done() and time.monotonic() < end:
        pass
    assert ticket.done()
    assert ticket.wait().tolist() == [[1, 1, 1]]
    assert ticket.wait().tolist() == [[1, 1, 1]]


def test_a_ticket_that_is_dropped_is_still_carried_out(make: MakeTable) -> None:
    table = make()
    table.push_async([1], -ones(1, 3))
    end = time.monotonic() + 20
    while len(table) == 0 and time.monotonic() < end:
        pass
    assert table.pull([1]).tolist() == [[1, 1, 1]]


def test_out_is_filled_and_returned(make: MakeTable) -> None:
    table = make()
    keys = np.arange(10_000).reshape(100, 100)
    table.push(keys, -ones(100, 100, 3))
    out = np.full((100, 100, 3), np.nan, np.float32)
    assert table.pull(keys, out=out) is out
    assert (out == 1).all()
    into = np.full((100, 100, 3), np.nan, np.float32)
    assert table.pull_async(keys, out=into).wait() is into
    assert (into == 1).all()


def test_arrays_may_be_reused_once_a_push_was_begun(make: MakeTable) -> None:
    table = make(WIDE)
    keys, grads = np.arange(20_000), -ones(20_000, WIDE)
    ticket = table.push_async(keys, grads)
    keys[:], grads[:] = -1, np.nan
    ticket.wait()
    assert (table.pull(np.arange(20_000)) == 1).all()


def test_keys_of_every_kind_name_the_same_rows(make: MakeTable) -> None:
    table = make(1)
    table.push(np.array([-1, 5, -(2**63), 2**63 - 1]), rows_like(np.array([-1, -2, -3, -4]), 1))
    assert table.pull(np.array([-1, 5], np.int32)).tolist() == [[4], [8]]
    assert table.pull(np.array([2**64 - 1, 2**63], np.uint64)).tolist() == [[4], [12]]
    assert table.pull(torch.tensor([2**63 - 1])).tolist() == [[16]]


def test_torch_in_is_torch_out(make: MakeTable) -> None:
    table = make()
    keys = torch.arange(300).reshape(3, 100)
    table.push(keys, -torch.ones(3, 100, 3))
    rows = table.pull(keys)
    assert isinstance(rows, torch.Tensor)
    assert torch.equal(rows, torch.ones(3, 100, 3))
    out = torch.zeros(3, 100, 3)
    assert table.pull(keys, out=out) is out
    assert torch.equal(out, rows)


@pytest.mark.parametrize("dim", [1, 3, 16, 65])
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
def test_values_on_the_wire_are_within_their_bounds(client: shoal.Client, wire: str, dim: int) -> None:
    name = f"table{next(NAMES)}"
    exact = client.table(name, dim=dim, optimizer=SGD)
    table = client.table(name, wire=wire)
    rng = np.random.default_rng(dim)
    keys = rng.permutation(997)
    rows = (rng.normal(size=(997, dim)) * 10.0 ** rng.integers(-3, 3, (997, 1))).astype(np.float32)
    relative = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.0}[wire] * np.abs(rows)
    widest = np.abs(rows).max(1, keepdims=True)
    bound = relative + {"fp16": 2.0**-25, "int8": 0.501 / 127 * widest}.get(wire, 0.0)
    exact.assign(keys, rows)
    assert (np.abs(table.pull(keys) - rows) <= bound).all()
    exact.assign(keys, 0 * rows)
    table.push(keys, -rows)
    assert (np.abs(exact.pull(keys) - rows) <= bound + 1e-6 * widest).all()


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("size", [1, 3, 65_536, 65_537, 300_001])
def test_tensors_of_any_size_on_any_wire(client: shoal.Client, size: int, wire: str) -> None:
    value = np.zeros(size, np.float32)
    tensor = client.tensor(f"tensor{next(NAMES)}", value, optimizer=SGD, wire=wire)
    tensor.push(-ones(size))
    tensor.push(-ones(size), lr=2.0)
    assert np.allclose(tensor.pull(), 3, rtol=0.01)
    tensor.assign(5 * ones(size))
    assert np.allclose(tensor.pull(out=value), 5, rtol=0.01)


def test_the_first_value_of_a_tensor_stays(client: shoal.Client) -> None:
    name, value = f"tensor{next(NAMES)}", np.arange(200_000, dtype=np.float32).reshape(2, -1)
    client.tensor(name, value, optimizer=SGD)
    assert np.array_equal(client.tensor(name, -value).pull(), value)
    assert client.tensor(name, torch.zeros(2, 100_000)).pull().shape == (2, 100_000)


@pytest.mark.parametrize("batch_rows", [1000, 65_536])
def test_a_scan_gives_every_row_once(make: MakeTable, batch_rows: int) -> None:
    table = make()
    keys = np.random.default_rng(2).permutation(30_000) - 15_000
    table.push(keys, -rows_like(keys, 3))
    batches = list(table.scan(batch_rows))
    scanned, values = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert all(len(batch) <= batch_rows for batch, _ in batches)
    assert np.array_equal(np.sort(scanned), np.sort(keys))
    assert np.array_equal(values, rows_like(scanned, 3))
    assert len(table) == len(keys)


def test_a_scan_of_wide_rows(make: MakeTable) -> None:
    table = make(4096)
    keys = np.arange(3000)
    table.push(keys, -rows_like(keys, 4096))
    scanned = {int(key): row for keys, values in table.scan() for key, row in zip(keys, values, strict=True)}
    assert sorted(scanned) == keys.tolist()
    assert np.array_equal(scanned[1234], rows_like(np.array([1234]), 4096)[0])


def test_keys_by_range(make: MakeTable) -> None:
    table = make(placement=shoal.Range(0, 6400))
    keys = np.array([-(2**63), -1, 0, 99, 100, 6399, 6400, 2**63 - 1])
    table.push(keys, -rows_like(np.arange(8), 3))
    assert np.array_equal(table.pull(keys), rows_like(np.arange(8), 3))
    assert {int(key) for batch, _ in table.scan() for key in batch} == set(keys.tolist())


def test_many_tables(client: shoal.Client) -> None:
    tables = [client.table(f"table{next(NAMES)}", dim=1 + i % 5, optimizer=SGD) for i in range(100)]
    tickets = [t.push_async([1, 2], -(i + 1) * ones(2, t.dim)) for i, t in enumerate(tables)]
    for ticket in tickets:
        ticket.wait()
    assert all((table.pull([1, 2]) == i + 1).all() for i, table in enumerate(tables))


def test_threads_share_a_client(make: MakeTable) -> None:
    table = make()

    def work() -> None:
        for _ in range(50):
            table.push(np.arange(100), -ones(100, 3))
            assert (table.pull([1, 2, 3]) >= 1).all()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (table.pull(np.arange(100)) == 300).all()


def test_other_threads_run_during_a_call(make: MakeTable) -> None:
    table = make(WIDE)
    keys, grads = np.arange(MANY), ones(MANY, WIDE)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.0005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    inside = 0
    for _ in range(5):
        began = time.perf_counter()
        table.push(keys, grads)
        quarter = (time.perf_counter() - began) / 4
        inside += sum(began + quarter < at < began + 3 * quarter for at in ticks)
    stop.set()
    thread.join()
    assert inside > 0


def test_pulled_rows_stay_as_they_are(connect: Callable[[], shoal.Client]) -> None:
    with connect() as client:
        table = client.table(f"table{next(NAMES)}", dim=WIDE, optimizer=SGD)
        keys = np.arange(2000)
        table.push(keys, -ones(2000, WIDE))
        rows = [table.pull(keys) for _ in range(3)]
        table.push(keys, -ones(2000, WIDE))
        later = [table.pull(keys) for _ in range(20)]
        rows[0][:] = 9  # the caller's own
        assert (table.pull(keys) == 2).all()
    del client, table
    gc.collect()
    assert (rows[0] == 9).all()
    assert (rows[1] == 1).all()
    assert (rows[2] == 1).all()
    assert all((batch == 2).all() for batch in later)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_nobody_uses_the_cpu_while_idle(cluster: shoal.LocalCluster) -> None:
    clients = [cluster.connect(lane=lane) for lane in LANES[1:]] + [shoal.connect("memory://")]
    for client in clients:
        client.table("idle", dim=1, optimizer=SGD).pull_async(range(1000)).wait()
    pids = [server.pid for server in cluster.servers]
    before = sum(map(cpu_s, pids)), time.process_time()
    time.sleep(1.0)  # not for a condition: this is the time that is measured
    servers, ours = sum(map(cpu_s, pids)) - before[0], time.process_time() - before[1]
    for client in clients:
        client.close()
    assert servers <= 0.1
    assert ours <= 0.1
