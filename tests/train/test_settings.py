"""Hyper-parameters that change while a job trains, and optimizers that are loaded: as in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import BadInput, Mismatch
from shoal.train.worker import Worker

KINDS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}
BATCHES = 4


def line() -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    return model


def batches() -> Any:
    x = torch.arange(16.0 * BATCHES).reshape(-1, 2).sin()
    return DataLoader(TensorDataset(x), batch_size=8)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    ((model(x) - 1) ** 2).mean().backward()
    optimizer.step()


def cycled(worker: Worker | None, kind: str) -> Any:
    """OneCycleLR moves lr and momentum (or betas) with every step."""
    model, data = line(), batches()
    optimizer = KINDS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * BATCHES + 1)
    if worker is not None:
        model, optimizer, scheduler, data = worker.prepare(model, optimizer, scheduler, data)
    for _ in range(2):
        for (x,) in data:
            step(model, optimizer, x)
            scheduler.step()
    return model.weight.detach().numpy().copy()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("sync", "workers"), [("bsp", 1), ("bsp", 2), ("allreduce", 2), ("downpour:1,1", 1)])
def test_cycled_momentum_reaches_the_servers(sync: str, workers: int, kind: str) -> None:
    alone = cycled(None, kind)
    for found in run_workers(workers, lambda worker: cycled(worker, kind), sync):
        np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sync", ["bsp", "asp", "average:2", "allreduce"])
def test_a_table_follows_the_group_that_holds_it(sync: str) -> None:
    def script(worker: Worker) -> list[float]:
        tables = [shoal.nn.Embedding("its", dim=1), shoal.nn.Embedding("own", dim=1)]
        tables[1].optimizer = shoal.optim.SGD(lr=0.1, momentum=0.5)
        model = torch.nn.ModuleList(tables)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        worker.prepare(model, optimizer)
        optimizer.param_groups[0]["momentum"] = 0.25
        for one in model:
            one(torch.tensor([1])).sum().backward()
        optimizer.step()
        worker.barrier()
        return [worker.client.table(name).optimizer.momentum for name in ("its", "own")]

    assert run_workers(2, script, sync) == [[0.25, 0.5]] * 2


def test_a_setting_that_changes_what_rows_hold_is_refused() -> None:
    def script(worker: Worker) -> None:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.prepare(model, optimizer)
        optimizer.param_groups[0]["momentum"] = 0.9
        step(model, optimizer, torch.ones(1, 2))

    with pytest.raises(Mismatch, match=r"optimizer is SGD\(lr=0.1\), asked for SGD\(lr=0.1, momentum=0.9\)"):
        run_workers(1, script)


def resumed(worker: Worker | None, saved: Any, before: bool) -> Any:
    """Loads what another run saved, before or after `prepare`, and lowers lr through the new groups."""
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.9, momentum=0.9)
    if before or worker is None:
        optimizer.load_state_dict(saved)
    if worker is not None:
        worker.prepare(model, optimizer)
    if not before and worker is not None:
        optimizer.load_state_dict(saved)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 2))
        scheduler.step()
    return model.weight.detach().numpy().copy()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("sync", ["bsp", "asp", "allreduce"])
def test_what_an_optimizer_loads_is_what_it_steps_with(sync: str, before: bool) -> None:
    saved = torch.optim.SGD(line().parameters(), lr=0.05, momentum=0.5).state_dict()
    (found,) = run_workers(1, lambda worker: resumed(worker, saved, before), sync)
    np.testing.assert_allclose(found, resumed(None, saved, before), rtol=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_state_that_cannot_reach_the_servers_is_refused(before: bool) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    step(model, optimizer, torch.ones(1, 2))
    saved = optimizer.state_dict()
    with pytest.raises(BadInput, match=r"momentum_buffer of 2 parameters.*under asp.*worker\.load"):
        run_workers(1, lambda worker: resumed(worker, saved, before), "asp")
    (found,) = run_workers(1, lambda worker: resumed(worker, saved, before), "allreduce")
    np.testing.assert_allclose(found, resumed(None, saved, before), rtol=1e-5)


@pytest.mark.parametrize(
    ("sync", "momentum", "warnings"),
    [("bsp", 0.9, 1), ("asp", 0.9, 1), ("bsp", 0.0, 0), ("allreduce", 0.9, 0), ("downpour:1,1", 0.9, 0)],
)
def test_a_state_dict_without_the_state_of_the_servers_is_told_of_once(
    sync: str, momentum: float, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(worker: Worker) -> None:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        worker.prepare(model, optimizer)
        optimizer.state_dict()  # there is nothing in it that could be lost
        step(model, optimizer, torch.ones(1, 2))
        if worker.rank == 0:
            worker.save(str(tmp_path))
        worker.barrier()
        assert "state_dict" not in caplog.text
        worker.barrier()
        for _ in range(2):
            optimizer.state_dict()

    run_workers(2, script, sync)
    told = [record.getMessage() for record in caplog.records]
    told = [message for message in told if "state_dict() has no state" in message]
    assert len(told) == warnings
    assert all("worker.save(url)" in message for message in told)


@pytest.mark.parametrize(("sync", "workers"), [("allreduce", 2), ("average:2", 1), ("average:2", 2)])
def test_an_optimizer_without_a_twin_trains_where_it_runs_on_the_workers(sync: str, workers: int) -> None:
    x = torch.arange(48.0).reshape(-1, 2).sin()
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)

    def train(worker: Worker | None = None) -> list[torch.Tensor]:
        model, batches = line(), data
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)
        if worker is not None:
            # What averages on two would be another run, were they to have different data.
            split = sync == "allreduce"
            model, optimizer, batches = worker.prepare(model, optimizer, data, split=split)
        for _ in range(3):
            for inputs, wanted in batches:
                optimizer.zero_grad()
                (model(inputs) - wanted).square().mean().backward()
                optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = train()
    for found in run_workers(workers, train, sync):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
