"""Words that exchange models, against plain NumPy; and downpour, against plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import run_workers, several
from tests.train.quadratic import SIZE, Floats, gradient, start, steps
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.sync.outer import bmuf
from shoal.train.worker import Worker

LR, MOMENTUM, PERIOD, BLOCKS = 0.05, 0.8, 3, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


class Local:
    """A worker in NumPy: SGD with momentum as torch has it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.w, self.v = rank, start(), np.zeros(SIZE)

    def step(self, at: Floats | None = None) -> None:
        self.v = MOMENTUM * self.v + gradient(self.rank, self.w if at is None else at)
        self.w = self.w - LR * self.v


def blocks(
    workers: int, state: str, lr: float, momentum: float, nesterov: bool
) -> list[tuple[Floats, Floats]]:
    """After each block: the model that all have, and the velocity of worker 0."""
    crew = [Local(rank) for rank in range(workers)]
    centre, outer = start(), np.zeros(SIZE)
    seen = []
    for _ in range(BLOCKS):
        for local in crew:
            for _ in range(PERIOD):
                local.step()
        difference = centre - np.mean([local.w for local in crew], axis=0)
        outer = momentum * outer + difference
        centre = centre - lr * (difference + momentum * outer if nesterov else outer)
        mean = np.mean([local.v for local in crew], axis=0)
        for local in crew:
            local.w = centre.copy()
            local.v = {"keep": local.v, "average": mean, "reset": np.zeros(SIZE)}[state]
        seen.append((centre.copy(), crew[0].v.copy()))
    return seen


def train(worker: Worker) -> list[tuple[Floats, Floats]]:
    model, optimizer, run = steps(worker, PERIOD, sgd)
    seen = []
    for _ in range(BLOCKS):
        run()
        velocity = optimizer.state[model.w].get("momentum_buffer", torch.zeros(SIZE))
        seen.append((model.values.copy(), velocity.numpy().astype(np.float64)))
    return seen


RULES = {
    "average:3": (1.0, 0.0, False),
    "bmuf:3": (1.0, None, False),
    "bmuf:3,momentum=0.6,nesterov=1": (1.0, 0.6, True),
    "diloco:3": (0.7, 0.9, True),
    "diloco:3,lr=0.5,momentum=0.3,nesterov=0": (0.5, 0.3, False),
}


