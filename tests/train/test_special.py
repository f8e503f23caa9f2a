"""What is special to single words, on real runs with threads as workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.columns import record
from tests.train.crew import run_workers, several
from tests.train.history import History, check
from tests.train.models import ShoalModel, dense_values, loader
from tests.train.quadratic import gradient, start, steps
from torch.utils.data import DataLoader, TensorDataset

import shoal.nn
from shoal.sync import mixing
from shoal.train.worker import Worker

LR = 0.05


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LR)


# quorum


def trained(sync: str) -> list[dict[str, torch.Tensor]]:
    def script(worker: Worker) -> dict[str, torch.Tensor]:
        model = ShoalModel()
        dense_values(model)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        _, _, batches = worker.prepare(model, optimizer, loader(41, 8, True))
        for _ in range(2):
            for ids, x, y in batches:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(ids, x), y).backward()
                optimizer.step()
        worker.barrier()
        rows = torch.from_numpy(model.emb.table.pull(list(range(23))).copy())
        return {name: value.detach().clone() for name, value in model.named_parameters()} | {"rows": rows}

    return run_workers(4, script, sync)


def test_a_quorum_of_everybody_is_bsp() -> None:
    for one, other in zip(trained("bsp"), trained("quorum:1"), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def wait_until_others_are_ahead(worker: Worker) -> None:
    """The straggler: a round of three closes without it, or they have come to the end of the pass."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        state = worker.rounds.state()
        others = [rank for rank in range(worker.world_size) if rank != worker.rank]
        if any(state["phases"][rank] == "at_end" for rank in others):
            return
        if all(state["clocks"][rank] > worker.step for rank in others):
            return
    raise AssertionError(f"the others do not go on: {state}")


def test_late_contributions_are_dropped_whole_and_their_data_comes_again() -> None:
    """A sample is a unit and a key. The weights of an update are 1 in all: rows show in how many each was."""
    samples, workers = 120, 4

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = shoal.nn.Embedding("samples", dim=2, init=shoal.init.Constant(0.0))
            self.w = torch.nn.Parameter(torch.zeros(()))

    def script(worker: Worker) -> Any:
        model = Rows()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = TensorDataset(torch.arange(samples))
        _, _, batches = worker.prepare(model, optimizer, DataLoader(data, batch_size=workers))
        for (ids,) in batches:
            optimizer.zero_grad()
            if worker.rank == 3:
                wait_until_others_are_ahead(worker)
            (-model.emb(ids).sum() - model.w).backward()
            optimizer.step()
        worker.barrier()
        rows = model.emb.table.pull(np.arange(samples))
        state = worker.rounds.state()
        return (
            worker.ledger.report(0),
            rows,
            float(model.w.detach()),
            worker.dropped,
            state["dropped"],
            state["closed"],
        )

    results = run_workers(workers, script, "quorum:0.75")
    report, rows, total, _, dropped, _ = results[0]
    assert dropped == sum(result[3] for result in results) > 0
    assert report.done == report.units == samples
    assert report.exactly_once, str(report)  # what was dropped was not used
    assert (rows[:, 0] == rows[:, 1]).all()
    assert (rows > 0.2).all()  # each is in one update, with a weight of 1/4 at least ...
    assert (rows < 1.1).all()
    assert rows[:, 0].sum() == pytest.approx(total, rel=1e-4)  # ... and in no other: weights are 1 in all
    assert total == pytest.approx(round(total), rel=1e-4)


# ssp


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_real_histories_are_bounded(bound: int) -> None:
    workers = 3
    history = History(workers, time.monotonic)

    def script(worker: Worker) -> None:
        record(worker, history, 10)

    run_workers(workers, script, f"ssp:{bound},scale=1")
    check(history, bound)
    assert history.largest_lead() == bound  # it was met, and would have been passed
    assert len(history.reads) == 2 * 10 * workers


