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


def record(worker: Worker, history: History, count: int) -> None:
    """Steps that add 1 to this worker's column of every row and of a dense parameter; reads are recorded."""
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
        time.sleep(rng.choice((0.0, 0.0, 0.002, 0.008)) * (1 + 2 * (worker.rank == 0)))  # delays of the case
        (-rows[:, worker.rank].sum() - model.dense[:, worker.rank].sum()).backward()
        history.finish(worker.rank, step)
        optimizer.step()
