"""Groups of workers that exchange dense values directly.

`TorchGroup` is `torch.distributed` (gloo on CPU, nccl on GPU) between processes; `ThreadGroup` does the same
between threads of one process, for tests and notebooks. Both give every member the same bits.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shoal.errors import BadInput, Timeout

__all__ = ["Group", "Lone", "ThreadGroup", "TorchGroup", "open_group"]


class Group(Protocol):
    """Workers `rank` of `size`. Every member must make the same calls in the same order."""

    rank: int
    size: int

    def sum_(self, values: torch.Tensor) -> None:
        """Replace `values` by the sum over all members."""
        ...

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        """Send `values` to each of `peers` and give what they sent, in their order."""
        ...

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        """Replace `values` by the root's."""
        ...


class Lone:
    """The group of a worker that is alone."""

    rank = 0
    size = 1

    def sum_(self, values: torch.Tensor) -> None:
        pass

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        return [values.clone() for _ in peers]

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        pass


class TorchGroup:
    """The default process group of `torch.distributed`, made here unless the script has made it."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        if not dist.is_initialized():
            if "MASTER_ADDR" not in os.environ:
                raise BadInput(
                    "workers that exchange gradients directly need MASTER_ADDR and MASTER_PORT in their "
                    "environment, "
                    "as `shoal run` and torchrun set them"
                )
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            timeout = datetime.timedelta(seconds=timeout_s)
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
        elif (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise BadInput(
                f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, and this is "
                f"worker {rank} "
                f"of {size}; start both from the same environment"
            )

    def sum_(self, values: torch.Tensor) -> None:
        dist.all_reduce(values)

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        incoming = [torch.empty_like(values) for _ in peers]
        pending = [dist.irecv(tensor, peer) for tensor, peer in zip(incoming, peers, strict=True)]
        pending += [dist.isend(values, peer) for peer in peers]
        for work in pending:
            if work is not None:
                work.wait()
        return incoming

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        dist.broadcast(values, root)


class _Table:
    """Where the threads of a group lay what they exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[torch.Tensor | None] = [None] * size


class ThreadGroup:
    """Members are threads of this process: `ThreadGroup.make(n, timeout_s)` gives one for each."""

    def __init__(self, rank: int, table: _Table, timeout_s: float) -> None:
        self.rank, self.size = rank, len(table.values)
        self._table = table
        self._timeout_s = timeout_s

    @staticmethod
    def make(size: int, timeout_s: float) -> list[ThreadGroup]:
        table = _Table(size)
        return [ThreadGroup(rank, table, timeout_s) for rank in range(size)]

    def _meet(self) -> None:
        try:
            self._table.barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise Timeout(
                f"worker {self.rank}: the other {self.size - 1} workers of the group did not come within "
                f"{self._timeout_s:g} s, or one of them failed"
            ) from None

    def _all(self, values: torch.Tensor) -> list[torch.Tensor]:
        self._table.values[self.rank] = values.clone()
        self._meet()
        everybody = [value for value in self._table.values if value is not None]
        self._meet()  # nobody lays down the next before all have read this one
        return everybody

    def sum_(self, values: torch.Tensor) -> None:
        everybody = self._all(values)
        total = everybody[0].clone()
        for value in everybody[1:]:
            total += value
        values.copy_(total)

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        everybody = self._all(values)
        return [everybody[peer].clone() for peer in peers]

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        values.copy_(self._all(values)[root])


def open_group(rank: int, size: int, timeout_s: float) -> Group:
    """The group of this job's worker processes."""
    return Lone() if size == 1 else TorchGroup(rank, size, timeout_s)
