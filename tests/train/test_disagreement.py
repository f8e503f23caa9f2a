"""Workers that do not agree, and numbers that are none: each error names the workers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import run_workers
from tests.train.models import DIM, INPUTS, ShoalModel, dataset, steps
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import BadInput, Mismatch
from shoal.store.connect import connect
from shoal.store.rounds import Rounds
from shoal.train.noticeboard import Noticeboard
from shoal.train.worker import Worker


def train(worker: Worker, model: torch.nn.Module, **settings: Any) -> int:
    samples = settings.pop("samples", 40)
    data = DataLoader(dataset(samples), batch_size=8, **settings)
    model, optimizer, batches = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    return len(list(steps(model, optimizer, batches, 2)))


def disagreement(script: Callable[[Worker], Any], sync: str) -> str:
    with pytest.raises(Mismatch) as failure:
        run_workers(2, script, sync, wait_s=3.0)
    return str(failure.value)


@pytest.mark.parametrize("sync", ["asp", "allreduce"])
def test_other_layers_are_shown_beside_each_other(sync: str) -> None:
    def script(worker: Worker) -> None:
        model = ShoalModel()
        model.extra = torch.nn.Linear(5, 1 + worker.rank)
        train(worker, model)

    said = disagreement(script, sync)
    assert "workers 0 and 1 have" in said or "workers 1 and 0 have" in said
    assert "worker 0: extra.weight: (1, 5) float32, stepped by SGD" in said
    assert "worker 1: extra.weight: (2, 5) float32, stepped by SGD" in said


@pytest.mark.parametrize("sync", ["bsp", "average:2"])
def test_other_settings_of_a_table_are_shown_beside_each_other(sync: str) -> None:
    def script(worker: Worker) -> None:
        model = ShoalModel()
        model.emb = shoal.nn.Embedding("items", dim=DIM, seed=3 + worker.rank)
        train(worker, model)

    said = disagreement(script, sync)
    assert "worker 0: emb.weight: table 'items', dim 3, init None, seed 3, stepped by SGD" in said
    assert "worker 1: emb.weight: table 'items', dim 3, init None, seed 4, stepped by SGD" in said


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_generators_that_are_seeded_differently_are_found(sync: str) -> None:
    def script(worker: Worker) -> None:
        generator = torch.Generator().manual_seed(worker.rank)
        train(worker, ShoalModel(), shuffle=True, generator=generator)

    said = disagreement(script, sync)
    assert "have different data, or draw it in different order: 40 samples in 5 batches, order " in said
    assert "seed its generator alike" in said


def test_datasets_of_different_size_are_found() -> None:
    said = disagreement(lambda worker: train(worker, ShoalModel(), samples=40 + 8 * worker.rank), "bsp")
    assert "40 samples in 5 batches" in said
    assert "48 samples in 6 batches" in said


def keyed(worker: Worker, label: Callable[[int, int], bool], together: threading.Barrier) -> list[int]:
    """Train batches that are dicts, of which some have another key: by rank and number of the first sample.

    Gives the first samples of what this worker had. Nobody takes all: of the first batches each has a part.
    """
    taken: list[int] = []

    def collate(samples: list[Any]) -> dict[str, Any]:
        taken.append(int(samples[0][0]))
        if len(taken) <= TOGETHER:
            with suppress(threading.BrokenBarrierError):  # another has raised
                together.wait(10)
        _, ids, x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return {"ids": ids, "x": x, "label" if label(worker.rank, taken[-1]) else "y": y}

    model = ShoalModel()
    numbered = TensorDataset(torch.arange(40), *dataset(40).tensors)
    data = DataLoader(numbered, batch_size=8, collate_fn=collate)
    model, optimizer, batches = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    try:
        for _ in range(2):
            for batch in batches:
                optimizer.zero_grad()
                model(batch["ids"], batch["x"]).sum().backward()
                optimizer.step()
    except Mismatch:
        together.abort()
        raise
    return taken


TOGETHER = 4  # batches of which each of two workers has a part, whatever the word
KEY_WORDS = ["bsp", "allreduce", "quorum:0.5", "average:2", "asp"]


@pytest.mark.parametrize(
    ("sync", "since"),
    # What a quorum drops comes again, to whoever asks: who then has had which parts is chance.
    [(sync, since) for sync in KEY_WORDS for since in (0, 17) if (sync, since) != ("quorum:0.5", 17)],
)
def test_batches_of_different_keys_are_found(sync: str, since: int) -> None:
    """From the first batch on, or from one in the middle."""
    both = threading.Barrier(2)
    said = disagreement(
        lambda worker: keyed(worker, lambda rank, sample: rank == 1 and sample >= since, both), sync
    )
    assert "have different keys: " in said
    assert "ids, label, x" in said
    assert "ids, x, y" in said


@pytest.mark.parametrize("sync", KEY_WORDS)
def test_batches_may_have_other_keys_than_the_first_if_all_their_parts_have(sync: str) -> None:
    both = threading.Barrier(2)
    taken = run_workers(2, lambda worker: keyed(worker, lambda _, sample: 16 <= sample < 24, both), sync)
    assert {sample // 8 for had in taken for sample in had} == set(range(5))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_of_several_whose_batches_keep_their_keys_is_found(odd: int) -> None:
    all_of_them = threading.Barrier(3)
    with pytest.raises(Mismatch) as failure:
        run_workers(
            3,
            lambda worker: keyed(worker, lambda rank, sample: rank != odd and sample >= 16, all_of_them),
            wait_s=3.0,
        )
    assert f"and {odd} have different keys: ids, label, x, and ids, x, y" in str(failure.value)


def test_notes_of_an_earlier_job_on_the_same_servers_do_not_count() -> None:
    with connect("memory://") as client:
        places = [Rounds(client.fork(), rank, 2) for rank in range(2)]

        def joins(rank: int) -> Noticeboard:
            board = Noticeboard(client, rank)
            places[rank].open(take="each", quorum=2, count=1, slack=-1)
            return board

        joins(0), joins(1).post(1, "a model")
        for place in places:
            place.leave()
        board = joins(0)
        board.post(1, "another model")
        assert list(board.differing(1, "another model", places[0])) == []
        other = joins(1)
        assert list(board.differing(1, "another model", places[0])) == []
        other.post(1, "a model")
        assert list(board.differing(1, "another model", places[0])) == [(1, "a model")]


NAN_STEP = 9  # at which easgd:3 also exchanges, and which ends no other block or sum
WORDS = ["bsp", "quorum:0.5", "ssp:1", "asp", "asp:staleness", "softsync:2", "dcasgd:0.04", "downpour:1,1"]
WORDS += ["downpour:3,2", "average:4", "bmuf:4", "easgd:3", "diloco:4", "allreduce", "gossip", "hogwild"]


class Dense(torch.nn.Linear):
    """A model without tables, whose rows would be looked at in every step."""

    def __init__(self) -> None:
        super().__init__(INPUTS, 1)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("sync", WORDS)
@pytest.mark.parametrize("kind", [Dense, ShoalModel])
def test_a_gradient_that_is_nan_names_worker_and_step_before_anything_is_sent(
    kind: type[torch.nn.Module], sync: str
) -> None:
    def script(worker: Worker) -> None:
        model = kind()
        model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ids, x, _ = dataset(8).tensors
        known = lambda: [parameter.detach().clone() for parameter in model.parameters()]  # noqa: E731
        for number in range(NAN_STEP + worker.rank):  # the other leaves, and waits for nobody
            bad = number == NAN_STEP
            optimizer.zero_grad()
            (model(ids, x).mean() * (math.nan if bad else 1.0)).backward()
            before, sent = known(), worker.client.stats()["pushes"]
            try:
                optimizer.step()
            except BadInput:
                assert worker.client.stats()["pushes"] == sent
                if sync != "hogwild":  # where the other steps them as well
                    assert all(map(torch.equal, before, known()))
                raise

    with pytest.raises(BadInput, match=rf"^worker 1, step {NAN_STEP}: .*finite.*check the loss for NaN"):
        run_workers(2, script, sync, wait_s=3.0)


@pytest.mark.parametrize("sync", ["bsp", "average:4"])
def test_a_reported_loss_that_is_nan_names_worker_and_step(sync: str) -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(1, 1)
        model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(NAN_STEP):
            model(torch.ones(1, 1)).mean().backward()
            optimizer.step()
        worker.report(loss=torch.tensor(float("nan")))

    message = (
        f"worker 0, step {NAN_STEP}: the loss is nan; lower the learning rate, clip the gradient "
        "(worker.clip_grad_norm_), or look at the batch of this step"
    )
    with pytest.raises(BadInput) as failure:
        run_workers(1, script, sync)
    assert str(failure.value) == message


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(BadInput, match=r"the loader is empty \(0 samples\): there is no batch in it"):
        run_workers(2, lambda worker: train(worker, ShoalModel(), samples=0))


@pytest.mark.parametrize("sync", ["bsp", "asp", "average:2", "allreduce"])
def test_fewer_samples_than_workers_train_and_that_is_said(
    sync: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = run_workers(3, lambda worker: (train(worker, ShoalModel(), samples=2), worker.samples), sync)
    assert sum(steps for steps, _ in made) == 4  # two passes, two parts with a sample in each
    assert sum(samples for _, samples in made) == 4
    said = [record.getMessage() for record in caplog.records if record.name == "shoal.data"]
    assert said == [
        "the loader has 2 samples for 3 workers: some train nothing; take fewer workers, or more data"
    ]


def test_batches_behind_the_last_step_do_not_hold_up_the_pass() -> None:
    """Gradient accumulation over four of five batches: the fifth is read, and makes no update of its own."""

    def script(worker: Worker) -> Any:
        model = ShoalModel()
        data = DataLoader(dataset(40), batch_size=8)
        model, optimizer, batches = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for number, (ids, x, _) in enumerate(batches):
            model(ids, x).sum().backward()
            if number == 3:
                optimizer.step()
        return worker.ledger.report()

    for report in run_workers(2, script):
        assert report.exactly_once


def test_a_mean_is_weighted_and_can_be_asked_for_again_and_again() -> None:
    def script(worker: Worker) -> list[float]:
        return [worker.mean(worker.rank + call, weight=1.0 + worker.rank) for call in range(3)]

    for means in run_workers(2, script):
        assert means == pytest.approx([2 / 3, 5 / 3, 8 / 3])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mean_is_exact_and_takes_what_it_is_given(workers: int) -> None:
    """Weights and values beyond what a float32 holds; a weight of 0 counts for nothing, also with a NaN."""
    big = 2.0**53 - 1
    calls = [(0.1, big), (big, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (2.5, 1.0)]

    def script(worker: Worker) -> list[float]:
        last = (math.nan, 0.0) if worker.rank else (2.5, 1.0)
        return [worker.mean(value, weight) for value, weight in [*calls, last]]

    for found in run_workers(workers, script):
        np.testing.assert_allclose(found, [0.1, big, math.nan, math.inf, math.nan, 2.5, 2.5], rtol=1e-15)


def test_weights_of_a_mean_are_whole_numbers_up_to_2_to_53() -> None:
    def script(worker: Worker) -> float:
        return worker.mean(float(worker.rank), 2**24 + 1 if worker.rank else 2**24 - 1)

    assert run_workers(2, script) == [(2**24 + 1) / 2**25] * 2
    with pytest.raises(BadInput, match=r"worker\.mean: weight is inf"):
        run_workers(1, lambda worker: worker.mean(1.0, math.inf))


def test_a_report_leaves_other_figures_alone() -> None:
    def script(worker: Worker) -> Any:
        worker.report(loss=1.0, auc=0.5)
        worker.report(auc=0.6)
        return worker.progress.value

    said = run_workers(1, script)[0]
    assert (said.loss, said.metrics) == (1.0, {"loss": 1.0, "auc": 0.6})
