"""Training that shows which steps of whom a worker has read: each has a column, in rows and dense."""

from __future__ import annotations

import random
import time

import torch
from tests.train.history import History

import shoal.nn
from shoal.train.worker import Worker


class Columns(torch.nn.Module):
    """A column for each worker, in rows and in a dense parameter of several pieces."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.emb = shoal.nn.Embedding("columns", dim=workers, init=shoal.init.Constant(0.0))
        self.dense = torch.nn.Parameter(torch.zeros(60_000, workers))


def wait_until_others_wait(worker: Worker, count: int) -> None:
    """The straggler: until the others may not go on without it, or have made all their steps."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        state = worker.rounds.state()
        others = [rank for rank in range(worker.world_size) if rank != worker.rank]
        if all(state["phases"][rank] == "waiting" or state["clocks"][rank] >= count for rank in others):
            return
        time.sleep(0.001)
    raise AssertionError(f"the others do not come to wait: {state}")


def record(worker: Worker, history: History, count: int) -> None:
    """Steps that add 1 to this worker's column of every row and of a dense parameter; reads are recorded.

    In every second step worker 0 is as far behind as the others let it be.
    """
    rng = random.Random(worker.rank)
    model = Columns(worker.world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker.prepare(model, optimizer)
    keys = torch.arange(200)
    for step in range(count):
        assert worker.step == step
        history.start(worker.rank, step)
        optimizer.zero_grad()
        rows = model.emb(keys)
        history.read(worker.rank, step, rows.detach().numpy())
        history.read(worker.rank, step, model.dense.detach().numpy())
        if worker.rank == 0 and step % 2 == 0:
            wait_until_others_wait(worker, count)
        time.sleep(rng.choice((0.0, 0.0, 0.002, 0.008)))  # delays of the case
        (-rows[:, worker.rank].sum() - model.dense[:, worker.rank].sum()).backward()
        history.finish(worker.rank, step)
        optimizer.step()
