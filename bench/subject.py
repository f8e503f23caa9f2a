"""Shoal as a contender: real server processes, reached by the lane that is asked for."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bench.contender import LR, Keys, Rows, Spec, first_rows

_BIRTH_ROWS = 131_072


@dataclass(frozen=True)
class Shoal:
    lane: str = "auto"  # "auto", "shm", "unix" or "tcp"
    replicas: int = 0

    abilities = frozenset({"pull", "push", "dense"})
    environment: ClassVar[dict[str, str]] = {}

    @property
    def name(self) -> str:
        return f"shoal {self.lane}" + (" +copy" if self.replicas else "")

    def missing(self) -> str | None:
        return missing_shoal()

    @contextmanager
    def serve(self, spec: Spec) -> Iterator[tuple[str, str]]:
        import shoal

        with shoal.LocalCluster(servers=spec.servers, replicas=self.replicas) as cluster:
            client = cluster.connect()
            try:
                if spec.rows:
                    give_birth(open_table(client, spec), spec)
                if spec.dense_elements:
                    open_tensor(client, spec)
            finally:
                client.close()
            yield cluster.address, cluster.token

    def connect(self, address: tuple[str, str], spec: Spec, rank: int) -> "ShoalStore":
        import shoal

        return ShoalStore(shoal.connect(address[0], token=address[1], lane=self.lane), spec)


class ShoalStore:
    def __init__(self, client: Any, spec: Spec) -> None:
        self._client = client
        self._table: Any = open_table(client, spec) if spec.rows else None
        self._tensor: Any = open_tensor(client, spec) if spec.dense_elements else None

    def pull(self, keys: Keys) -> Any:
        return self._table.pull(keys)

    def push(self, keys: Keys, grads: Rows) -> None:
        self._table.push(keys, grads)

    def exchange_dense(self, grad: Rows) -> Any:
        self._tensor.push(grad)
        return self._tensor.pull()

    def close(self) -> None:
        self._client.close()


def missing_shoal() -> str | None:
    """Why Shoal cannot run, or None; a package without its compiled core counts as missing."""
    if importlib.util.find_spec("shoal") is None:
        return "shoal is not installed in this interpreter"
    try:
        import shoal

        shoal.connect, shoal.LocalCluster, shoal.optim  # noqa: B018 - are they there?
    except (ImportError, AttributeError) as error:
        return f"shoal cannot be imported: {error}"
    return None


def open_table(client: Any, spec: Spec) -> Any:
    import shoal

    optimizers = {"adagrad": "Adagrad", "adam": "Adam", "rowwise_adagrad": "RowwiseAdagrad", "sgd": "SGD"}
    optimizer = getattr(shoal.optim, optimizers[spec.optimizer])(lr=LR)
    return client.table("bench", dim=spec.dim, optimizer=optimizer, init=shoal.init.Uniform(0.01), seed=7)


def open_tensor(client: Any, spec: Spec) -> Any:
    import shoal

    zeros = np.zeros(spec.dense_elements, np.float32)
    return client.tensor("bench.dense", zeros, optimizer=shoal.optim.SGD(lr=LR))


def give_birth(table: Any, spec: Spec) -> None:
    """Births rows 0..rows-1 in scattered order, in requests small enough to leave no large buffers behind."""
    order = np.random.default_rng(5).permutation(spec.rows)
    for begin in range(0, spec.rows, _BIRTH_ROWS):
        keys = order[begin : begin + _BIRTH_ROWS]
        table.assign(keys, first_rows(keys, spec.dim))


@dataclass(frozen=True)
class ShoalEmbedded:
    """Shoal inside the worker's own process (`memory://`)."""

    optimizer: str  # "adagrad" or "rowwise_adagrad"
    threads: int

    abilities = frozenset({"pull", "push"})
    environment: ClassVar[dict[str, str]] = {}

    @property
    def name(self) -> str:
        return f"shoal memory {self.optimizer} t{self.threads}"

    def missing(self) -> str | None:
        return missing_shoal()

    @contextmanager
    def serve(self, spec: Spec) -> Iterator[None]:
        yield None

    def connect(self, address: None, spec: Spec, rank: int) -> ShoalStore:
        import shoal

        # Set before the store starts its threads, which then share these cores.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.threads])
        spec = replace(spec, optimizer=self.optimizer)
        client = shoal.connect("memory://")
        give_birth(open_table(client, spec), spec)
        return ShoalStore(client, spec)
