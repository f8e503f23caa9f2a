"""Loops that only read, between batches and between passes: they change nothing of the training."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

from shoal.errors import BadInput
from shoal.train.worker import Worker


def numbers(samples: int, batch: int, shuffle: bool = False) -> DataLoader[Any]:
    x = torch.arange(1.0, samples + 1).reshape(-1, 1) / samples
    generator = torch.Generator().manual_seed(3) if shuffle else None
    return DataLoader(TensorDataset(x), batch_size=batch, shuffle=shuffle, generator=generator)


def line() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def read(model: Any, batches: Any, how: str, seen: list[float]) -> None:
    """An evaluation, as scripts write it."""
    if "eval" in how:
        model.eval()
    outside: AbstractContextManager[Any] = torch.no_grad() if "no_grad" in how else nullcontext()
    with outside:
        for (x,) in batches:
            with torch.no_grad():
                seen.extend(model(x).flatten().tolist())
    model.train("forgotten" not in how)


def script(worker: Worker | None, how: str, *, within: bool, which: str, batch: int = 4) -> Any:
    """Trains for three epochs and evaluates in them: `within` a step, or behind each."""
    model, seen, epochs = line(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data, held_out = numbers(10, batch, shuffle=True), numbers(7, 3)
    if worker is not None:
        model, optimizer, data, held_out = worker.prepare(model, optimizer, data, held_out)
    looked_at = data if which == "train" else held_out
    for epoch in range(3) if worker is None else worker.epochs(3):
        epochs.append(epoch)
        for (x,) in data:
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            if within:
                read(model, looked_at, how, seen)
            optimizer.step()
        if not within:
            read(model, looked_at, how, seen)
    return float(model.weight.detach()), epochs, len(seen), float(worker.samples if worker else 30)


@pytest.mark.parametrize("which", ["train", "held out"])
@pytest.mark.parametrize("how", ["eval", "no_grad", "eval no_grad", "eval forgotten", "nothing"])
@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_reading_behind_each_epoch_is_no_epoch(sync: str, how: str, which: str) -> None:
    alone = script(None, how, within=False, which=which)
    found = run_workers(3, lambda worker: script(worker, how, within=False, which=which), sync)
    for weight, epochs, _, _ in found:
        assert (weight, epochs) == (pytest.approx(alone[0], rel=1e-5), alone[1])
    assert [sum(column) for column in zip(*((one[2], one[3]) for one in found), strict=True)] == [*alone[2:]]


@pytest.mark.parametrize("how", ["no_grad", "eval"])
@pytest.mark.parametrize("which", ["train", "held out"])
def test_reading_between_a_batch_and_its_step_leaves_the_batch_alone(which: str, how: str) -> None:
    if (which, how) == ("train", "eval"):
        how = "no_grad eval"
    alone = script(None, how, within=True, which=which)
    found = run_workers(2, lambda worker: script(worker, how, within=True, which=which))
    for weight, epochs, _, _ in found:
        assert (weight, epochs) == (pytest.approx(alone[0], rel=1e-5), alone[1])
    assert [sum(column) for column in zip(*((one[2], one[3]) for one in found), strict=True)] == [*alone[2:]]


@pytest.mark.parametrize(
    ("sync", "how"),
    [("asp", "eval"), ("ssp:1", "no_grad"), ("average:2", "eval"), ("quorum:0.5", "no_grad")],
)
def test_what_is_read_is_trained_as_well_under_leases(sync: str, how: str) -> None:
    found = run_workers(2, lambda worker: script(worker, how, within=False, which="train"), sync)
    assert [epochs for _, epochs, _, _ in found] == [[0, 1, 2]] * 2
    assert sum(seen for _, _, seen, _ in found) == 30
    assert sum(samples for *_, samples in found) >= 30


@pytest.mark.parametrize(("sync", "first"), [("asp", True), ("asp", False), ("quorum:0.5", False)])
def test_reading_the_train_loader_unmarked_under_leases_is_refused(sync: str, first: bool) -> None:
    def evaluates(worker: Worker) -> None:
        model, optimizer, data = (made := line()), torch.optim.SGD(made.parameters(), lr=0.1), numbers(8, 2)
        model, optimizer, data = worker.prepare(model, optimizer, data)
        for epoch in range(2):
            for (x,) in data:
                optimizer.zero_grad()
                loss = model(x).mean()
                if (epoch == 0) != first:
                    loss.backward()
                    optimizer.step()

    with pytest.raises(BadInput, match=r"evaluate under torch\.no_grad"):
        run_workers(2, evaluates, sync)


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_a_worker_without_any_part_knows_an_evaluation_that_is_not_marked(sync: str) -> None:
    """Batches of two for three workers: the third has nothing to tell training from reading by."""
    alone = script(None, "nothing", within=False, which="train", batch=2)
    found = run_workers(
        3, lambda worker: script(worker, "nothing", within=False, which="train", batch=2), sync
    )
    for weight, epochs, _, _ in found:
        assert (weight, epochs) == (pytest.approx(alone[0], rel=1e-5), alone[1])
    assert [one[2:] for one in found][2] == (0, 0.0)


def accumulating(worker: Worker | None, every: int, samples: int, at_end: bool) -> float:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data: Any = numbers(samples, 3)
    if worker is not None:
        model, optimizer, data = worker.prepare(model, optimizer, data)
    batches = -(-samples // 3)
    for _ in range(2):
        optimizer.zero_grad()
        for number, (x,) in enumerate(data, 1):
            (model(x).sum() / (3 * every)).backward()
            if number % every == 0 or (at_end and number == batches):
                optimizer.step()
                optimizer.zero_grad()
    return float(model.weight.detach())


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
@pytest.mark.parametrize(("samples", "at_end"), [(10, False), (10, True), (7, False), (7, True)])
def test_an_empty_last_part_does_not_lose_what_was_accumulated(sync: str, samples: int, at_end: bool) -> None:
    """Batches of three for three workers; the last has one sample, and two of them get nothing of it."""
    alone = accumulating(None, 2, samples, at_end)

    # Of a sum each part counts as it is.
    def part(worker: Worker) -> float:
        prepare = worker.prepare
        worker.prepare = lambda *objects: prepare(*objects, reduction="sum")  # type: ignore[method-assign]
        return accumulating(worker, 2, samples, at_end)

    assert run_workers(3, part, sync) == [pytest.approx(alone, rel=1e-5)] * 3


def test_less_of_a_pass_than_a_step_takes_is_done_under_leases() -> None:
    """Worker 1 steps after every fourth batch, and gets two of the second pass."""
    enough, rest = [threading.Event(), threading.Event()], threading.Event()

    def script(worker: Worker) -> tuple[int, int]:
        model, optimizer, data = (made := line()), torch.optim.SGD(made.parameters(), lr=0.1), numbers(16, 2)
        model, optimizer, data = worker.prepare(model, optimizer, data)
        for epoch in range(2):
            for got, (x,) in enumerate(data, 1):
                model(x).mean().backward()
                if worker.rank == 0 or got % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if worker.rank == 0:
                    assert enough[epoch].wait(10)
                    (rest.set if epoch and got == 14 else bool)()
                elif got == (4, 2)[epoch]:
                    enough[epoch].set()
                    assert not epoch or rest.wait(10)
        return worker.epoch, worker.ledger.report().done

    assert run_workers(2, script, "asp") == [(2, 16)] * 2


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_what_is_not_divided_every_worker_has_whole(sync: str) -> None:
    def script(worker: Worker) -> list[list[float]]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.arange(7.0)[:, None])
        model, optimizer, batches = worker.prepare(model, optimizer, DataLoader(data, batch_size=2))
        val = worker.prepare(DataLoader(data, batch_size=3), split=False)
        seen = []
        for _ in range(2):
            for (x,) in batches:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            seen.append([value for (x,) in val for value in x.flatten().tolist()])
        return seen

    assert run_workers(2, script, sync) == [[[float(n) for n in range(7)]] * 2] * 2
