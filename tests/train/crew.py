"""Runs workers as threads of this process and gives what they returned, or all of them in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.checkpoint.client import load
from shoal.store.client import Client
from shoal.store.connect import connect
from shoal.train.join import local_workers
from shoal.train.worker import Worker

JOIN_S = 15.0
torch.set_num_threads(1)  # workers are threads themselves
# The first optimizer of a process takes seconds to import what it needs: not within somebody's deadline.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()


def run_workers(
    count: int,
    script: Callable[[Worker], Any],
    sync: Any = "bsp",
    *,
    batch: str = "split",
    wait_s: float = JOIN_S,
    resume: str | None = None,
    beside: Callable[[Client], Any] = lambda client: None,
) -> list[Any]:
    """`script(worker)` in each of `count` threads; the first exception of any is raised here.

    They go on from the checkpoint `resume`; `beside(client)` is called while they run.
    """
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    with connect("memory://", timeout=JOIN_S) as client:
        if resume is not None:
            load(client, resume, JOIN_S, resume=True)
        makers = local_workers(count, sync, batch=batch, client=client, wait_s=wait_s)

        def run(rank: int) -> None:
            try:
                with makers[rank]() as worker:
                    results[rank] = script(worker)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        beside(client)
        for thread in threads:
            thread.join(JOIN_S)
        assert not any(thread.is_alive() for thread in threads) or errors, "a worker hangs"
    if errors:
        raise errors[0]
    return results


class Notes:
    """The table by which workers compare what they do: for tests that count all other requests."""

    def __init__(self, worker: Worker) -> None:
        self.pulls = self.pushes = 0
        if worker.board is not None:
            self._table, worker.board._table = worker.board._table, self  # type: ignore[assignment]

    def pull(self, keys: Any) -> Any:
        self.pulls += 1
        return self._table.pull(keys)

    def assign(self, keys: Any, rows: Any) -> None:
        self.pushes += 1
        self._table.assign(keys, rows)


@contextmanager
def several(count: int, sync: Any) -> Iterator[list[Worker]]:
    """Workers that this thread steps in turn: for words under which nobody waits for anybody."""
    with connect("memory://", timeout=JOIN_S) as client:
        workers = [make() for make in local_workers(count, sync, client=client)]
        yield workers
        for worker in workers:
            worker.close()