# asp, softsync


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("option", ["", ",scale=share", ",scale=1", ",scale=staleness"])
def test_softsync_of_one_is_asp(option: str, make: Any) -> None:
    def run(word: str) -> Any:
        with several(3, word) as workers:
            made = [one_batch_after_the_other(worker, make) for worker in workers]
            for turn in range(15):
                next(made[turn * turn % 3])  # uneven turns: staleness differs
            return [next(each).detach().numpy().copy() for each in made]

    np.testing.assert_array_equal(run(f"softsync:1{option}"), run(f"asp{option}"))


def one_batch_after_the_other(worker: Worker, make: Any) -> Iterator[torch.Tensor]:
    """A step each time it is asked, on this worker's part of a batch; gives a parameter."""
    model = ShoalModel()
    dense_values(model)
    optimizer = make(model.parameters())
    _, _, batches = worker.prepare(model, optimizer, loader(90, 5, False))  # parts of one sample and of two
    for ids, x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(ids, x), y).backward()
        optimizer.step()
        yield model.linear.weight


@pytest.mark.parametrize("option", ["", ",scale=1"])
@pytest.mark.parametrize("make", [sgd, adam])
def test_softsync_makes_one_update_of_so_many_gradients(make: Any, option: str) -> None:
    """Three workers in turn, an update from three gradients: their mean, and one step of the optimizer.
    There is no loader: a gradient is its worker's own whole batch.
    """
    w = torch.nn.Parameter(torch.tensor(start(), dtype=torch.float32))
    reference = make([w])
    with several(3, f"softsync:3{option}") as workers:
        models = [steps(worker, 1, make) for worker in workers]
        read = [start()] * 3
        assert workers[0].strategy is not None
        tensor = workers[0].strategy.tensors[id(models[0][0].w)]
        first = tensor.stats()["pushes"]
        for turn in range(6):
            grads = []
            for rank, (model, _, run) in enumerate(models):
                grads.append(gradient(rank, read[rank]))
                run()
                if rank == 2:
                    w.grad = torch.tensor(np.mean(grads, axis=0), dtype=torch.float32)
                    reference.step()
                read[rank] = w.detach().numpy().astype(np.float64)
                np.testing.assert_allclose(model.values, read[rank], rtol=1e-4, atol=1e-5)
            assert tensor.stats()["pushes"] - first == turn + 1


@pytest.mark.parametrize(("count", "moved"), [(1, 8.0), (2, 8.0), (3, 8.0), (6, 4.0)])
def test_softsync_of_parts_of_a_batch(count: int, moved: float) -> None:
    """Two batches in three parts each, with gradients 2, 4 and 6, whoever trains them and when. Of up to
    three to an update each moves the model by its third; of six their mean is one step.
    """

    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = TensorDataset(torch.tensor([[1.0], [3.0], [3.0], [5.0], [5.0], [7.0]]).repeat(2, 1))
        _, _, batches = worker.prepare(model, optimizer, DataLoader(data, batch_size=6))
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return float(-model.weight.detach())

    assert run_workers(3, script, f"softsync:{count}") == [pytest.approx(moved)] * 3


