"""A loader's own state in a new job: its ledger, which knows nothing of the pass, is told what is done."""

from __future__ import annotations

import json
from pathlib import Path
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
LATER = (3, 2)  # than a ledger looks that knows nothing of the passes before


def loader_of() -> DataLoader[Any]:
    order = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.arange(float(SAMPLES))), BATCH, shuffle=True, generator=order)


def train(
    worker: Worker, state: Any, stops: bool, epochs: int = 3, at: tuple[int, int] = LEFT_AT, url: str = ""
) -> tuple[Any, Any, Any]:
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
            if stops and (epoch, made) == at:
                if url and worker.rank == 0:
                    worker.save(url)
                return drawn, None, loader.state_dict()
    return drawn, {epoch: worker.ledger.report(epoch) for epoch in drawn}, None


def plain(passes: int = 3) -> list[list[float]]:
    loader = loader_of()
    return [[x for (batch,) in loader for x in batch.tolist()] for _ in range(passes)]


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
    with pytest.raises(BadInput, match="shoal run --checkpoint"):
        run_workers(2, lambda worker: train(worker, state, False), "asp")
    with pytest.raises(BadInput, match="shoal run --checkpoint"):
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


def counted(worker: Worker, epochs: int = 1) -> tuple[torch.nn.Linear, Any, Any, Any]:
    """A model whose weight counts the steps made with it; loader, passes, and a step."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(torch.arange(12.0), 2))

    def step() -> None:
        optimizer.zero_grad()
        (-model(torch.ones(1, 1))).sum().backward()
        optimizer.step()

    return model, loader, worker.epochs(epochs), step


@pytest.mark.parametrize("sync", ["bsp", "allreduce", "asp"])
def test_a_job_that_goes_on_from_a_checkpoint_knows_better_than_a_newer_state(
    tmp_path: Path, sync: str
) -> None:
    """Steps that are in no model are made again, whatever the script's own file says is done."""
    own: dict[str, Any] = {}

    def first(worker: Worker) -> None:
        model, loader, epochs, step = counted(worker)
        for _ in epochs:
            for made, _ in enumerate(loader, start=1):
                step()
                if made == 1:
                    worker.save(str(tmp_path))
                if made == 4:
                    own.update(model=model.state_dict(), loader=loader.state_dict())
                    return

    def second(worker: Worker) -> tuple[float, Any]:
        model, loader, epochs, step = counted(worker, 2)
        model.load_state_dict(own["model"])
        loader.load_state_dict(own["loader"])
        for _ in epochs:
            for _ in loader:
                step()
        return model.weight.item(), [worker.ledger.report(epoch) for epoch in (0, 1)]

    run_workers(1, first, sync)
    [(steps, reports)] = run_workers(1, second, sync, resume=str(tmp_path))
    assert steps == 12
    assert all(report.exactly_once for report in reports)


@pytest.mark.parametrize("sync", ["bsp", "asp", "easgd:4"])
def test_what_was_drawn_and_not_stepped_with_is_left_to_who_replaces_a_worker(sync: str) -> None:
    with connect("memory://", timeout=JOIN_S) as client:
        (maker,) = local_workers(1, sync, client=client)
        first, drawn = maker(), []
        _, loader, _, step = counted(first)
        for made, x in enumerate(loader):
            state = loader.state_dict()
            if made == 2:  # it dies
                break
            step()
            drawn.append(x.tolist())
        with maker() as second:
            _, loader, _, step = counted(second)
            loader.load_state_dict(state)
            for x in loader:
                step()
                drawn.append(x.tolist())
            report = second.ledger.report(0)
        first.close(tells=False)
    if sync != "easgd:4":  # which tells the ledger by the block
        assert sorted(drawn) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert report.exactly_once


