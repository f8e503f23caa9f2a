"""Rows by one request for all tables, and a batch ahead: what is sent, and how old what comes may be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import JOIN_S, Notes, run_workers
from tests.train.models import IDS, ShoalModel, dense_values, loader, steps

import shoal
from shoal.errors import BadInput
from shoal.train.worker import Worker

ITEM = {"keys": lambda batch: {"items": batch[0]}}


def trained(worker: Worker, **options: Any) -> tuple[torch.Tensor, int]:
    """The table's rows after training, and the pulls that it took."""
    model = ShoalModel()
    dense_values(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model, optimizer, batches = worker.prepare(model, optimizer, loader(90, 12, True), **options)
    notes, before = Notes(worker), worker.client.stats()["pulls"]
    list(steps(model, optimizer, batches, 2))
    worker.barrier()
    pulls = worker.client.stats()["pulls"] - before - notes.pulls
    return torch.from_numpy(model.emb.table.pull(list(range(IDS)))), pulls


@pytest.mark.parametrize("keys", ["items", "emb", "module"])
def test_a_table_is_named_by_itself_by_its_module_s_name_or_by_the_module(keys: str) -> None:
    plain = run_workers(3, trained, "bsp")

    def named(worker: Worker) -> tuple[torch.Tensor, int]:
        model: list[ShoalModel] = []
        worker.prepare = lambda *objects, prepare=worker.prepare, **options: (  # type: ignore[method-assign]
            model.append(objects[0]) or prepare(*objects, **options)
        )
        return trained(worker, keys=lambda batch: {model[0].emb if keys == "module" else keys: batch[0]})

    for (rows, pulls), (expected, pulls_before) in zip(run_workers(3, named, "bsp"), plain, strict=True):
        assert torch.equal(rows, expected)
        assert pulls == pulls_before  # the pull is another one, not one more


class Counter(torch.nn.Module):
    """Rows that count the updates they have had: the first id's is trained, the second's only read."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"dim": 1, "optimizer": shoal.optim.SGD(lr=1.0), "init": shoal.init.Zeros()}
        self.own = shoal.nn.Embedding("counts", **rows)
        self.other = shoal.nn.Embedding("counts", **rows)
        self.other.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.own(ids[:1]), self.other(ids[1:])])


def counting(worker: Worker, batches: list[torch.Tensor], prefetch: int) -> Any:
    model = Counter()
    optimizer = torch.optim.SGD([model.own.weight], lr=1.0)
    keys = {"keys": lambda batch: {"own": batch[:1], "other": batch[1:]}, "prefetch": prefetch}
    return worker.prepare(model, optimizer, batches, **keys)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_others_pushes_come_a_step_later_and_one_s_own_at_once(prefetch: int) -> None:
    """Key 0 is pushed by this worker, key 1 by another client while each batch computes."""

    def script(worker: Worker) -> list[tuple[float, float]]:
        other = worker.client.fork().table("counts", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        model, optimizer, batches = counting(worker, [torch.tensor([0, 1]) for _ in range(6)], prefetch)
        read = []
        for ids in batches:
            optimizer.zero_grad()
            counts = model(ids)
            (-counts[0]).sum().backward()
            other.push([1], -np.ones((1, 1), np.float32))
            optimizer.step()
            read.append(tuple(counts.detach().reshape(-1).tolist()))
        return read

    read = run_workers(1, script, "asp,scale=1")[0]
    assert read == [(step, max(0, step - prefetch)) for step in range(6)]


def test_a_step_between_drawing_a_batch_and_its_forward_is_seen() -> None:
    def script(worker: Worker) -> list[float]:
        model, optimizer, batches = counting(worker, [torch.tensor([0, 1]) for _ in range(4)], 0)
        read = []
        for ids in batches:
            optimizer.step()  # of the batch before
            optimizer.zero_grad()
            counts = model(ids)
            (-counts[0]).sum().backward()
            read.append(float(counts[0].detach()))
        return read

    assert run_workers(1, script, "bsp")[0] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("slack", "prefetch"), [(0, 0), (0, 1), (2, 1)])
def test_rows_are_at_most_the_bound_and_the_prefetch_behind(slack: int, prefetch: int) -> None:
    """ssp:s reads hold all steps up to c-s-1 of others, prefetched ones up to c-s-2, and all of one's own."""
    made, reads, changed = 12, ([], []), threading.Condition()

    def script(worker: Worker) -> None:
        batches = [torch.tensor([worker.rank, 1 - worker.rank]) for _ in range(2 * made)]
        model, optimizer, batches = counting(worker, batches, prefetch)
        for step, ids in enumerate(batches):
            optimizer.zero_grad()
            counts = model(ids)
            with changed:
                reads[worker.rank].append(tuple(counts.detach().reshape(-1).tolist()))
                changed.notify_all()
                if worker.rank == 0:  # the slow one: it waits until the other may not go on
                    far = min(step + slack + 1, made)
                    assert changed.wait_for(lambda: len(reads[1]) >= far, JOIN_S)  # noqa: B023
            (-counts[0]).sum().backward()
            optimizer.step()

    run_workers(2, script, f"ssp:{slack},scale=1")
    for read in reads:
        assert [own for own, _ in read] == list(range(made))
        assert all(others >= step - slack - prefetch for step, (_, others) in enumerate(read))
    # The fast worker reads all that its bound grants and nothing more: the bound above was met.
    assert [others for _, others in reads[1]] == [max(0, step - slack - prefetch) for step in range(made)]


@pytest.mark.parametrize("word", ["bsp", "quorum:0.5", "allreduce", "asp,scale=staleness"])
def test_words_that_cannot_prefetch_say_so(word: str) -> None:
    with pytest.raises(BadInput, match=r"prefetch=1 under .*Take prefetch=0"):
        run_workers(1, lambda worker: trained(worker, **ITEM, prefetch=1), word)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": 1}, "prefetch=1 without keys="),
        ({**ITEM, "prefetch": 2}, "prefetch is 2; allowed: 0, or 1"),
        ({**ITEM, "split": False}, "keys= without a loader to divide"),
        ({"keys": lambda batch: {"users": batch[0]}}, "keys= names 'users'; there are 'emb', 'items'"),
        ({"keys": lambda batch: batch[0]}, "keys= gave a Tensor; it must give a dict"),
        ({"keys": lambda batch: {"items": batch[1]}}, "keys are float32"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run_workers(1, lambda worker: trained(worker, **options), "asp")


def test_a_loop_that_ends_early_leaves_nothing_behind() -> None:
    def script(worker: Worker) -> list[float]:
        model, optimizer, batches = counting(worker, [torch.tensor([0, i]) for i in range(1, 5)], 1)
        read = []
        for _ in range(3):
            for ids in batches:
                optimizer.zero_grad()
                counts = model(ids)
                (-counts[0]).sum().backward()
                optimizer.step()
                read.append(float(counts[0].detach()))
                if len(read) % 2 == 0:
                    break
        return read

    assert run_workers(1, script, "asp")[0] == [float(step) for step in range(6)]


def counts_of(model: torch.nn.Module) -> list[float]:
    return model(torch.tensor([0, 1])).detach().flatten().tolist()


def loads_state(worker: Worker, model: torch.nn.Module, place: Path) -> None:
    rows = {"weight.keys": torch.tensor([0, 1]), "weight.values": torch.full((2, 1), 50.0)}
    model.own.load_state_dict(rows)


def loads_checkpoint(worker: Worker, model: torch.nn.Module, place: Path) -> None:
    worker.load(str(place))


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("loads", [loads_state, loads_checkpoint])
def test_rows_that_were_pulled_ahead_do_not_outlive_a_load(
    loads: Callable[..., None], when: str, prefetch: int, tmp_path: Path
) -> None:
    """Both rows are 50 from the third step on: loaded behind the second, or before the third's forward."""

    def script(worker: Worker) -> list[list[float]]:
        model, optimizer, batches = counting(worker, [torch.tensor([0, 1]) for _ in range(5)], prefetch)
        if loads is loads_checkpoint:
            model.own.table.assign([0, 1], np.full((2, 1), 50.0, np.float32))
            worker.save(str(tmp_path))
            model.own.table.assign([0, 1], np.zeros((2, 1), np.float32))
        read = []
        for number, ids in enumerate(batches):
            if when == "before" and number == 2:
                loads(worker, model, tmp_path)
            optimizer.zero_grad()
            counts = model(ids)
            (-counts[0]).sum().backward()
            optimizer.step()
            read.append(counts.detach().flatten().tolist())
            if when == "after" and number == 1:
                loads(worker, model, tmp_path)
        return read

    expected = [[0.0, 0.0], [1.0, 0.0], [50.0, 50.0], [51.0, 50.0], [52.0, 50.0]]
    assert run_workers(1, script, "asp,scale=1") == [expected]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("leaves", ["break", "end", "break of a reading loop"])
def test_rows_that_a_loop_left_unused_are_not_those_of_a_later_forward(leaves: str, prefetch: int) -> None:
    def script(worker: Worker) -> list[float]:
        other = worker.client.fork().table("counts", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        model, optimizer, batches = counting(worker, [torch.tensor([0, 1]) for _ in range(3)], prefetch)
        for number, ids in enumerate(batches):
            if number == 2:
                if leaves == "break":
                    break
                continue
            optimizer.zero_grad()
            (-model(ids)[0]).sum().backward()
            optimizer.step()
        if leaves == "break of a reading loop":
            with torch.no_grad():
                for _ in batches:
                    break
        other.push([1], -5 * np.ones((1, 1), np.float32))
        return counts_of(model)

    assert run_workers(1, script, "asp,scale=1") == [[2.0, 5.0]]
