"""Bad input: each kind gets an error that names the thing, what was seen and what is allowed, and leaves
the store as it was. Embedded and over sockets alike, since the checks stand before the first byte leaves."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from shoal.errors import BadInput, Closed, Mismatch, ShoalError, Timeout, Unavailable, UnknownTable

pytestmark = pytest.mark.process
SGD = shoal.optim.SGD(lr=1.0)
LANES = ("memory", "shm", "unix", "tcp")
KEYS = np.array([3, 1, 2])


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=LANES)
def client(request: pytest.FixtureRequest, cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    lane = request.param
    with shoal.connect("memory://") if lane == "memory" else cluster.connect(lane=lane) as client:
        yield client


@pytest.fixture
def unchanged(client: shoal.Client, request: pytest.FixtureRequest) -> Iterator[shoal.Table]:
    """A table of dim 4 with three rows, which must be the same, and the only ones, at the end."""
    table = client.table(request.node.name, dim=4, optimizer=SGD)
    table.push(KEYS, -ones(3, 4))
    yield table
    assert (table.pull(KEYS) == 1).all()
    assert len(table) == 3


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def bad(value: float, row: int = 1, rows: int = 3) -> np.ndarray:
    """Gradients of ones, with `value` in one of their rows."""
    grads = ones(rows, 4)
    grads[row, 2] = value
    return grads


def refused(call: Callable[[], object], *said: str) -> None:
    """`call` is bad input, and the message has all of that in it."""
    with pytest.raises(BadInput) as caught:
        call()
    for part in said:
        assert part in str(caught.value)


def test_a_wrong_dim(unchanged: shoal.Table) -> None:
    name = f"table '{unchanged.name}'"
    refused(lambda: unchanged.push(KEYS, ones(3, 5)), name, "grads have shape (3, 5)", "expected (3, 4)")
    refused(lambda: unchanged.assign(KEYS, ones(3, 5)), name, "values have shape (3, 5)", "expected (3, 4)")
    refused(lambda: unchanged.pull(KEYS, out=ones(3, 5)), name, "(3, 5)", "(3, 4)")


def test_lengths_that_differ(unchanged: shoal.Table) -> None:
    refused(lambda: unchanged.push(KEYS, ones(2, 4)), "grads have shape (2, 4)", "expected (3, 4)")
    refused(lambda: unchanged.push([], ones(1, 4)), "grads have shape (1, 4)", "expected (0, 4)")
    refused(lambda: unchanged.assign([7], ones(0, 4)), "values have shape (0, 4)", "expected (1, 4)")


def test_a_wrong_shape(unchanged: shoal.Table) -> None:
    refused(lambda: unchanged.push(KEYS, ones(12)), "grads have shape (12,)", "expected (3, 4)")
    refused(lambda: unchanged.push(KEYS.reshape(3, 1), ones(3, 4)), "(3, 4)", "expected (3, 1, 4)")
    refused(lambda: unchanged.push([[1, 2], [3]], ones(3, 4)), "keys cannot be made an array")


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "bool", "complex64"])
def test_a_wrong_dtype_of_gradients(unchanged: shoal.Table, dtype: str) -> None:
    refused(lambda: unchanged.push(KEYS, np.ones((3, 4), dtype)), f"grads are {dtype}", "allowed: float32")
    refused(lambda: unchanged.assign(KEYS, np.ones((3, 4), dtype)), f"are {dtype}", "allowed: float32")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int16", "uint8"])
def test_a_wrong_dtype_of_keys(unchanged: shoal.Table, dtype: str) -> None:
    keys = KEYS.astype(dtype)
    refused(lambda: unchanged.push(keys, ones(3, 4)), f"keys are {dtype}", "int64, int32, uint64")
    refused(lambda: unchanged.pull(keys), f"keys are {dtype}", "int64, int32, uint64")


def test_what_is_no_array(unchanged: shoal.Table) -> None:
    refused(lambda: unchanged.push(KEYS, "grads"), "grads are a str")
    refused(lambda: unchanged.push({1, 2}, ones(2, 4)), "keys are a set")
    refused(lambda: unchanged.pull(None), "keys are a NoneType")
    refused(lambda: unchanged.push(torch.ones(3), torch.ones(3, 4)), "keys are float32")


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_a_gradient_that_is_not_finite_is_named(unchanged: shoal.Table, value: float, shown: str) -> None:
    said = ("1 of 3 rows", "key 1", shown, "finite", unchanged.name)
    refused(lambda: unchanged.push(KEYS, bad(value)), *said)
    refused(lambda: unchanged.push_async(KEYS, bad(value)), *said)
    refused(lambda: unchanged.assign(KEYS, bad(value)), *said)


def test_gradients_that_are_not_finite_are_counted(unchanged: shoal.Table) -> None:
    grads = ones(50_000, 4)
    grads[[100, 4000, 49_999]] = np.nan
    refused(lambda: unchanged.push(np.arange(50_000), grads), "3 of 50000 rows", "key 100 ")


def test_a_sum_of_duplicates_that_overflows(unchanged: shoal.Table) -> None:
    grads = bad(3e38)
    keys = np.array([1, 2, 1])
    grads[0, 2] = grads[2, 2] = 3e38
    refused(lambda: unchanged.push(keys, grads), "duplicates summed", "key 1", "inf")


def test_a_sum_that_cancels_is_fine(client: shoal.Client, request: pytest.FixtureRequest) -> None:
    table = client.table(request.node.name, dim=1, optimizer=SGD)
    table.push([1, 1, 1], np.array([[3e38], [-3e38], [-1]], np.float32))
    assert table.pull([1]).tolist() == [[1]]


@pytest.mark.parametrize(("wire", "value"), [("fp16", 65_520.0), ("fp16", -1e6), ("bf16", 3.4e38)])
def test_a_value_too_large_for_the_wire(unchanged: shoal.Table, client: shoal.Client, wire, value) -> None:
    table = client.table(unchanged.name, wire=wire)
    refused(lambda: table.push(KEYS, bad(value)), "1 of 3 rows", "key 1", "too large for this wire format")


def test_a_sum_too_large_for_the_wire(unchanged: shoal.Table, client: shoal.Client) -> None:
    table = client.table(unchanged.name, wire="fp16")
    refused(lambda: table.push([1, 2, 1], 40_000 * ones(3, 4)), "duplicates summed", "key 1", "too large")


@pytest.mark.parametrize("lr", [-0.1, np.nan, np.inf, "fast", True])
def test_an_lr_that_is_none(unchanged: shoal.Table, lr: object) -> None:
    refused(lambda: unchanged.push(KEYS, ones(3, 4), lr=lr), f"lr is {lr!r}", "finite number, at least 0")


def test_an_optimizer_with_a_negative_lr() -> None:
    refused(lambda: shoal.optim.SGD(lr=-1.0), "SGD", "lr is -1.0", "at least 0")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dim": 5}, ("dim is 4", "5")),
        ({"optimizer": shoal.optim.Adagrad(lr=1.0)}, ("SGD", "Adagrad")),
        ({"init": shoal.init.Uniform(0.5)}, ("Zeros", "Uniform")),
        ({"seed": 9}, ("seed is 0", "9")),
        ({"placement": shoal.Range(0, 10)}, ("placement is", "Range(low=0, high=10)")),
    ],
)
def test_other_settings_are_shown_beside_those_that_are(unchanged, client, settings, said) -> None:
    with pytest.raises(Mismatch) as caught:
        client.table(unchanged.name, **settings)
    for part in (unchanged.name, *said):
        assert part in str(caught.value)


@pytest.mark.parametrize("dim", [0, -1, 4097])
def test_a_dim_that_cannot_be(client: shoal.Client, dim: int) -> None:
    refused(lambda: client.table("impossible", dim=dim, optimizer=SGD), str(dim), "1", "4096")
    with pytest.raises(UnknownTable):
        client.table("impossible")


def test_an_unknown_table_is_named_with_those_that_exist(client: shoal.Client) -> None:
    client.table("known", dim=1, optimizer=SGD)
    with pytest.raises(UnknownTable, match=r"'knwon'.*'known'"):
        client.table("knwon")


def test_a_tensor_of_another_shape_or_value(client: shoal.Client, request: pytest.FixtureRequest) -> None:
    tensor = client.tensor(request.node.name, ones(2, 3), optimizer=SGD)
    refused(lambda: tensor.push(ones(3, 2)), "grad has shape (3, 2)", "expected (2, 3)")
    refused(lambda: tensor.push(np.full((2, 3), np.nan, np.float32)), "6 of 6 elements", "element 0", "nan")
    refused(lambda: tensor.push(np.ones((2, 3))), "float64", "float32")
    refused(lambda: client.tensor(request.node.name, ones(6)), "(2, 3)", "(6,)")
    assert (tensor.pull() == 1).all()


def test_a_closed_client_says_so(cluster: shoal.LocalCluster) -> None:
    for client in (cluster.connect(), shoal.connect("memory://")):
        table = client.table("closed", dim=4, optimizer=SGD)
        tensor = client.tensor("closed tensor", ones(2), optimizer=SGD)
        client.close()
        for call in (lambda t=table: t.pull(KEYS), lambda t=table: t.push(KEYS, ones(3, 4)), tensor.pull):
            with pytest.raises(Closed, match="was closed"):
                call()
        with pytest.raises(Closed, match=client.address):
            client.table("closed")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        refused(
            lambda: shoal.LocalCluster(port=port), f"port {port} on 127.0.0.1 is in use", "choose another"
        )


def test_a_coordinator_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(Unavailable, match=f"shoal://127.0.0.1:{port}"):
        shoal.connect(f"shoal://127.0.0.1:{port}", token="x", timeout=1)
    assert time.monotonic() - began < 10


def test_a_coordinator_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(Timeout, match=f"shoal://127.0.0.1:{port}"):
            shoal.connect(f"shoal://127.0.0.1:{port}", token="x", timeout=0.3)


@pytest.mark.parametrize("lane", LANES[1:])
def test_a_server_that_is_gone_is_named_within_the_deadline(lane: str) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect(lane=lane, timeout=1) as client:
        table = client.table("t", dim=4, optimizer=SGD)
        keys = np.arange(100)
        os.kill(cluster.servers[1].pid, signal.SIGKILL)
        for call in (lambda: table.push(keys, ones(100, 4)), lambda: table.pull(keys)):
            began = time.monotonic()
            with pytest.raises(ShoalError, match=f"server 1 .*{cluster.servers[1].address}"):
                call()
            assert time.monotonic() - began < 10


def halt(pid: int) -> None:
    """Stop a process; returns when each of its threads stands."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 20
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    while any((task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for task in tasks):
        assert time.monotonic() < end


@pytest.mark.parametrize("lane", LANES[1:])
def test_a_server_that_is_silent_is_named_and_may_be_waited_for_again(lane: str) -> None:
    with shoal.LocalCluster(servers=1) as cluster, cluster.connect(lane=lane) as client:
        table = client.table("t", dim=4, optimizer=SGD)
        halt(cluster.servers[0].pid)
        try:
            with pytest.raises(
                Timeout, match=r"server 0 .*silent; it goes on .*error\.ticket\.wait"
            ) as caught:
                table.push(KEYS, -ones(3, 4), timeout=0.3)
        finally:
            os.kill(cluster.servers[0].pid, signal.SIGCONT)
        caught.value.ticket.wait(20)
        assert (table.pull(KEYS) == 1).all()


def test_a_call_without_a_ticket_may_be_repeated_after_its_deadline() -> None:
    with shoal.LocalCluster(servers=1) as cluster, cluster.connect(timeout=1) as client:
        table = client.table("t", dim=4, optimizer=SGD)
        table.push(KEYS, -ones(3, 4))
        halt(cluster.servers[0].pid)
        calls = (
            lambda: len(table),
            lambda: list(table.scan()),
            lambda: client.table("u", dim=4, optimizer=SGD),
            lambda: client.tensor("w", ones(3), optimizer=SGD),
        )
        try:
            for call in calls:
                with pytest.raises(Timeout, match=r"silent; the call may be repeated$") as caught:
                    call()
                assert caught.value.ticket is None
            began = time.monotonic()
            assert repr(table) == "<Table 't': dim=4, wire=fp32, SGD(lr=1.0)>"
            assert time.monotonic() - began < 0.3
        finally:
            os.kill(cluster.servers[0].pid, signal.SIGCONT)
        assert calls[0]() == len(calls[1]()[0][0]) == 3
        assert len(calls[2]()) == 0
        assert calls[3]().pull().tolist() == [1, 1, 1]
