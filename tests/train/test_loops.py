"""Loops as ordinary scripts write them, against plain torch in one process: several steps with one batch, a
`break`, a step behind the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import BadInput
from shoal.train.join import local_workers
from shoal.train.worker import Worker

Loop = Callable[[Any, Callable[[Any, Any], None], Callable[[], None]], None]


def several_steps(batches: Any, learn: Any, step: Any) -> None:
    """As PPO makes them."""
    for x, y in batches:
        for _ in range(3):
            learn(x, y)
            step()


def break_behind_a_step(batches: Any, learn: Any, step: Any) -> None:
    for _ in range(3):
        for x, y in islice(batches, 2):
            learn(x, y)
            step()


def break_behind_a_batch(batches: Any, learn: Any, step: Any) -> None:
    for _ in range(3):
        for number, (x, y) in enumerate(batches):
            if number == 2:
                break
            learn(x, y)
            step()


def break_before_the_step(batches: Any, learn: Any, step: Any) -> None:
    for _ in range(3):
        for number, (x, y) in enumerate(batches):
            learn(x, y)
            if number == 2:
                break
        step()


def one_batch_at_a_time(batches: Any, learn: Any, step: Any) -> None:
    for _ in range(3):
        learn(*next(iter(batches)))
        step()


def rest_behind_the_loop(batches: Any, learn: Any, step: Any) -> None:
    for _ in range(2):
        for number, (x, y) in enumerate(batches):
            learn(x, y)
            if number == 1:
                step()
        step()


STEP_WITH_EACH = [several_steps, break_behind_a_step, break_behind_a_batch, one_batch_at_a_time]
ACCUMULATE = [break_before_the_step, rest_behind_the_loop]


def trained(loop: Loop, worker: Worker | None = None, samples: int = 12) -> list[float]:
    """Batches of five are cut into parts of 3 and 2."""
    chance = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(samples, 2, generator=chance), torch.randn(samples, generator=chance))
    reduction = "sum" if loop in ACCUMULATE else "mean"  # of batches of different sizes there is no other
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 0.3)
    torch.nn.init.constant_(model.bias, 0.1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1 if loop in STEP_WITH_EACH else 0.02)
    batches: Any = DataLoader(data, batch_size=5)
    if worker is not None:
        model, optimizer, batches = worker.prepare(model, optimizer, batches, reduction=reduction)

    def learn(x: Any, y: Any) -> None:
        torch.nn.functional.mse_loss(model(x).squeeze(1), y, reduction=reduction).backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    loop(batches, learn, step)
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
@pytest.mark.parametrize("loop", STEP_WITH_EACH + ACCUMULATE)
def test_a_loop_trains_as_in_one_process(loop: Loop, sync: str) -> None:
    found = run_workers(2, lambda worker: trained(loop, worker), sync, wait_s=5)
    np.testing.assert_allclose(found, [trained(loop)] * 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("samples", [11, 1])
@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_who_has_nothing_of_a_batch_makes_as_many_steps_as_the_others(sync: str, samples: int) -> None:
    found = run_workers(3, lambda worker: trained(several_steps, worker, samples), sync, wait_s=5)
    np.testing.assert_allclose(found, [trained(several_steps, None, samples)] * 3, rtol=1e-4, atol=1e-6)


def critic_first(worker: Worker | None) -> list[list[float]]:
    """Two steps of the one for one of the other, which was prepared first; parameters of different sizes."""
    generator, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 3)
    for model in (generator, critic):
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    batches: Any = DataLoader(TensorDataset(torch.arange(5.0)[:, None]), batch_size=2)
    if worker is not None:
        *_, batches = worker.prepare(generator, critic, *optimizers, batches)
    for _ in range(2):
        for (x,) in batches:
            for model, optimizer in (
                (critic, optimizers[1]),
                (critic, optimizers[1]),
                (generator, optimizers[0]),
            ):
                optimizer.zero_grad()
                (model(x) ** 2).mean().backward()
                optimizer.step()
    return [p.detach().flatten().tolist() for model in (generator, critic) for p in model.parameters()]


@pytest.mark.parametrize("sync", ["bsp", "allreduce", "gossip"])
def test_who_has_nothing_of_a_batch_steps_the_optimizers_that_others_step(sync: str) -> None:
    found = run_workers(2, critic_first, sync, wait_s=5)
    if sync != "gossip":
        for one in found:
            for mine, alone in zip(one, critic_first(None), strict=True):
                assert mine == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_who_replaces_a_worker_passes_over_passes_that_were_left(sync: str) -> None:
    def prepared(worker: Worker) -> tuple[Any, Callable[[Any], None]]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = worker.prepare(
            model, optimizer, DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=2)
        )[2]

        def step(x: Any) -> None:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        return batches, step

    with shoal.connect("memory://") as client:
        (make,) = local_workers(1, sync, client=client)
        first = make()
        batches, step = prepared(first)
        for left in (2, 99, 1):  # of which the second is whole
            for (x,) in islice(batches, left):
                step(x)
        assert first.epoch == 3
        for (x,) in islice(batches, 2):  # this one is under way
            step(x)
        again = make()
        batches, _ = prepared(again)
        assert [len(list(islice(batches, 99))) for _ in range(3)] == [0, 0, 0]
        assert (again.epoch, batches.epoch) == (3, 3)


@pytest.mark.parametrize("sync", ["asp", "ssp:3", "quorum:0.5", "softsync:2", "downpour:2,2", "average:2"])
def test_who_starts_late_trains_what_another_has_left_by_a_break(sync: str) -> None:
    went_on = threading.Event()

    def script(worker: Worker) -> list[Any]:
        if worker.rank == 0:
            assert went_on.wait(10)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = DataLoader(TensorDataset(torch.ones(20, 1)), batch_size=4)
        batches = worker.prepare(model, optimizer, data)[2]
        for epoch in range(2):
            for (x,) in batches:
                if epoch == 1:
                    went_on.set()
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                if worker.rank == 1 and epoch == 0:
                    break
        return [worker.ledger.report(epoch) for epoch in range(2)]

    for reports in run_workers(2, script, sync, wait_s=8):
        assert all(report.exactly_once for report in reports), [str(report) for report in reports]


def test_a_mean_is_of_those_who_are_there_and_of_this_call() -> None:
    """In epochs that nothing else holds together, and long after a worker has left."""

    def script(worker: Worker) -> list[float]:
        found = []
        for epoch in worker.epochs(40):
            if worker.rank == 1 and epoch == 20:
                break
            found.append(worker.mean(10.0 * epoch + worker.rank))
        return found

    expected = [10.0 * epoch + (0.5 if epoch < 20 else 0.0) for epoch in range(40)]
    assert run_workers(2, script, "asp") == [expected, expected[:20]]


def test_a_pass_that_the_ledger_does_not_know_is_not_reported() -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = worker.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(2, 1))))[2]
        for _ in range(12):
            for (x,) in batches:
                model(x).mean().backward()
                optimizer.step()
        assert worker.ledger.report().epoch == 11
        assert worker.ledger.report(8).exactly_once
        for unknown in (0, 12):
            with pytest.raises(BadInput, match=f"knows nothing of pass {unknown}: .* ended last is 11"):
                worker.ledger.report(unknown)

    run_workers(1, script)


@pytest.mark.parametrize(("then", "count"), [("bsp", 2), ("bsp", 3), ("asp", 2)])
def test_what_a_job_left_of_a_pass_is_nothing_to_the_next(then: str, count: int) -> None:
    def job(client: shoal.Client, count: int, sync: str, batches: int) -> int:
        def script(worker: Worker) -> int:
            with worker:
                model = torch.nn.Linear(1, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                data = DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=5)
                for (x,) in islice(worker.prepare(model, optimizer, data)[2], batches):
                    model(x).mean().backward()
                    optimizer.step()
                return int(worker.samples)

        with ThreadPoolExecutor(count) as pool:
            makers = local_workers(count, sync, client=client, wait_s=5)
            return sum(pool.map(lambda make: script(make()), makers))

    with shoal.connect("memory://") as client:
        assert job(client, 2, "bsp", 2) == 10
        assert job(client, count, then, 99) == 40


def test_the_report_of_another_loader_names_pass_and_loader() -> None:
    def script(worker: Worker) -> list[str]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = [DataLoader(TensorDataset(torch.ones(2, 1))) for _ in range(2)]
        _, _, *loaders = worker.prepare(model, optimizer, *data)
        said = []
        for batches in (*loaders, loaders[1]):
            for (x,) in batches:
                model(x).mean().backward()
                optimizer.step()
            said.append(str(worker.ledger.report()).partition(": ")[0])
        return said

    assert run_workers(1, script) == [["pass 0", "pass 0 of loader 1", "pass 1 of loader 1"]]
