"""The store against a model of it: whatever is done, in whatever order, both hold the same bits.

Hypothesis makes the sequences. The model is a dict of NumPy rows; gradients are small whole numbers, so
that sums are exact in any order, and Adagrad's arithmetic is written down operation for operation.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from numpy.typing import NDArray

import shoal

DIMS = (1, 3, 17)
EPS = np.float32(1e-10)
LANES = ("shm", "unix", "tcp")
THREADS = 3
TABLES_MAX = 3
table_numbers = count()

int64s = st.integers(-(2**63), 2**63 - 1)
key_lists = st.lists(st.one_of(st.integers(-2, 2), st.integers(-2, 2), int64s), max_size=12)
small = st.sampled_from([-3, -2, -1, 1, 2, 3, 0])


class ModelTable:
    """The reference: rows by key, value and state together, born by the first write."""

    def __init__(self, dim: int, kind: str, lr: float, first: float) -> None:
        self.dim, self.kind, self.lr = dim, kind, np.float32(lr)
        self.first = np.full(dim, first, np.float32)
        self.rows: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    def row(self, key: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self.rows.get(key, (self.first, np.zeros(self.dim, np.float32)))

    def pull(self, keys: list[int]) -> NDArray[np.float32]:
        return np.array([self.row(key)[0] for key in keys], np.float32).reshape(-1, self.dim)

    def push(self, keys: list[int], grads: NDArray[np.float32], lr: float | None = None) -> None:
        rate = self.lr if lr is None else np.float32(lr)
        sums: dict[int, NDArray[np.float32]] = {}
        for key, grad in zip(keys, grads, strict=True):
            sums[key] = sums[key] + grad if key in sums else grad
        for key, grad in sums.items():
            value, state = self.row(key)
            if self.kind == "sgd":
                self.rows[key] = (value - rate * grad, state)
            else:
                state = state + grad * grad
                self.rows[key] = (value - rate * grad / (np.sqrt(state) + EPS), state)

    def assign(self, keys: list[int], values: NDArray[np.float32]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.rows[key] = (value.copy(), self.row(key)[1])


def matrix(rows: int, dim: int, numbers: list[int]) -> NDArray[np.float32]:
    """Small whole numbers, repeated to fill the shape."""
    return np.resize(np.array(numbers, np.float32), (rows, dim))


class StoreAgainstModel(RuleBasedStateMachine):
    """Several tables of several clients; every rule does the same to the store and to the model."""

    clients: tuple[shoal.Client, ...] = ()
    tables = Bundle("tables")
    opened = 0

    @initialize(target=tables)
    def first_tables(self) -> object:
        return multiple(self.open(3, "sgd", 0.0), self.open(17, "adagrad", 0.5))

    @precondition(lambda self: self.opened < TABLES_MAX)
    @rule(
        target=tables,
        dim=st.sampled_from(DIMS),
        kind=st.sampled_from(["sgd", "adagrad"]),
        first=st.sampled_from([0.0, 0.5]),
    )
    def open(self, dim: int, kind: str, first: float) -> tuple[str, ModelTable]:
        self.opened += 1
        name = f"model-{next(table_numbers)}"
        optimizer = shoal.optim.SGD(lr=1.0) if kind == "sgd" else shoal.optim.Adagrad(lr=0.5)
        init = shoal.init.Constant(first)
        self.clients[0].table(name, dim=dim, optimizer=optimizer, init=init)
        for client in self.clients[1:]:
            client.table(name)
        return name, ModelTable(dim, kind, 1.0 if kind == "sgd" else 0.5, first)

    @rule(
        table=tables,
        keys=key_lists,
        numbers=st.lists(small, min_size=1, max_size=40),
        lr=st.sampled_from([None, None, 0.0, 0.25]),
        who=st.integers(0, 9),
    )
    def push(
        self, table: tuple[str, ModelTable], keys: list[int], numbers: list[int], lr: float | None, who: int
    ) -> None:
        name, model = table
        grads = matrix(len(keys), model.dim, numbers)
        self.handle(name, who).push(np.array(keys, np.int64), grads, lr=lr)
        model.push(keys, grads, lr)
        self.pull(table, keys, who + 1)

    @rule(
        table=tables, keys=key_lists, numbers=st.lists(small, min_size=1, max_size=40), who=st.integers(0, 9)
    )
    def assign(self, table: tuple[str, ModelTable], keys: list[int], numbers: list[int], who: int) -> None:
        name, model = table
        values = matrix(len(keys), model.dim, numbers)
        self.handle(name, who).assign(np.array(keys, np.int64), values)
        model.assign(keys, values)
        self.pull(table, keys, who + 1)

    @rule(table=tables, batches=st.lists(key_lists, min_size=2, max_size=6), number=small)
    def push_all_at_once(self, table: tuple[str, ModelTable], batches: list[list[int]], number: int) -> None:
        """From several threads and clients, on the same rows: SGD's sums do not depend on the order."""
        name, model = table
        if model.kind != "sgd":
            return
        with ThreadPoolExecutor(THREADS) as threads:
            jobs = []
            for who, keys in enumerate(batches):
                grads = np.full((len(keys), model.dim), number, np.float32)
                jobs.append(threads.submit(self.handle(name, who).push, np.array(keys, np.int64), grads))
                model.push(keys, grads)
            for job in jobs:
                job.result(30)

    @rule(table=tables, keys=key_lists, who=st.integers(0, 9))
    def pull(self, table: tuple[str, ModelTable], keys: list[int], who: int) -> None:
        name, model = table
        assert np.array_equal(self.handle(name, who).pull(np.array(keys, np.int64)), model.pull(keys))

    @rule(table=tables, batch_rows=st.sampled_from([1, 2, 65536]), who=st.integers(0, 9))
    def scan(self, table: tuple[str, ModelTable], batch_rows: int, who: int) -> None:
        name, model = table
        seen: dict[int, list[float]] = {}
        for keys, values in self.handle(name, who).scan(batch_rows):
            assert 0 < len(keys) <= batch_rows
            assert not seen.keys() & set(keys.tolist())
            seen.update(zip(keys.tolist(), values.tolist(), strict=True))
        assert seen == {key: value.tolist() for key, (value, _) in model.rows.items()}

    @rule(table=tables)
    def count(self, table: tuple[str, ModelTable]) -> None:
        name, model = table
        assert len(self.handle(name, 0)) == len(model.rows)

    def handle(self, name: str, who: int) -> shoal.Table:
        return self.clients[who % len(self.clients)].table(name)


def run(clients: tuple[shoal.Client, ...], examples: int, steps: int) -> None:
    machine: type[StoreAgainstModel] = type("Store", (StoreAgainstModel,), {"clients": clients})
    run_machine(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=2) as cluster:
        yield cluster


def test_the_embedded_store_is_its_model() -> None:
    with shoal.connect("memory://") as client:
        run((client,), examples=100, steps=50)


@pytest.mark.process
@pytest.mark.parametrize("lane", LANES)
def test_a_cluster_is_its_model(cluster: shoal.LocalCluster, lane: str) -> None:
    with cluster.connect(lane=lane) as one, cluster.connect(lane=lane) as other:
        run((one, other), examples=20, steps=30)


@pytest.mark.soak
@pytest.mark.parametrize("lane", LANES)
def test_a_cluster_is_its_model_for_long(cluster: shoal.LocalCluster, lane: str) -> None:
    with cluster.connect(lane=lane) as one, cluster.connect(lane=lane) as other:
        run((one, other), examples=500, steps=50)