def test_within_a_life_one_may_go_back_where_the_order_is_fixed() -> None:
    def script(worker: Worker) -> list[Any]:
        _, loader, _, step = counted(worker)
        found: list[Any] = []
        for made, _ in enumerate(loader, start=1):
            step()
            if made == 4:
                state = loader.state_dict()
            if made == 5:
                break
        for _ in range(2):  # within the pass, and when it is over
            loader.load_state_dict(state)
            found.append([])
            for x in loader:
                step()
                found[-1].append(x.tolist())
        return found

    assert run_workers(1, script, "bsp") == [[[[8, 9], [10, 11]]] * 2]
    with pytest.raises(BadInput, match="was handed out is not handed out again"):
        run_workers(1, script, "asp")


@pytest.mark.parametrize(("sync", "workers"), [("bsp", 1), ("bsp", 2), ("allreduce", 2), ("asp", 1)])
def test_a_job_that_began_with_a_late_pass_goes_on_from_its_checkpoint(
    tmp_path: Path, sync: str, workers: int
) -> None:
    """Its ledger was never told of the passes before."""
    before = run_workers(workers, lambda worker: train(worker, None, True, 5, LATER), sync)

    def second(worker: Worker) -> tuple[Any, Any, Any]:
        return train(worker, before[worker.rank][2], True, 5, (3, 2), url=str(tmp_path))

    def third(worker: Worker) -> tuple[Any, Any, Any]:
        return train(worker, before[worker.rank][2], False, 5)

    middle = run_workers(workers, second, sync)
    after = run_workers(workers, third, sync, resume=str(tmp_path))
    whole = plain(5)
    drawn = [x for one, *_ in [*before, *middle, *after] for x in one[3]]
    assert sorted(drawn) == sorted(whole[3])
    for one, reports, _ in after:
        assert sorted(one) == [3, 4]
        assert all(report.exactly_once for report in reports.values())


@pytest.mark.parametrize("first", ["model", "loader"])
@pytest.mark.parametrize(("sync", "workers"), [("bsp", 1), ("bsp", 2), ("asp", 1)])
def test_the_state_of_the_instant_that_a_new_job_loads_goes_on_there(
    tmp_path: Path, sync: str, workers: int, first: str
) -> None:
    """`worker.load` leaves the ledger as it is."""
    before = run_workers(workers, lambda worker: train(worker, None, True, url=str(tmp_path)), sync)

    def script(worker: Worker) -> Any:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model, optimizer, loader = worker.prepare(model, optimizer, loader_of())
        calls = [lambda: worker.load(str(tmp_path)), lambda: loader.load_state_dict(before[worker.rank][2])]
        for call in calls if first == "model" else reversed(calls):
            call()
        drawn: dict[int, list[float]] = {}
        for epoch in worker.epochs(3):
            drawn[epoch] = []
            for (x,) in loader:
                drawn[epoch] += x.tolist()
                optimizer.zero_grad()
                model(x.view(-1, 1)).square().mean().backward()
                optimizer.step()
        return drawn

    after = run_workers(workers, script, sync)
    assert all(sorted(drawn) == [1, 2] for drawn in after)
    second = [x for drawn in [*(one for one, *_ in before), *after] for x in drawn[1]]
    assert sorted(second) == sorted(plain()[1])


def test_the_end_of_a_pass_of_which_some_had_nothing_is_one_step() -> None:
    """Of the last batch, of one sample, worker 1 sees nothing: its own state is of a step before."""

    def first(worker: Worker) -> Any:
        states = []
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model, optimizer, loader = worker.prepare(model, optimizer, loader_of())
        for (x,) in loader:
            optimizer.zero_grad()
            model(x.view(-1, 1)).square().mean().backward()
            optimizer.step()
            states.append(loader.state_dict())
        return states

    before = run_workers(2, first, "bsp")
    assert [len(states[-1]["done"]) for states in before] == [5, 4]
    after = run_workers(2, lambda worker: train(worker, before[worker.rank][-1], False), "bsp")
    for drawn, *_ in after:
        assert drawn[0] == []
    for epoch in (1, 2):
        assert sorted(x for drawn, *_ in after for x in drawn[epoch]) == sorted(plain()[epoch])
