"""What the exactness tests share: a client through proxies, and counters in rows.

SGD(lr=1) on rows of zeros and gradients of -1 make every row a counter of what was applied to it.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from cutting_proxy import CuttingProxy
from numpy.typing import NDArray

import shoal
from shoal import _core
from shoal.store.control import Address, ControlClient
from shoal.store.messages import ClientGrant, JoinCluster, ServerInfo

LANES = ("tcp", "unix", "shm")
DEADLINE_S = 30.0
SHM_BYTES_MAX = 1 << 28
CUTS = 10  # by a proxy
SGD = shoal.optim.SGD(lr=1.0)


def join(cluster: shoal.LocalCluster, name: str) -> ClientGrant:
    """An identity for a client of that name, and where the servers are."""
    with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
        return control.ask(JoinCluster(name=name, wait_s=DEADLINE_S), ClientGrant, DEADLINE_S)


class CounterTable:
    """A table of counters by the core's own client, which can be told other addresses than the cluster's."""

    def __init__(
        self,
        cluster: shoal.LocalCluster,
        name: str,
        lane: str,
        dim: int,
        through: Callable[[ServerInfo], _core.ServerAddress] | None = None,
    ) -> None:
        grant = join(cluster, name)
        self.core = _core.Client.connect(
            client_id=grant.client_id,
            incarnation=grant.incarnation,
            token=cluster.token.encode(),
            placement=_core.Placement(
                version=grant.placement.version,
                weak=False,
                servers=[(through or direct)(server) for server in grant.placement.servers],
                terms=grant.placement.terms,
                chains=grant.placement.chains,
            ),
            lane=lane,
            timeout_s=DEADLINE_S,
            shm_bytes_max=SHM_BYTES_MAX,
        )
        self.spec = counter_spec(dim)
        self.core.declare(self.spec, DEADLINE_S)

    def add(self, keys: NDArray[np.int64], column: int) -> None:
        """Count one more in that column of each key; returns when acknowledged."""
        grads = np.zeros((len(keys), self.spec.dim), np.float32)
        grads[:, column] = -1.0
        self.core.push(self.spec.id, keys, grads, lr=math.nan, timeout_s=DEADLINE_S).wait(DEADLINE_S)

    def read(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        rows = self.core.pull(self.spec.id, keys, timeout_s=DEADLINE_S).wait(DEADLINE_S)
        assert rows is not None
        return rows

    def close(self) -> None:
        self.core.close()


def direct(server: ServerInfo) -> _core.ServerAddress:
    return _core.ServerAddress(server.index, server.host, server.port, server.unix_path)


def counter_spec(dim: int) -> _core.TableSpec:
    """Each width is a table of its own, beyond the ids that the coordinator gives out."""
    spec = _core.TableSpec()
    spec.id, spec.name, spec.dim = 1_000_000 + dim, f"counters-{dim}", dim
    spec.optimizer = _core.OptimizerSpec("sgd")
    spec.optimizer.lr = 1.0
    spec.init = _core.InitSpec("zeros")
    return spec


def through(proxies: list[CuttingProxy]) -> Callable[[ServerInfo], _core.ServerAddress]:
    """The address of the proxy that stands before a server."""

    def address(server: ServerInfo) -> _core.ServerAddress:
        at = proxies[server.index].address
        if isinstance(at, str):
            return _core.ServerAddress(server.index, server.host, server.port, at)
        return _core.ServerAddress(server.index, *at)

    return address


def proxies_before(cluster: shoal.LocalCluster, lane: str, seed: int) -> list[CuttingProxy]:
    proxies = []
    for server in join(cluster, "proxy").placement.servers:
        target = (server.host, server.port) if lane == "tcp" else server.unix_path
        path = None if lane == "tcp" else str(cluster.directory / f"{lane}-{seed}-{server.index}")
        proxies.append(CuttingProxy(target, seed=seed * 2 + server.index, cuts=CUTS, path=path))
    return proxies


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """These processes stand still within the block."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        # The signal takes each thread at its own time; one on another core may still answer a request.
        end = time.monotonic() + DEADLINE_S
        while not all(stands_still(pid) for pid in pids):
            assert time.monotonic() < end
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def stands_still(pid: int) -> bool:
    """Whether every thread of the process is stopped."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for task in tasks)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block must not take longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds
