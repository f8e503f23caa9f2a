"""The seam between workloads and the systems they measure.

A workload knows only these types; a system under test (Shoal or a peer) is one file that implements
them. `serve` runs in the benchmark's own process and yields an address; `connect` runs in a worker's
process and yields the store that the timed loops call. So every system is timed by the same loops.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]

LR = 0.05


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the servers hold. Row `k` starts as `first_rows([k])`; a dense tensor starts as zeros."""

    rows: int = 0
    dim: int = 64
    optimizer: str = "adagrad"  # "adagrad", "adam", "rowwise_adagrad" or "sgd"
    dense_elements: int = 0
    servers: int = 1
    workers: int = 1


class Store(Protocol):
    """A worker's connection. A result may be memory that the next call reuses."""

    def pull(self, keys: Keys) -> Any: ...
    def push(self, keys: Keys, grads: Rows) -> None: ...
    def exchange_dense(self, grad: Rows) -> Any: ...
    def close(self) -> None: ...


class Contender(Protocol):
    """A system under test; picklable, since workers are spawned with it."""

    @property
    def name(self) -> str: ...

    # Which of "pull", "push", "dense" the system can do at all.
    @property
    def abilities(self) -> frozenset[str]: ...

    # Why it cannot run here, or None.
    def missing(self) -> str | None: ...

    # What its processes find in their environment besides the benchmark's own.
    @property
    def environment(self) -> dict[str, str]: ...

    def serve(self, spec: Spec) -> AbstractContextManager[Any]: ...
    def connect(self, address: Any, spec: Spec, rank: int) -> Store: ...


def first_rows(keys: Keys, dim: int) -> Rows:
    """Initial rows, the same in every system, so that what arrives can be checked."""
    column = ((keys % 1021).astype(np.float32) / 1021).reshape(-1, 1)
    return column.repeat(dim, axis=1)


def request_ids(rows: int, count: int, seed: int) -> Keys:
    """Skewed ids with duplicates: floor(R * u**3), 72 % of them unique in a request of S1."""
    return np.floor(rows * np.random.default_rng(seed).random(count) ** 3).astype(np.int64)
