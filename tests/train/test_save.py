"""worker.save and worker.load, with workers as threads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.train.crew import run_workers
from tests.train.models import ShoalModel, dense_values, loader, steps
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import BadInput
from shoal.train.join import local_workers
from shoal.train.worker import Worker


@pytest.mark.parametrize("word", ["bsp", "asp"])
def test_a_worker_comes_back_to_what_it_saved(tmp_path: Path, word: str) -> None:
    def values(model: ShoalModel) -> list[list[float]]:
        rows = model.emb(torch.arange(23)).detach()
        return [rows.flatten().tolist(), *(p.detach().flatten().tolist() for p in model.linear.parameters())]

    def script(worker: Worker) -> tuple[list[list[float]], ...]:
        model = ShoalModel()
        dense_values(model)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        model, optimizer, batches = worker.prepare(model, optimizer, loader(60, 12, True))
        list(steps(model, optimizer, batches, 1))
        worker.barrier()
        if worker.rank == 0:
            worker.save(str(tmp_path))
        worker.barrier()
        before = values(model)
        worker.barrier()
        list(steps(model, optimizer, batches, 1))
        worker.barrier()
        between = values(model)
        worker.load(str(tmp_path))
        return before, between, values(model)

    for before, between, after in run_workers(2, script, word):
        assert before == after
        assert between != before


def test_a_checkpoint_within_a_block_is_refused(tmp_path: Path) -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = worker.prepare(model, optimizer)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        with pytest.raises(BadInput, match="of the end of a block of steps"):
            worker.save(str(tmp_path))

    run_workers(1, script, "average:2")


def training(worker: Worker) -> Iterator[None]:
    """Passes of five samples in batches of two: of the last one a worker has nothing."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.ones(5, 1)), batch_size=2)
    model, optimizer, batches = worker.prepare(model, optimizer, data)
    while True:
        for (x,) in batches:
            model(x).mean().backward()
            optimizer.step()
        yield


@pytest.mark.parametrize("workers", [1, 2])
def test_another_job_goes_on_from_what_one_saved_with_its_state(tmp_path: Path, workers: int) -> None:
    def first(worker: Worker) -> None:
        passes = training(worker)
        next(passes)
        worker.state["best"] = [worker.rank, "é"]
        worker.barrier()
        if worker.rank == 0:
            worker.save(str(tmp_path))
        worker.barrier()

    def second(worker: Worker) -> dict[str, object]:
        passes = training(worker)
        worker.load(str(tmp_path))
        next(passes)  # its notes are its own again
        return dict(worker.state)

    run_workers(workers, first)
    found = run_workers(workers, second, wait_s=5)
    assert found == [{"best": [rank, "é"]} for rank in range(workers)]


def test_a_worker_finds_the_state_of_the_one_that_it_replaces() -> None:
    with shoal.connect("memory://") as client:
        (make,) = local_workers(1, "asp", client=client)
        before = make()
        passes = training(before)
        before.state["seen"] = 1
        next(passes)
        before.state["seen"] = 2  # after the last step: lost
        assert make().state == {"seen": 1}
        before.state["wrong"] = {1j}
        with pytest.raises(BadInput, match=r"worker\.state holds what JSON cannot hold"):
            before.state.keep()
        before.close()
    with shoal.connect("memory://") as client:
        (make,) = local_workers(1, "asp", client=client)
        assert make().state == {}
