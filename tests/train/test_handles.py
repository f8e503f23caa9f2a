"""Tables with an optimizer of their own whose handle the script gave to no torch optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.train.worker import Worker


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own = shoal.optim.SGD(lr=1.0, momentum=0.5)
        self.emb = shoal.nn.Embedding("items", dim=2, init=shoal.init.Constant(1.0), optimizer=own)
        self.line = torch.nn.Linear(2, 1)
        for parameter in self.line.parameters():
            torch.nn.init.constant_(parameter, 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.line(self.emb(ids)).square().mean()  # type: ignore[no-any-return]


def optimizer_of(model: Rows, inside: bool, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    return kind((model if inside else model.line).parameters(), lr=0.125)  # type: ignore[no-any-return]


def trained(worker: Worker, inside: bool, scaling: str, kind: Any = torch.optim.SGD) -> list[torch.Tensor]:
    model = Rows()
    batches = DataLoader(TensorDataset(torch.arange(12) % 5), batch_size=4)
    model, optimizer, batches = worker.prepare(model, optimizer_of(model, inside, kind), batches)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaling != "none")
    for (ids,) in batches:
        optimizer.zero_grad()
        scaler.scale(model(ids)).backward()
        if scaling == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    worker.barrier()
    rows = torch.from_numpy(model.emb.table.pull(list(range(5))))
    return [rows, *(parameter.detach() for parameter in model.line.parameters())]


@pytest.mark.parametrize("scaling", ["none", "step", "unscale_"])
@pytest.mark.parametrize(
    ("sync", "workers"), [("bsp", 1), ("bsp", 2), ("allreduce", 1), ("allreduce", 2), ("average:2", 1)]
)
def test_a_handle_in_no_optimizer_trains_as_one_in_the_first(sync: str, workers: int, scaling: str) -> None:
    inside, outside = (
        run_workers(workers, lambda worker, inside=inside: trained(worker, inside, scaling), sync)[0]
        for inside in (True, False)
    )
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(inside, outside, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.NAdam])
def test_an_optimizer_never_sees_a_handle_that_it_was_not_built_with(kind: Any) -> None:
    inside, outside = (
        run_workers(1, lambda worker, inside=inside: trained(worker, inside, "none", kind), "allreduce")[0]
        for inside in (True, False)
    )
    assert all(torch.allclose(one, two) for one, two in zip(inside, outside, strict=True))


def test_rows_that_are_not_finite_are_found_with_the_handle_in_no_optimizer() -> None:
    def script(worker: Worker) -> tuple[bool, float]:
        model = Rows()
        optimizer = optimizer_of(model, inside=False)
        worker.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        (scaler.scale(model.emb(torch.tensor([1])).sum()) * torch.inf).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() < 1024.0, float(model.emb.table.pull([1])[0, 0])

    assert run_workers(1, script)[0] == (True, 1.0)


def test_gradients_that_are_thrown_away_are_those_of_handles_in_no_optimizer_too() -> None:
    def script(worker: Worker) -> float:
        model = Rows()
        optimizer = optimizer_of(model, inside=False)
        worker.prepare(model, optimizer)
        model(torch.tensor([1])).backward()
        optimizer.zero_grad()
        optimizer.step()
        return float(model.emb.table.pull([1])[0, 0])

    assert run_workers(1, script)[0] == 1.0


@pytest.mark.parametrize("named", [False, True])
def test_a_state_dict_has_only_the_parameters_that_the_script_gave(named: bool) -> None:
    def script(worker: Worker) -> None:
        model = Rows()
        given: Any = model.line.named_parameters() if named else model.line.parameters()
        optimizer = torch.optim.Adam(given)
        before = optimizer.state_dict()
        worker.prepare(model, optimizer)
        model(torch.tensor([1, 2])).backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert state["param_groups"] == before["param_groups"]
        assert list(state["state"]) == [0, 1]
        optimizer.load_state_dict(state)
        torch.optim.Adam(model.line.parameters()).load_state_dict(state)
        model(torch.tensor([1, 2])).backward()
        optimizer.zero_grad()
        assert model.emb.gradients() is None
        assert optimizer.state_dict()["param_groups"] == state["param_groups"]

    run_workers(1, script, "allreduce")
