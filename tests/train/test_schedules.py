"""Schedulers given to `prepare`, by passes and by steps, in jobs that go on from a checkpoint or grow: each
pass has the learning rates of plain torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from tests.train.test_growth import Job, job
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from shoal.train.worker import Worker

# In a `range` scripts move them before the first step of a later life.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
SAMPLES, BATCH, PASSES = 40, 8, 6
BATCHES = SAMPLES // BATCH
KINDS = ["epoch", "early", "step", "plateau", "both"]
Seen = dict[tuple[int, int], list[float]]


class Training:
    """A model and its schedulers, in Shoal or in plain torch."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            self.model.weight.fill_(0.5)
            self.model.bias.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.schedulers: list[Any]
        if kind == "step":
            self.schedulers = [lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=PASSES * BATCHES + 1)]
        elif kind == "both":
            self.schedulers = [lr_scheduler.ExponentialLR(self.optimizer, gamma) for gamma in (0.99, 0.8)]
        elif kind == "plateau":
            self.schedulers = [lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.7, patience=0)]
        else:
            self.schedulers = [lr_scheduler.StepLR(self.optimizer, 1, 0.7)]
        x = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(3))
        self.batches: Any = DataLoader(TensorDataset(x, x.sum(1)), batch_size=BATCH)

    def prepare(self, worker: Worker) -> Training:
        prepared = worker.prepare(self.model, self.optimizer, self.batches, *self.schedulers)
        self.model, self.optimizer, self.batches = prepared[:3]
        return self

    def before(self) -> None:
        if self.kind == "early":
            self.schedulers[0].step()

    def step(self, batch: Any) -> list[float]:
        x, y = batch
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x).squeeze(1), y).backward()
        group = self.optimizer.param_groups[0]
        rates = [group["lr"], group["momentum"]]
        self.optimizer.step()
        if self.kind in ("step", "both"):
            self.schedulers[0].step()
        return rates

    def behind(self, epoch: int) -> None:
        if self.kind == "plateau":
            self.schedulers[0].step(float(epoch // 2))
        elif self.kind in ("epoch", "both"):
            self.schedulers[-1].step()

    def values(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]


def in_torch(kind: str) -> tuple[list[list[float]], list[torch.Tensor]]:
    training = Training(kind)
    rates = []
    for epoch in range(PASSES):
        training.before()
        rates += [training.step(batch) for batch in training.batches]
        training.behind(epoch)
    return rates, training.values()


def passes(worker: Worker, loop: str) -> Any:
    return worker.epochs(PASSES) if loop == "epochs" else range(PASSES)


@pytest.mark.parametrize("saved", [(0, 2), (2, 0), (3, 4), (3, BATCHES)])
@pytest.mark.parametrize("loop", ["epochs", "range"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_goes_on_from_a_checkpoint(
    tmp_path: Path, kind: str, loop: str, saved: tuple[int, int]
) -> None:
    """Alone. `saved`: the pass, and the step behind which it is; in the last case behind the pass."""
    if kind == "plateau" and saved[1] == BATCHES:
        saved = (saved[0], 0)

    def script(worker: Worker) -> tuple[Any, Any]:
        training, found = Training(kind).prepare(worker), []
        for epoch in passes(worker, loop):
            training.before()
            for number, batch in enumerate(training.batches):
                found.append(training.step(batch))
                if (epoch, number) == saved and not list(tmp_path.iterdir()):
                    worker.save(str(tmp_path))
                    return found, None
            if saved == (epoch, BATCHES) and not list(tmp_path.iterdir()):
                worker.save(str(tmp_path))
                return found, None
            training.behind(epoch)
        return found, training.values()

    ((first, _),) = run_workers(1, script)
    ((second, values),) = run_workers(1, script, resume=str(tmp_path))
    rates, expected = in_torch(kind)
    assert first + second == [pytest.approx(one) for one in rates]
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize(
    ("word", "workers"),
    [
        *((word, 2) for word in ("bsp", "asp", "allreduce", "average:2", "easgd:2", "downpour:1,1")),
        *((word, 3) for word in ("bsp", "asp", "average:2", "easgd:2")),
    ],
)
def test_workers_go_on_from_a_checkpoint_of_two(tmp_path: Path, word: str, workers: int) -> None:
    """By passes: also under words whose steps are nobody else's, and in a worker that was not there."""

    def script(worker: Worker, until: int) -> Seen:
        training, found = Training("epoch").prepare(worker), {}
        for epoch in worker.epochs(PASSES):
            for number, batch in enumerate(training.batches):
                if (epoch, number) == (until, 0):
                    worker.barrier()
                    if worker.rank == 0:
                        worker.save(str(tmp_path))
                    worker.barrier()
                    return found
                found[epoch, number] = training.step(batch)
            training.behind(epoch)
        return found

    run_workers(2, lambda worker: script(worker, 3), word)
    for found in run_workers(workers, lambda worker: script(worker, PASSES), word, resume=str(tmp_path)):
        assert {epoch for epoch, _ in found} <= {3, 4, 5}
        for (epoch, _), (lr, _) in found.items():
            assert lr == pytest.approx(0.05 * 0.7**epoch)


@pytest.mark.parametrize("loop", ["epochs", "range"])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_come_in_a_later_pass(kind: str, loop: str) -> None:
    """Into the pass, under bsp: rates are those of plain torch by the round, and so is the model."""

    def script(worker: Worker, job: Job) -> tuple[dict[int, list[float]], Any]:
        training, found = Training(kind).prepare(worker), {}
        for epoch in passes(worker, loop):
            training.before()
            for number, batch in enumerate(training.batches):
                if worker.rank == 0 and (epoch, number) == (2, 1):
                    job.grow(3)
                at = worker.step
                found[at] = training.step(batch)
            training.behind(epoch)
        return found, training.values()

    rates, expected = in_torch(kind)
    with job(script) as done:
        assert len(done.results) == 3
        assert min(done.results[2][0]) > 2 * BATCHES
        for found, values in done.results.values():
            assert found == {at: pytest.approx(rates[at]) for at in found}
            torch.testing.assert_close(values, expected)


def test_a_job_that_has_nothing_left_has_schedulers_at_their_end(tmp_path: Path) -> None:
    def script(worker: Worker) -> list[float]:
        training = Training("both").prepare(worker)
        for epoch in worker.epochs(PASSES):
            for batch in training.batches:
                training.step(batch)
            training.behind(epoch)
        if not list(tmp_path.iterdir()):
            worker.save(str(tmp_path))
        return [training.optimizer.param_groups[0]["lr"], *(one.last_epoch for one in training.schedulers)]

    first, second = run_workers(1, script), run_workers(1, script, resume=str(tmp_path))
    assert first == second == [[pytest.approx(0.05 * 0.8**PASSES * 0.99 ** (PASSES * BATCHES)), 30, 6]]


def test_who_has_no_part_of_passes_of_one_batch_moves_behind_each_once() -> None:
    def script(worker: Worker) -> int:
        training = Training("epoch")
        few = TensorDataset(*(one[:2] for one in training.batches.dataset.tensors))
        training.batches = DataLoader(few, batch_size=BATCH)
        training.prepare(worker)
        for epoch in worker.epochs(PASSES):
            for batch in training.batches:
                training.step(batch)
            training.behind(epoch)
        return int(training.schedulers[0].last_epoch)

    assert run_workers(3, script) == [PASSES] * 3


@pytest.mark.parametrize("word", ["asp", "quorum:0.5", "average:2", "bsp"])
def test_one_with_an_end_stays_there_where_a_worker_may_make_more_steps(word: str) -> None:
    def script(worker: Worker) -> bool:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
        worker.prepare(model, optimizer, schedule)
        last = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
            last.append(optimizer.param_groups[0]["lr"])
        assert torch.load(io.BytesIO(pickled(schedule.state_dict()))).keys() == schedule.state_dict().keys()
        return last[2] == last[4] and type(schedule).__mro__[1] is lr_scheduler.OneCycleLR

    if word == "bsp":  # as in one process
        with pytest.raises(ValueError, match="Tried to step 4 times"):
            run_workers(2, script, word)
    else:
        assert run_workers(2, script, word) == [True, True]


def pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
