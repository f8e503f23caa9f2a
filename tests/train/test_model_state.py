"""What a model holds beside what its optimizer steps here: rows, their first values, buffers."""

from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import BadInput
from shoal.train.join import local_workers
from shoal.train.worker import Worker


def load_and_step(worker: Worker, value: float, steps: int) -> float:
    """Load the row of key 7, take 1 from it in each step, and read it."""
    model = shoal.nn.Embedding("items", dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker.prepare(model, optimizer)
    model.load_state_dict({"weight.keys": torch.tensor([7]), "weight.values": torch.full((1, 1), value)})
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([7])).sum().backward()
        optimizer.step()
    return float(model.table.pull([7])[0, 0])


@pytest.mark.parametrize(("sync", "left"), [("asp", 1.0), ("bsp", 3.0), ("allreduce", 3.0)])
def test_rows_are_loaded_once_and_nobody_resets_what_was_trained_since(sync: str, left: float) -> None:
    trained = threading.Event()

    def script(worker: Worker) -> float:
        if worker.rank == 1:
            trained.wait(0.3)  # for a worker 0 that does not wait for the others
        load_and_step(worker, 5.0 + worker.rank, steps=2)
        trained.set()
        worker.barrier()
        return float(worker.client.table("items").pull([7])[0, 0])

    assert run_workers(2, script, sync) == [left] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_started_again_does_not_load_rows_again(rank: int) -> None:
    with shoal.connect("memory://") as client:
        makers = local_workers(2, "asp", client=client, wait_s=5)
        with ThreadPoolExecutor(2) as pool:
            first = [pool.submit(lambda make=make: load_and_step(make(), 5.0, steps=1)) for make in makers]
            assert min(one.result() for one in first) == 3.0
        assert load_and_step(makers[rank](), 5.0, steps=1) == 2.0


def test_a_copy_of_a_prepared_module_loads_as_one_of_nobodys() -> None:
    def script(worker: Worker) -> float:
        model = shoal.nn.Embedding("items", dim=1)
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        twin = copy.deepcopy(model)
        if worker.rank == 1:
            twin.bind(worker.client, shoal.optim.SGD(lr=1.0))
            twin.load_state_dict({"weight.keys": torch.tensor([7]), "weight.values": torch.ones(1, 1)})
        worker.barrier()
        return float(model.table.pull([7])[0, 0])

    assert run_workers(2, script) == [1.0, 1.0]


def first_values(worker: Worker, seed: int, own: int | None = None) -> list[float]:
    worker.seed = seed
    model = torch.nn.ModuleList(
        shoal.nn.Embedding("items", dim=2, init=shoal.init.Uniform(1.0), seed=one) for one in (own, None)
    )
    worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return [float(value) for value in model[1].table.pull([3])[0]]


def test_first_values_follow_the_seed_of_the_job() -> None:
    found = {seed: run_workers(2, lambda worker, seed=seed: first_values(worker, seed)) for seed in (0, 1, 2)}
    assert all(one == other for one, other in found.values())
    assert len({tuple(one) for one, _ in found.values()}) == 3
    with shoal.connect("memory://") as client:  # the default is that of the store
        table = client.table("items", dim=2, init=shoal.init.Uniform(1.0), optimizer=shoal.optim.SGD(lr=1.0))
        assert table.pull([3])[0].tolist() == found[0][0]


def test_a_module_s_own_seed_and_that_of_a_table_that_is_there_come_first() -> None:
    assert run_workers(2, lambda worker: first_values(worker, 1, own=2)) == run_workers(
        2, lambda worker: first_values(worker, 2)
    )


class Watched(torch.nn.Module):
    """A layer whose inputs are watched: the least of all, which begins at infinity, and a moving mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.register_buffer("least", torch.tensor(math.inf))
        self.register_buffer("ratio", torch.tensor([1.0, 1.0]))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.least = torch.minimum(self.least, x.min())
        self.ratio.copy_(torch.tensor([1.0, math.inf]))
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.linear(x)


def watch(worker: Worker, model: Any, epochs: int = 1) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.arange(8.0).view(8, 1)), batch_size=4)
    model, optimizer, batches = worker.prepare(model, optimizer, data)
    for _ in range(epochs):
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_buffers_are_shared_as_they_are_now(sync: str) -> None:
    found = run_workers(2, lambda worker: watch(worker, Watched(), epochs=2), sync)
    # Worker 0 has 0 and 1, then 4 and 5; twice.
    assert found == [{"least": 0.0, "ratio": [1.0, math.inf], "mean": [2.96875]}] * 2


def test_a_buffer_of_another_shape_is_refused() -> None:
    class Growing(Watched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = torch.cat([self.mean, self.mean])
            return self.linear(x)

    with pytest.raises(
        BadInput, match=r"buffer mean is torch.float32 of shape \(4,\); .* it was .* of \(1,\)"
    ):
        run_workers(2, lambda worker: watch(worker, Growing()))


def test_a_replaced_buffer_is_in_a_checkpoint(tmp_path: Path) -> None:
    def save(worker: Worker) -> dict[str, Any]:
        found = watch(worker, Watched())
        worker.save(str(tmp_path))
        return found

    def load(worker: Worker) -> dict[str, Any]:
        model = Watched()
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        worker.load(str(tmp_path))
        return {name: buffer.tolist() for name, buffer in model.named_buffers()}

    (saved,) = run_workers(1, save)
    assert saved["least"] == 0.0
    assert run_workers(1, load) == [saved]


@pytest.mark.parametrize("sync", ["bsp", "asp", "average:1", "downpour:1,1", "allreduce"])
def test_a_parameter_without_elements_trains_nothing(sync: str) -> None:
    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        model.nothing = torch.nn.Parameter(torch.empty(0, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        worker.prepare(model, optimizer)
        optimizer.zero_grad()
        (model(torch.ones(1, 1)).sum() + model.nothing.sum()).backward()
        worker.clip_grad_norm_(model, 100.0)
        optimizer.step()
        worker.barrier()
        assert model.nothing.shape == (0, 3)
        return float(model.weight.detach())

    assert run_workers(1, script, sync) == [0.5]
