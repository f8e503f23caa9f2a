"""Units that a worker holds for far too long are trained by others, and by nobody else."""

import threading
import time
from typing import Any

import pytest
import torch
from tests.train.crew import JOIN_S, run_workers
from torch.utils.data import DataLoader, TensorDataset

from shoal.data import ledger
from shoal.train.worker import Worker

BATCHES = 6


def prepared(worker: Worker) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    loader = DataLoader(TensorDataset(torch.ones(2 * BATCHES, 1)), batch_size=2)
    return worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


@pytest.mark.parametrize("word", ["asp", "ssp:20", "downpour:1,1", "easgd:1", "hogwild"])
def test_a_unit_that_is_held_too_long_is_trained_elsewhere(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(ledger, "LATE_S", 0.2)
    holds = threading.Event()  # rank 1 has a unit

    def script(worker: Worker) -> tuple[dict[int, int], float]:
        model, optimizer, loader = prepared(worker)
        assert worker.rank == 1 or holds.wait(JOIN_S)
        for (x,) in loader:
            holds.set()
            deadline = time.monotonic() + JOIN_S
            while worker.rank == 1 and worker.rounds.report(0)["done"] < 2 * BATCHES:
                assert time.monotonic() < deadline, "nobody has taken over what it holds"
                time.sleep(0.01)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return worker.ledger.report(0).used, float(model.weight.detach())

    results = run_workers(2, script, word)
    assert [used for used, _ in results] == [{1: 2 * BATCHES}] * 2  # it makes no step of its own
    if word in ("asp", "ssp:20", "downpour:1,1"):
        # Each unit is half of a batch, in one step of 0.1.
        assert [weight for _, weight in results] == pytest.approx([-0.1 * BATCHES] * 2)


def test_a_worker_that_was_late_leaves_the_rest_of_its_lease_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "LATE_S", 1.0)
    leases = iter([[(0, 1)], [(1, 5)], [(5, 6)], []])
    mine = ledger.LeasedLedger(0, 1, lambda *_: next(leases))
    drawn = []
    for unit in mine.units(0, 6):
        drawn.append(unit)
        mine.spent(9.0 if unit == 2 else 0.1)
    assert drawn == [0, 1, 2, 5]
