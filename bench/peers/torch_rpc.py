"""torch RPC over tensorpipe: a server keeps tensors, index_select pulls, Adagrad on merged rows pushes.

The push is written with torch's own operators (unique, index_add_, index_copy_): faster than
`torch.optim.Adagrad` on a sparse gradient by a third, so it is the best way torch offers. Two transports:
what torch picks on one host (shared memory and uv), and uv (tcp) alone.
"""

import importlib.util
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.contender import LR, Keys, Rows, Spec, first_rows
from bench.processes import Child

_THREADS = 4  # More only get into each other's way on two cores.
_SERVER_THREADS = 2


@dataclass(frozen=True)
class TorchRpc:
    transport: str  # "default" (shm + uv) or "uv"
    # An environment variable of glibc that few know: malloc asks for huge pages, which saves most page faults
    # of fresh 54 MB results. Shown for honesty; the required factors are against torch as it comes.
    huge_pages: bool = False

    abilities = frozenset({"pull", "push", "dense"})

    @property
    def name(self) -> str:
        return f"torch rpc {self.transport}" + (" +hugepages" if self.huge_pages else "")

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("torch") else "torch is not installed"

    @property
    def environment(self) -> dict[str, str]:
        return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if self.huge_pages else {}

    @contextmanager
    def serve(self, spec: Spec) -> Iterator[int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        # A server's constructor returns only when all ranks have joined, so it is started, not awaited.
        names = [f"{self.name} server {i}" for i in range(spec.servers)]
        running: list[Child] = []
        try:
            for rank, name in enumerate(names):
                running.append(Child(name, _Server, self, port, spec, rank, environment=self.environment))
            yield port
        finally:
            for child in running:
                child.ask_to_stop()
            for child in running:
                child.stop()

    def connect(self, address: int, spec: Spec, rank: int) -> "_Store":
        _join(self, address, spec, rank + spec.servers)
        return _Store(spec)


def _join(contender: TorchRpc, port: int, spec: Spec, rank: int) -> None:
    import torch.distributed.rpc as rpc

    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    transports = {} if contender.transport == "default" else {"_transports": [contender.transport]}
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS, init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60, **transports
    )
    rpc.init_rpc(
        f"rank{rank}", rank=rank, world_size=spec.servers + spec.workers, rpc_backend_options=options
    )


class _Shard:
    """What one server holds: keys `k` with k % servers == rank, at row k // servers."""

    def __init__(self, spec: Spec, rank: int) -> None:
        import torch

        keys = np.arange(rank, spec.rows, spec.servers)
        self.torch = torch
        self.lock = threading.Lock()
        self.rows = torch.from_numpy(first_rows(keys, spec.dim))
        self.sums = torch.zeros_like(self.rows) if spec.rows else None
        self.weight = torch.zeros(spec.dense_elements)


# A function that RPC calls finds its data through its own module; the other way, an RRef as an argument,
# costs more with every call.
_shard: _Shard | None = None


class _Server:
    def __init__(self, contender: TorchRpc, port: int, spec: Spec, rank: int) -> None:
        import torch

        global _shard
        torch.set_num_threads(_SERVER_THREADS)
        _shard = _Shard(spec, rank)
        _join(contender, port, spec, rank)

    def close(self) -> None:
        import torch.distributed.rpc as rpc

        rpc.shutdown(graceful=False)


def _pull(keys: Any) -> Any:
    assert _shard is not None
    return _shard.rows.index_select(0, keys)


def _push(keys: Any, grads: Any) -> None:
    assert _shard is not None
    torch, rows, sums = _shard.torch, _shard.rows, _shard.sums
    unique, inverse = torch.unique(keys, return_inverse=True)
    merged = torch.zeros(unique.numel(), rows.shape[1]).index_add_(0, inverse, grads)
    with _shard.lock:
        sum_now = sums.index_select(0, unique).addcmul_(merged, merged)
        sums.index_copy_(0, unique, sum_now)
        rows.index_add_(0, unique, merged.div_(sum_now.sqrt_().add_(1e-10)), alpha=-LR)


def _exchange(grad: Any) -> Any:
    assert _shard is not None
    with _shard.lock:
        return _shard.weight.add_(grad, alpha=-LR)


def _train_exchange(keys: Any, grads: Any, dense_grad: Any) -> Any:
    _push(keys, grads)
    return _exchange(dense_grad)


def train_exchange(keys: Any, grads: Any, dense_grad: Any) -> Any:
    """All of a step's gradients up, the dense parameters down, in one call to the only server."""
    import torch.distributed.rpc as rpc

    return rpc.rpc_sync("rank0", _train_exchange, args=(keys, grads, dense_grad))


class _Store:
    def __init__(self, spec: Spec) -> None:
        import torch
        import torch.distributed.rpc as rpc

        self._torch, self._rpc, self._servers, self._dim = torch, rpc, spec.servers, spec.dim

    def pull(self, keys: Keys) -> Any:
        ids = self._torch.from_numpy(keys)
        if self._servers == 1:
            return self._rpc.rpc_sync("rank0", _pull, args=(ids,))
        parts = self._split(ids)
        futures = [
            self._rpc.rpc_async(f"rank{i}", _pull, args=(local,)) for i, (_, local) in enumerate(parts)
        ]
        rows = self._torch.empty(keys.size, self._dim)
        for (places, _), future in zip(parts, futures, strict=True):
            rows.index_copy_(0, places, future.wait())
        return rows

    def push(self, keys: Keys, grads: Rows) -> None:
        ids, values = self._torch.from_numpy(keys), self._torch.from_numpy(grads)
        if self._servers == 1:
            self._rpc.rpc_sync("rank0", _push, args=(ids, values))
            return
        futures = [
            self._rpc.rpc_async(f"rank{i}", _push, args=(local, values.index_select(0, places)))
            for i, (places, local) in enumerate(self._split(ids))
        ]
        self._torch.futures.wait_all(futures)

    def _split(self, ids: Any) -> list[tuple[Any, Any]]:
        owner = ids % self._servers
        places = [(owner == i).nonzero().squeeze(1) for i in range(self._servers)]
        return [(place, ids.index_select(0, place) // self._servers) for place in places]

    def exchange_dense(self, grad: Rows) -> Any:
        return self._rpc.rpc_sync("rank0", _exchange, args=(self._torch.from_numpy(grad),))

    def close(self) -> None:
        self._rpc.shutdown(graceful=False)
