"""What ordinary scripts do around `prepare`: it must mean what it means in plain torch, or be refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import BadInput
from shoal.train.worker import Worker


class Sum(torch.nn.Module):
    """Two lookups whose vectors are added: autograd hands both the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = shoal.nn.Embedding("a", dim=2, init=shoal.init.Zeros())
        self.b = shoal.nn.Embedding("b", dim=2, init=shoal.init.Zeros())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.a(ids) + self.b(ids)


def train(worker: Worker, model: Any, reduction: str, max_norm: float | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(TensorDataset(torch.arange(4)), batch_size=4)
    model, optimizer, batches = worker.prepare(model, optimizer, data, reduction=reduction)
    for (ids,) in batches:
        optimizer.zero_grad()
        model(ids).sum().backward()
        if max_norm is not None:
            worker.clip_grad_norm_(model, max_norm)
        optimizer.step()
    return [module.table.pull(range(4)) for module in (model.a, model.b)]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_lookups_that_are_added_are_scaled_once_each(workers: int) -> None:
    for found in run_workers(workers, lambda worker: train(worker, Sum(), "sum")):
        for rows in found:
            assert rows.tolist() == [[-1.0, -1.0]] * 4


def test_lookups_that_are_added_are_clipped_once_each() -> None:
    (found,) = run_workers(1, lambda worker: train(worker, Sum(), "sum", max_norm=1.0))
    norm = sum(float((rows**2).sum()) for rows in found) ** 0.5
    assert norm == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_a_worker_that_got_no_batch_counts_nothing(sync: str) -> None:
    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        stream = [torch.ones(1, 1)] * 3
        model, optimizer, batches = worker.prepare(model, optimizer, iter(stream))
        for x in batches:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return float(model.weight.detach())

    assert run_workers(2, script, sync) == [-2.0, -2.0]


def test_what_is_only_read_is_no_epoch() -> None:
    def script(worker: Worker) -> list[int]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data, held_out = (DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2) for _ in range(2))
        model, optimizer, batches, held_out = worker.prepare(model, optimizer, data, held_out)
        for (x,) in held_out:
            model(x)
        made = []
        for epoch in worker.epochs(3):
            made.append(epoch)
            for (x,) in batches:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            for (x,) in held_out:
                model(x)
        return made

    assert run_workers(2, script) == [[0, 1, 2], [0, 1, 2]]


def test_models_of_two_calls_are_two_models() -> None:
    def script(worker: Worker) -> list[float]:
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        for value, model in enumerate(models):
            torch.nn.init.constant_(model.weight, value)
            worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [float(model.weight.detach()) for model in models]

    assert run_workers(2, script) == [[0.0, 1.0]] * 2


def test_an_optimizer_may_come_after_its_model_and_copies_are_models_of_their_own() -> None:
    def script(worker: Worker) -> tuple[float, float]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        worker.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.prepare(optimizer)
        twin = copy.deepcopy(model)
        other = torch.optim.SGD(twin.parameters(), lr=0.5)
        worker.prepare(twin, other)
        for one, steps in ((model, optimizer), (twin, other)):
            one(torch.ones(1, 1)).sum().backward()
            steps.step()
        return float(model.weight.detach()), float(twin.weight.detach())

    assert run_workers(1, script) == [(-1.0, -0.5)]


def test_a_parameter_group_that_comes_late_is_refused() -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD([model.weight], lr=1.0)
        worker.prepare(model, optimizer)
        optimizer.add_param_group({"params": [model.bias]})
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(BadInput, match="call add_param_group before prepare"):
        run_workers(1, script)


def test_a_frozen_table_needs_no_optimizer() -> None:
    def script(worker: Worker) -> list[float]:
        model = Sum()
        model.b.requires_grad_(False)
        optimizer = torch.optim.SGD(model.a.parameters(), lr=1.0)
        worker.prepare(model, optimizer)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        return [float(module.table.pull([1])[0, 0]) for module in (model.a, model.b)]

    assert run_workers(1, script) == [[-1.0, 0.0]]


@pytest.mark.parametrize("sync", ["bsp", "asp", "downpour:1,1", "average:2"])
def test_what_is_loaded_after_prepare_is_trained_on(sync: str) -> None:
    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.prepare(model, optimizer)
        worker.barrier()
        model.load_state_dict({"weight": torch.full((1, 1), 5.0)})
        worker.barrier()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return float(model.weight.detach())

    assert run_workers(1, script, sync) == [4.0]