def test_softsync_divides_each_gradient_by_its_own_staleness() -> None:
    """Both gradients of the second update are from before the first, which one of them has seen."""
    with several(2, "softsync:2,scale=staleness") as workers:
        models = [steps(worker, 1, sgd) for worker in workers]
        one, other = (gradient(rank, start()) for rank in range(2))
        for _, _, run in models:
            run()
        now = start() - LR * (one + other) / 2
        models[0][2]()  # read before the first update: 2 behind
        models[1][2]()  # read after it: 1
        now = now - LR * (gradient(0, start()) / 2 + gradient(1, now)) / 2
        np.testing.assert_allclose(models[1][0].values, now, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turns", ["010101", "00101100"])
def test_dcasgd_compensates_for_what_came_since_this_worker_s_own_pull(turns: str) -> None:
    strength, most = 0.5, 0.0
    with several(2, f"dcasgd:{strength}") as workers:
        models = [steps(worker, 1, sgd) for worker in workers]
        now, pulled = start(), [start(), start()]
        for rank in map(int, turns):
            grad = gradient(rank, pulled[rank])
            term = strength * grad * grad * (now - pulled[rank])
            most = max(most, float(np.abs(LR * term).max()))
            now = now - LR * (grad + term)
            model, _, run = models[rank]
            run()
            pulled[rank] = now
            np.testing.assert_allclose(model.values, now, rtol=1e-4, atol=1e-5)
    assert most > 1e-3  # what others pushed is seen in it


def test_asp_divides_by_staleness() -> None:
    with several(3, "asp:staleness") as workers:
        models = [steps(worker, 1, sgd) for worker in workers]
        now, first = start(), start()
        for rank, (_, _, run) in enumerate(models):
            run()
            now = now - LR * gradient(rank, first) / (rank + 1)
        np.testing.assert_allclose(models[2][0].values, now, rtol=1e-4, atol=1e-5)


# gossip, hogwild


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_mixing_is_doubly_stochastic(n: int) -> None:
    matrix = np.array([[mixing(n, rank).get(other, 0.0) for other in range(n)] for rank in range(n)])
    np.testing.assert_allclose(matrix.sum(axis=0), 1)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert (matrix >= 0).all()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_gossip_keeps_the_mean_and_comes_to_it(n: int) -> None:
    def script(worker: Worker) -> Any:
        model, _, run = steps(worker, 1, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        with torch.no_grad():  # apart, now that all hold the same
            model.w.copy_(torch.randn(len(model.w), generator=torch.Generator().manual_seed(worker.rank)))
        seen = [model.values]
        for _ in range(40):
            run()
            seen.append(model.values)
        return seen

    histories = np.array(run_workers(n, script, "gossip"))  # worker, step, element
    mean = histories[:, 0].mean(axis=0)
    for step in range(histories.shape[1]):
        np.testing.assert_allclose(histories[:, step].mean(axis=0), mean, atol=1e-6)
    spread = np.abs(histories - mean).max(axis=(0, 2))
    assert spread[0] > 0.5
    assert spread[-1] < 1e-5


def classes(rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Four classes around corners; worker `rank` of two sees two of them alone, None is everything."""
    generator = torch.Generator().manual_seed(4)
    corners = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [-2.0, -2.0], [2.0, -2.0]])
    y = torch.arange(80) % 4
    x = corners[y] + 0.5 * torch.randn(80, 2, generator=generator)
    mine = slice(None) if rank is None else y // 2 == rank
    return x[mine], y[mine]


def learn(worker: Worker, rank: int | None, count: int) -> tuple[float, int]:
    model = torch.nn.Linear(2, 4)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    worker.prepare(model, optimizer)
    x, y = classes(rank)
    for _ in range(count):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    worker.barrier()
    with torch.no_grad():
        x, y = classes(None)
        return float(torch.nn.functional.cross_entropy(model(x), y)), worker.steps_made


@pytest.mark.parametrize("word", ["gossip", "hogwild"])
def test_workers_without_a_server_learn_what_each_alone_does_not(word: str) -> None:
    whole = run_workers(1, lambda worker: learn(worker, None, 60), word)[0][0]
    target = 1.3 * whole
    for rank in range(2):
        assert run_workers(1, lambda worker, r=rank: learn(worker, r, 60), word)[0][0] > 3 * target
    for loss, made in run_workers(2, lambda worker: learn(worker, worker.rank, 60), word):
        assert loss < target, (loss, whole)
        assert made == 60


# float64


def in_float64(worker: Worker | None = None) -> torch.Tensor:
    model = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1 / 3)
    optimizer = adam(model.parameters())
    if worker is not None:
        worker.prepare(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.full((1, 3), 1 / 7, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("sync", ["allreduce", "gossip"])
def test_a_float64_model_trains_as_float64_where_it_lies_on_the_workers(sync: str) -> None:
    for found in run_workers(2, in_float64, sync):
        torch.testing.assert_close(found, in_float64(), rtol=1e-14, atol=0.0)