@pytest.mark.parametrize("state", ["keep", "average", "reset"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("word", RULES)
def test_blocks_and_outer_steps(word: str, workers: int, state: str) -> None:
    lr, momentum, nesterov = RULES[word]
    momentum = 1 - 1 / workers if momentum is None else momentum
    expected = blocks(workers, state, lr, momentum, nesterov)
    results = run_workers(workers, train, f"{word},state={state}")
    for rank, found in enumerate(results):
        for (model, velocity), (centre, first) in zip(found, expected, strict=True):
            np.testing.assert_allclose(model, centre, **CLOSE)
            if rank == 0 or state != "keep":
                np.testing.assert_allclose(velocity, first, **CLOSE)
    if state == "keep":  # what it says: their own, which differ
        assert not np.allclose(results[0][-1][1], results[1][-1][1], atol=1e-3)


def test_block_momentum_of_zero_is_averaging() -> None:
    averaged = run_workers(3, train, "average:3")
    filtered = run_workers(3, train, "bmuf:3,momentum=0")
    for one, other in zip(averaged, filtered, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
def test_reset_makes_an_optimizer_begin_anew(kind: Any) -> None:
    """After a block of one step the next one is a first step: its length does not depend on earlier ones."""

    def script(worker: Worker) -> list[Floats]:
        model, _, run = steps(worker, 1, lambda parameters: kind(parameters, lr=LR))
        moved = []
        for _ in range(3):
            before = model.values
            run()
            moved.append(np.abs(model.values - before))
        return moved

    for moved in run_workers(1, script, "average:1,state=reset")[0]:
        np.testing.assert_allclose(moved, LR, rtol=1e-3)


@pytest.mark.parametrize("state", ["keep", "reset"])
@pytest.mark.parametrize("alpha", [None, 0.2])
@pytest.mark.parametrize("workers", [2, 3])
def test_elastic_averaging(workers: int, alpha: float | None, state: str) -> None:
    force = 0.9 / workers if alpha is None else alpha
    crew, centre = [Local(rank) for rank in range(workers)], start()
    text = f"easgd:{PERIOD},state={state}" + ("" if alpha is None else f",alpha={alpha}")
    with several(workers, text) as made:
        models = [steps(worker, 1, sgd) for worker in made]
        for step in range(3 * PERIOD + 1):
            for local, (model, optimizer, run) in zip(crew, models, strict=True):  # in turn
                before = local.w  # the step is x - lr g(x) - force, all of the same x
                if step and step % PERIOD == 0:
                    pull = force * (local.w - centre)
                    local.w, centre = local.w - pull, centre + pull
                    local.v = local.v if state == "keep" else np.zeros(SIZE)
                local.step(before)
                run()
                np.testing.assert_allclose(model.values, local.w, **CLOSE)
                velocity = optimizer.state[model.w]["momentum_buffer"]
                np.testing.assert_allclose(velocity.numpy(), local.v, **CLOSE)
            assert made[0].strategy is not None
            tensor = made[0].strategy.tensors[id(models[0][0].w)]
            np.testing.assert_allclose(tensor.pull(), centre, **CLOSE)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR),
    "momentum": sgd,
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_downpour_of_one_worker_is_plain_training(name: str) -> None:
    make = OPTIMIZERS[name]

    def script(worker: Worker) -> tuple[Floats, int]:
        model, _, run = steps(worker, 12, make)
        run()
        assert worker.strategy is not None
        return model.values, worker.strategy.tensors[id(model.w)].stats()["pushes"]

    w = torch.nn.Parameter(torch.tensor(start(), dtype=torch.float32))
    optimizer = make([w])
    for _ in range(12):
        w.grad = torch.tensor(gradient(0, w.detach().numpy().astype(np.float64)), dtype=torch.float32)
        optimizer.step()
    [(found, pushes)] = run_workers(1, script, "downpour:1,1")
    np.testing.assert_allclose(found, w.detach().numpy(), **CLOSE)
    assert pushes == 1 + 12  # its first value, and every step


def test_downpour_pushes_sums_and_fetches_apart() -> None:
    """Two workers in turn, SGD: sums of two steps go up, values come down every third; steps in between."""
    push, fetch, share = 2, 3, 1.0
    with several(2, f"downpour:{push},{fetch}") as made:
        models = [steps(worker, 1, OPTIMIZERS["sgd"]) for worker in made]
        centre, local, sums = start(), [start(), start()], [np.zeros(SIZE), np.zeros(SIZE)]
        for step in range(1, 10):
            for rank, (model, _, run) in enumerate(models):
                grad = gradient(rank, local[rank])
                local[rank] = local[rank] - LR * grad
                sums[rank] += share * grad
                if step % push == 0:
                    centre, sums[rank] = centre - LR * sums[rank], np.zeros(SIZE)
                if step % fetch == 0:
                    local[rank] = centre.copy()
                run()
                np.testing.assert_allclose(model.values, local[rank], **CLOSE)


def halves(worker: Worker | None, together: bool, steps: int = 6) -> Any:
    """Two halves of a model, with one optimizer for both or one for each; the second may rest."""
    parts = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    for part in parts:
        torch.nn.init.ones_(part.weight)
    groups = [[parts[0].weight, parts[1].weight]] if together else [[part.weight] for part in parts]
    optimizers = [sgd(group) for group in groups]
    if worker is not None:
        worker.prepare(*parts, *optimizers)
    rank = 0 if worker is None else worker.rank
    for step in range(steps):
        x = torch.tensor([[1.0 + rank, 0.5 * step]])
        for optimizer in optimizers:
            optimizer.zero_grad()
        (parts[0](x) ** 2 + parts[1](x) ** 2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return np.stack([part.weight.detach().numpy().copy() for part in parts])


@pytest.mark.parametrize(
    "sync", ["average:2", "bmuf:2", "diloco:3", "bmuf:2,state=reset", "easgd:2", "downpour:2,2"]
)
def test_an_optimizer_for_each_half_does_what_one_for_both_does(sync: str) -> None:
    workers = 1 if sync.startswith(("easgd", "downpour")) else 2  # those two depend on who comes first
    one = run_workers(workers, lambda worker: halves(worker, together=True), sync)
    each = run_workers(workers, lambda worker: halves(worker, together=False), sync)
    np.testing.assert_allclose(one, each, **CLOSE)


@pytest.mark.parametrize("sync", ["average:2", "bmuf:1", "easgd:2", "downpour:1,1", "bsp", "asp"])
def test_passes_end_also_where_the_last_optimizer_steps_seldom_or_never(sync: str) -> None:
    """As a critic's own epoch, or several steps of it for one of the generator."""

    def script(worker: Worker) -> list[bool]:
        models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        critic, generator = (torch.optim.SGD(model.parameters(), lr=0.01) for model in models)
        data = DataLoader(TensorDataset(torch.ones(22, 1)), batch_size=2)
        *_, batches = worker.prepare(*models, critic, generator, data)
        for epoch in range(3):
            for number, (x,) in enumerate(batches):
                for model, optimizer, every in ((models[0], critic, 1), (models[1], generator, 3)):
                    if number % every == every - 1 and (epoch or optimizer is critic):
                        optimizer.zero_grad()
                        model(x).mean().backward()
                        optimizer.step()
        return [worker.ledger.report(epoch).exactly_once for epoch in range(3)]

    assert run_workers(2, script, sync, wait_s=5) == [[True] * 3] * 2


def test_a_job_of_one_worker_under_bmuf_can_grow() -> None:
    with shoal.connect("memory://") as client:
        for count in (1, 2):
            tensor = client.tensor("w", np.ones(2, np.float32), optimizer=bmuf(nesterov=True)(count))
            tensor.push(np.ones(2, np.float32))
        # One worker: a plain step. Two: velocity 0.5 * 1 + 1, and as much again by half ahead.
        np.testing.assert_allclose(tensor.pull(), 1.0 - 1.0 - (1.0 + 0.5 * 1.5), rtol=1e-6)
