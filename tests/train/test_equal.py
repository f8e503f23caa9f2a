"""G1: bsp and allreduce on n workers give the parameters of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch
from tests.train.crew import Notes, run_workers
from tests.train.models import IDS, ShoalModel, TorchModel, dense_values, initial_rows, loader, steps

from shoal.train.worker import Worker

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
}
EPOCHS = 4  # of five or six steps


class LazyRows:
    """The reference for rows: one torch optimizer for each row alone, stepped when the row is touched."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], rows: torch.Tensor) -> None:
        self.rows = [torch.nn.Parameter(row.clone()) for row in rows]
        self.optimizers = [make([row]) for row in self.rows]

    def step(self, grad: torch.Tensor, lr: float) -> None:
        sparse = grad.coalesce()
        for index, row in zip(sparse.indices()[0].tolist(), sparse.values(), strict=True):
            self.rows[index].grad = row.clone()
            self.optimizers[index].param_groups[0]["lr"] = lr
            self.optimizers[index].step()


def reference(
    name: str, samples: int, batch: int, shuffle: bool, schedule: bool, clip: float
) -> dict[str, torch.Tensor]:
    rows = initial_rows()
    model = TorchModel(rows)
    dense_values(model)
    make = OPTIMIZERS[name]
    optimizer = make([p for n, p in model.named_parameters() if not n.startswith("emb")])
    lazy = LazyRows(make, rows)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7) if schedule else None
    for _ in range(EPOCHS):
        for ids, x, y in loaders(samples, batch, shuffle):
            optimizer.zero_grad()
            model.emb.weight.grad = None
            torch.nn.functional.mse_loss(model(ids, x), y).backward()
            grad = model.emb.weight.grad.coalesce()
            if clip:
                parts = [grad.values(), *(p.grad for p in model.parameters() if p is not model.emb.weight)]
                total = torch.sqrt(sum((part.double() ** 2).sum() for part in parts))
                factor = min(1.0, clip / (float(total) + 1e-6))
                for part in parts[1:]:
                    part *= factor
                grad = grad * factor
            lr = float(optimizer.param_groups[0]["lr"])
            optimizer.step()
            lazy.step(grad, lr)
            with torch.no_grad():
                model.emb.weight.copy_(torch.stack([row.detach() for row in lazy.rows]))
            if scheduler is not None:
                scheduler.step()
    found = {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("emb")}
    found["rows"] = model.emb.weight.detach().clone()
    return found


_kept: dict[tuple[int, int, bool], Any] = {}


def loaders(samples: int, batch: int, shuffle: bool) -> Any:
    """The same loader for every pass, so that a generator goes on from where it was."""
    return _kept.setdefault((samples, batch, shuffle), loader(samples, batch, shuffle))


@dataclass(frozen=True)
class Counts:
    """What the servers have counted: pushes of this worker, updates of each dense parameter."""

    sent: int
    updates: tuple[int, ...]

    @staticmethod
    def of(worker: Worker, notes: Notes) -> Counts:
        assert worker.strategy is not None
        tensors = worker.strategy.tensors.values()
        sent = worker.client.stats()["pushes"] - notes.pushes
        return Counts(sent, tuple(tensor.stats()["pushes"] for tensor in tensors))

    def __sub__(self, other: Counts) -> Counts:
        updates = zip(self.updates, other.updates, strict=True)
        return Counts(self.sent - other.sent, tuple(now - then for now, then in updates))


def train(
    worker: Worker, name: str, samples: int, batch: int, shuffle: bool, schedule: bool, clip: float
) -> Any:
    model = ShoalModel()
    if worker.rank == 0:
        dense_values(model)  # the others' values are not used: those of the first worker to register are
    worker.barrier()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7) if schedule else None
    if worker.rank == 0 and worker.policy.dense_home == "server":
        worker.prepare(model, optimizer)
    worker.barrier()
    model, optimizer, batches = worker.prepare(model, optimizer, loader(samples, batch, shuffle))
    if scheduler is not None:
        worker.prepare(scheduler)
    worker.barrier()
    notes = Notes(worker)
    before = Counts.of(worker, notes)
    clipping = (lambda: worker.clip_grad_norm_(model, clip)) if clip else None
    made = len(list(steps(model, optimizer, batches, EPOCHS, clipping, scheduler)))
    worker.barrier()
    found = {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("emb")}
    found["rows"] = torch.from_numpy(model.emb.table.pull(list(range(IDS))).copy())
    if scheduler is not None:
        assert scheduler.last_epoch == EPOCHS * len(batches)  # also where a part was empty
    return found, made, worker.samples, Counts.of(worker, notes) - before


Case: TypeAlias = tuple[str, int, int, bool, bool, float]
# The last batch has one sample: fewer than workers.
CASES: list[Case] = [
    ("sgd", 41, 8, False, False, 0.0),
    ("decay", 41, 8, True, True, 0.0),
    ("adagrad", 41, 8, True, False, 0.0),
    ("momentum", 41, 8, True, False, 0.0),
    ("adam", 41, 8, False, True, 0.0),
    ("adamw", 41, 8, True, False, 0.0),
]
# It is whole, or all have some of it; gradients are clipped.
MORE_CASES: list[Case] = [
    ("sgd", 40, 8, True, False, 0.0),
    ("decay", 43, 8, False, True, 0.0),
    ("momentum", 41, 8, True, False, 0.2),
    ("adam", 41, 8, True, False, 0.2),
]


def named(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_several_workers_equal_one_process(sync: str, workers: int, case: Case) -> None:
    check(workers, case, sync)


@pytest.mark.parametrize("case", MORE_CASES, ids=named)
@pytest.mark.parametrize(("sync", "workers"), [("bsp", 2), ("bsp", 4), ("allreduce", 3)])
def test_clipped_and_with_other_last_batches_too(sync: str, workers: int, case: Case) -> None:
    check(workers, case, sync)


@cache
def expected_of(case: Case) -> dict[str, torch.Tensor]:
    _kept.clear()
    return reference(*case)


def check(workers: int, case: Case, sync: str) -> None:
    expected = expected_of(case)
    results = run_workers(workers, lambda worker: train(worker, *case), sync)
    for found, _, _, _ in results:
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    samples, batch = case[1], case[2]
    # Every worker trained on its part and on no more, sent that once, and the servers made one update of all:
    # n workers that each train alone would fail here.
    sizes = [len(range(b * batch, min(samples, (b + 1) * batch))) for b in range(-(-samples // batch))]
    for rank, (_, made, trained, counts) in enumerate(results):
        own = [size // workers + (rank < size % workers) for size in sizes]
        assert trained == EPOCHS * sum(own)
        assert made == EPOCHS * sum(size > 0 for size in own)
        first = sync == "allreduce" and case[5] > 0  # one of them gives the norm its first value
        assert made <= counts.sent <= made + first
        assert set(counts.updates) == ({EPOCHS * len(sizes)} if sync == "bsp" else set())
