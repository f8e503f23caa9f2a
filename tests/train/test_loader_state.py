"""A loader's own state in a new job: its ledger, which knows nothing of the pass, is told what is done."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.train.crew import JOIN_S, run_workers
from torch.utils.data import DataLoader, TensorDataset

from shoal.errors import BadInput, Mismatch
from shoal.store.connect import connect
from shoal.train.join import local_workers
from shoal.train.worker import Worker

SAMPLES, BATCH, LEFT_AT = 13, 3, (1, 2)  # in the second pass, with its second batch


def loader_of() -> DataLoader[Any]:
    order = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.arange(float(SAMPLES))), BATCH, shuffle=True, generator=order)


def train(worker: Worker, state: Any, stops: bool, epochs: int = 3) -> tuple[Any, Any, Any]:
    """What was drawn in each pass that had batches, the reports of all, and the state where it `stops`."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, loader = worker.prepare(model, optimizer, loader_of())
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    drawn: dict[int, list[float]] = {}
    for epoch in worker.epochs(epochs):
        drawn[epoch] = []
        for made, (x,) in enumerate(loader, start=1):
            drawn[epoch] += x.tolist()
            optimizer.zero_grad()
            model(x.view(-1, 1)).square().mean().backward()
            optimizer.step()
            if stops and (epoch, made) == LEFT_AT:
                return drawn, None, loader.state_dict()
    return drawn, {epoch: worker.ledger.report(epoch) for epoch in drawn}, None


def plain() -> list[list[float]]:
    loader = loader_of()
    return [[x for (batch,) in loader for x in batch.tolist()] for _ in range(3)]


@pytest.mark.parametrize("batch", ["split", "each"])
@pytest.mark.parametrize(
    ("sync", "workers"),
    [
        ("bsp", 1),
        ("bsp", 2),
        ("allreduce", 2),
        ("gossip", 2),
        ("asp", 1),
        ("average:2", 1),
        ("downpour:1,1", 1),
    ],
)
def test_a_loader_s_state_goes_on_within_a_pass(sync: str, workers: int, batch: str) -> None:
    before = run_workers(workers, lambda worker: train(worker, None, True), sync, batch=batch)
    for given in ([state for *_, state in before], [before[0][2]] * workers):  # its own, or one for all
        after = run_workers(
            workers, lambda worker, given=given: train(worker, given[worker.rank], False), sync, batch=batch
        )
        whole = plain()
        second = [x for drawn, *_ in [*before, *after] for x in drawn[1]]
        assert sorted(second) == sorted(whole[1])
        for drawn, reports, _ in after:
            assert sorted(drawn) == [1, 2]
            assert reports[1].exactly_once
            assert reports[1].done == reports[1].units
        assert sorted(x for drawn, *_ in after for x in drawn[2]) == sorted(whole[2])


def test_one_that_leases_beside_others_does_not_know_what_is_left() -> None:
    before = run_workers(2, lambda worker: train(worker, None, True), "asp")
    state = next(state for *_, state in before if state is not None)
    with pytest.raises(BadInput, match=r"worker\.load\(url\)"):
        run_workers(2, lambda worker: train(worker, state, False), "asp")
    with pytest.raises(BadInput, match=r"worker\.load\(url\)"):
        run_workers(2, lambda worker: train(worker, state, False), "bsp")


def test_a_state_that_one_worker_loads_alone_is_a_mismatch() -> None:
    *_, state = run_workers(2, lambda worker: train(worker, None, True, epochs=2))[0]
    state = {**state, "done": [0, 2, 4, 6]}
    with pytest.raises(Mismatch, match="with the same state on all"):
        run_workers(
            2, lambda worker: train(worker, state if worker.rank == 0 else {**state, "done": []}, False)
        )


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("dies_in", [1, 2])
def test_who_is_started_again_and_loads_again_goes_on_where_its_job_is(sync: str, dies_in: int) -> None:
    before, _, state = run_workers(1, lambda worker: train(worker, None, True), sync)[0]
    with connect("memory://", timeout=JOIN_S) as client:
        (maker,) = local_workers(1, sync, client=client)
        first = maker()
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model, optimizer, loader = first.prepare(model, optimizer, loader_of())
        loader.load_state_dict(state)
        drawn: dict[int, list[float]] = {1: before[1], 2: []}
        for epoch in range(1, dies_in + 1):
            for (x,) in loader:
                drawn[epoch] += x.tolist()
                optimizer.zero_grad()
                model(x.view(-1, 1)).square().mean().backward()
                optimizer.step()
                if epoch == dies_in:
                    break
        # It dies, and another life takes its place.
        with maker() as second:
            again, *_ = train(second, state, False)
            reports = [second.ledger.report(epoch) for epoch in (1, 2)]
        first.close(tells=False)
    whole = plain()
    assert min(again) == dies_in
    for epoch in (1, 2):
        assert sorted(drawn[epoch] + again.get(epoch, [])) == sorted(whole[epoch])
    assert all(report.exactly_once for report in reports)
