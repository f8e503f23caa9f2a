"""`worker.step` and `worker.epoch`: where a worker is in the job, as its script reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers, several
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.train.join import local_workers
from shoal.train.worker import Worker


def prepared(worker: Worker, batches: int = 5, optimizers: int = 1) -> tuple[Any, Callable[[Any], None]]:
    """Batches, and what a loop does with each."""
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(optimizers))
    steppers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    data = DataLoader(TensorDataset(torch.ones(2 * batches, 1)), batch_size=2)
    *_, loader = worker.prepare(model, *steppers, data)

    def learn(x: Any) -> None:
        for layer, optimizer in zip(model, steppers, strict=True):
            optimizer.zero_grad()
            layer(x).mean().backward()
            optimizer.step()

    return loader, learn


EACH, BLOCKS = [1, 2, 3, 4, 5], [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("sync", "within", "behind"),
    [
        *((word, EACH, 5) for word in ("bsp", "quorum:0.5", "ssp:1", "asp", "softsync:2", "dcasgd:0.1")),
        *((word, EACH, 5) for word in ("allreduce", "gossip", "hogwild", "downpour:1,1")),
        *((word, EACH, 6) for word in ("easgd:2", "downpour:2,2")),
        *((word, BLOCKS, 3) for word in ("average:2", "bmuf:2", "diloco:2")),
    ],
)
def test_a_step_is_one_of_the_jobs_clock(sync: str, within: list[int], behind: int) -> None:
    """A block, where models are averaged. What is left at the end of a pass is handed in by one more."""

    def script(worker: Worker) -> tuple[int, list[int], int]:
        first, seen = worker.step, []
        loader, learn = prepared(worker)
        for (x,) in loader:
            learn(x)
            seen.append(worker.step)
        assert worker.steps_made == len(seen)
        return first, seen, worker.step

    assert run_workers(1, script, sync) == [(0, within, behind)]


def test_each_optimizer_that_steps_with_a_batch_makes_a_step() -> None:
    def script(worker: Worker) -> list[int]:
        loader, learn = prepared(worker, optimizers=2)
        return [worker.step for (x,) in loader if learn(x) is None]

    assert run_workers(1, script, "bsp") == [[2, 4, 6, 8, 10]]


@pytest.mark.parametrize("sync", ["asp", "ssp:9", "softsync:2"])
def test_at_a_barrier_and_behind_a_pass_all_are_where_the_first_is(sync: str) -> None:
    def script(worker: Worker) -> tuple[list[int], int]:
        loader, learn = prepared(worker)
        for _ in range(2 + 3 * worker.rank):
            learn(torch.ones(1, 1))
        seen = [worker.step]
        worker.barrier()
        seen.append(worker.step)
        for (x,) in loader:
            learn(x)
        return [*seen, worker.step], worker.steps_made

    (one, made), (other, made_there) = run_workers(2, script, sync)
    assert (one[0], other[0]) == (2, 5)  # its own, until then
    assert one[1] == other[1] == 5
    assert one[2] == other[2] == 5 + max(made - 2, made_there - 5)


def test_who_comes_too_late_for_a_round_goes_on_with_the_open_one() -> None:
    with several(2, "quorum:0.5") as workers:
        learns = [prepared(worker)[1] for worker in workers]
        for _ in range(3):
            learns[0](torch.ones(1, 1))
        assert [worker.step for worker in workers] == [3, 0]
        learns[1](torch.ones(1, 1))
        assert [worker.step for worker in workers] == [3, 3]
        assert [worker.dropped for worker in workers] == [0, 1]


@pytest.mark.parametrize("loop", [range(3), None])
@pytest.mark.parametrize("sync", ["bsp", "asp", "average:2"])
def test_an_epoch_is_over_with_its_pass(sync: str, loop: range | None) -> None:
    def script(worker: Worker) -> list[tuple[int, int, int]]:
        loader, learn = prepared(worker, batches=4)
        seen = []
        for epoch in worker.epochs(3) if loop is None else loop:
            begins, within = worker.epoch, []
            for (x,) in loader:
                learn(x)
                within.append(worker.epoch)
                if epoch == 1:
                    break
            with torch.no_grad():
                assert sum(len(x) for (x,) in loader) == 4  # half of it: what is only read is no epoch
            assert set(within) <= {begins}
            seen.append((epoch, begins, worker.epoch))
        return seen

    assert run_workers(2, script, sync) == [[(0, 0, 1), (1, 1, 2), (2, 2, 3)]] * 2


def test_epochs_counts_what_trains_nothing() -> None:
    def script(worker: Worker) -> list[int]:
        prepared(worker)
        return [worker.epoch for _ in worker.epochs(2)] + [worker.epoch]

    assert run_workers(1, script) == [[0, 1, 2]]


@pytest.mark.parametrize(("sync", "step"), [("bsp", 7), ("asp", 7), ("average:2", 4)])
def test_who_replaces_a_worker_goes_on_where_the_job_is(sync: str, step: int) -> None:
    """Behind a pass of five steps, and two of the next."""
    with shoal.connect("memory://") as client:
        (make,) = local_workers(1, sync, client=client)
        loader, learn = prepared(first := make())
        for (x,) in loader:
            learn(x)
        for number, (x,) in enumerate(loader):
            learn(x)
            if number == 1:
                assert first.epoch == 1
                again = make()
                break
        assert (again.step, again.epoch) == (step, 0)
        prepared(again)
        assert next(iter(again.epochs(3))) == again.epoch == 1


@pytest.mark.parametrize(("sync", "step"), [("bsp", 5), ("asp", 5), ("average:2", 3), ("allreduce", 5)])
def test_a_job_that_goes_on_from_a_checkpoint_goes_on_counting(tmp_path: Path, sync: str, step: int) -> None:
    def saves(worker: Worker) -> None:
        loader, learn = prepared(worker)
        for (x,) in loader:
            learn(x)
        worker.save(str(tmp_path))

    def goes_on(worker: Worker) -> tuple[int, int]:
        first = worker.step
        prepared(worker)
        return first, next(iter(worker.epochs(3)))

    run_workers(1, saves, sync)
    assert run_workers(1, goes_on, sync, resume=str(tmp_path)) == [(step, 1)]


@pytest.mark.parametrize("sync", ["bsp", "asp", "average:2", "allreduce"])
def test_a_worker_says_that_it_is_between_passes(sync: str) -> None:
    def script(worker: Worker) -> list[str]:
        loader, learn = prepared(worker)
        said = []
        for _ in range(2):
            for (x,) in loader:
                learn(x)
            said.append(worker.progress.value.state)
            for (x,) in loader:
                learn(x)
                said.append(worker.progress.value.state)
                break
            said.append(worker.progress.value.state)
        return said

    between = "between passes"
    assert run_workers(1, script, sync) == [[between, "training", between] * 2]
