"""Groups of workers that exchange dense values directly.

`TorchGroup` is `torch.distributed` (gloo on CPU, nccl on GPU) between processes; `ThreadGroup` does the same
between threads of one process, for tests and notebooks; `GlooGroup` is one of several that follow each other,
as members come and go. All give every member the same bits.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.errors import BadInput, Timeout

_LOOK_EVERY_S = 0.5
# Of the message that never comes, by which a group is broken.
_NEVER = 1 << 20


class Broken(RuntimeError):  # noqa: N818 - as the errors of shoal.errors
    """These members cannot make the exchange: it is to be made by those who are there."""


class Group(Protocol):
    """Workers `rank` of `size`. Every member must make the same calls in the same order."""

    rank: int
    size: int
    # Of groups whose members come and go (`shoal.train.regroup`): whether some rest while others exchange,
    # and what a worker that has come was given for the models that it prepares.
    partial: bool = False
    given: Sequence[Any] = ()
    # What its worker says: how many exchanges have changed its state; that it is within a step; that it has
    # a sum that it has not applied, so that nobody may join.
    version: int = 0
    stepping: bool = False
    summed: bool = False
    # Its worker is at the end of its script, and makes no steps with the others any more.
    staying: bool = False

    def sum_(self, values: torch.Tensor) -> None:
        """Replace `values` by the sum over all members."""
        ...

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        """Send `values` to each of `peers` and give what they sent, in their order."""
        ...

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        """Replace `values` by the root's."""
        ...

    # What only changes where members come and go.

    def meet(self) -> None:
        """Wait until all members are here."""
        return

    def ready(self) -> None:
        """A step begins: those who want to join may."""
        return

    def finished(self, step: int) -> bool:
        """Whether all whose contributions were summed have finished the step at the servers."""
        return True

    def stay(self) -> None:
        """Before this worker leaves: as long as somebody may still need what it has."""
        return

    def reform(self) -> None:
        """Go on with those who live; this worker may then have another's state."""
        raise AssertionError("a group whose members stay does not break")

    def close(self) -> None:
        """Leave it."""
        return


class Lone(Group):
    """The group of a worker that is alone."""

    rank = 0
    size = 1

    def sum_(self, values: torch.Tensor) -> None:
        pass

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        return [values.clone() for _ in peers]

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        pass


class TorchGroup(Group):
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


class _Aside:
    """A thread that waits beside the script's, for all groups in turn: who gives a group up breaks what is
    waited for in it. It is there from the first group on, since at a script's end, where a worker may still
    hand its model to another, Python starts no threads any more, nor executors.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="shoal-swap", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # it is raised to who waits
                future.set_exception(error)
            del future, call  # with the values that were sent


_aside = cache(_Aside)


class GlooGroup(Group):
    """Beside whatever the script makes of `torch.distributed`. Whatever fails raises `Broken`.

    While an exchange takes long, `look(seconds)` is called now and then, and may give it up by raising.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, look: Callable[[float], None]
    ) -> None:
        self.rank, self.size = rank, size
        self._look = look
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))
        # From here on `look` decides what is too long.
        self._gloo._set_default_timeout(datetime.timedelta(days=1))
        _aside()

    def sum_(self, values: torch.Tensor) -> None:
        self._wait(self._gloo.allreduce([values]))

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._wait(self._gloo.broadcast([values], options))

    def meet(self) -> None:
        self.sum_(torch.zeros(1))

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        incoming = [torch.empty_like(values) for _ in peers]
        self.transfer([(values, peer) for peer in peers], list(zip(incoming, peers, strict=True)))
        return incoming

    def transfer(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Send these tensors to these members, and receive those."""
        began = monotonic()
        try:
            pending = [self._gloo.recv([values], peer, 0) for values, peer in receives]
            pending += [self._gloo.send([values], peer, 0) for values, peer in sends]
            # In a thread: such a wait cannot be cut into slices, its time-out breaks the group.
            done = _aside().submit(lambda: [work.wait() for work in pending])
            while not done.done():
                with suppress(TimeoutError):
                    done.result(_LOOK_EVERY_S)
                    return
                self._look(monotonic() - began)
            done.result()
        except RuntimeError as error:
            raise Broken(str(error)) from error

    def _wait(self, work: dist.Work) -> None:
        began = monotonic()
        while True:
            try:
                work.wait(datetime.timedelta(seconds=_LOOK_EVERY_S))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise Broken(str(error)) from error
            self._look(monotonic() - began)

    def close(self) -> None:
        if self._gloo is not None:
            # Gloo has no abort, and its destructor waits for what is on its way. A receive without any time
            # breaks all connections of the group, and with them whatever waits, here and at the others.
            with suppress(RuntimeError):
                never = self._gloo.recv([torch.empty(1)], (self.rank + 1) % self.size, _NEVER)
                never.wait(datetime.timedelta(milliseconds=1))
            self._gloo = None


class _Table:
    """Where the threads of a group lay what they exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[torch.Tensor | None] = [None] * size


class ThreadGroup(Group):
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
