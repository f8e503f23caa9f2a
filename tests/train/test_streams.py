"""Streams under every word: whole batches in turn, a pass that ends for all together, and its proof."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, IterableDataset

import shoal
from shoal.errors import BadInput
from shoal.train.worker import Worker

WORDS = ["bsp", "quorum:0.5", "ssp:1", "delay:1", "asp", "asp:staleness", "softsync:2", "dcasgd:0.1"]
WORDS += ["downpour:2,2", "average:2", "bmuf:2", "easgd:2", "diloco:2", "allreduce", "gossip"]


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in range(self.count))


def train(worker: Worker, stream: Any, epochs: int = 2) -> tuple[list[list[float]], Any, int]:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, batches = worker.prepare(model, optimizer, stream)
    seen: list[list[float]] = []
    for _ in worker.epochs(epochs):
        seen.append([])
        for x in batches:
            seen[-1].extend(x.flatten().tolist())
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return seen, worker.ledger.report(), worker.epoch


@pytest.mark.parametrize("sync", WORDS)
@pytest.mark.parametrize("count", [11, 2])
def test_a_stream_is_used_in_turn_and_its_pass_ends(sync: str, count: int) -> None:
    """Eleven numbers in batches of two: six batches for three workers; or one batch for all three."""
    found = run_workers(3, lambda worker: train(worker, DataLoader(Numbers(count), batch_size=2)), sync)
    batches = -(-count // 2)
    lost = [0, 0, 0]
    for rank, (seen, report, epoch) in enumerate(found):
        mine = [float(n) for n in range(count) if n // 2 % 3 == rank]
        assert (seen, epoch) == ([mine, mine], 2)
        assert (report.epoch, report.units) == (1, batches)
        lost[rank] = len(range(rank, batches, 3)) - report.by_rank[rank]
        assert report.used.get(0, 0) == report.units - report.done
    assert report.done == batches - sum(lost)
    if sync != "quorum:0.5":  # which drops what comes late
        assert sum(lost) == 0
        assert report.exactly_once


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_generator_is_one_pass(sync: str) -> None:
    def script(worker: Worker) -> Any:
        return train(worker, (torch.full((2, 1), float(n)) for n in range(5)))

    seen = [one for one, _, _ in run_workers(2, script, sync)]
    assert seen == [[[0.0, 0.0, 2.0, 2.0, 4.0, 4.0], []], [[1.0, 1.0, 3.0, 3.0], []]]


@pytest.mark.parametrize("sync", WORDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_samples_is_one_step_that_changes_nothing(sync: str, reduction: str) -> None:
    """Of a mean over nothing the gradient is NaN; the loop makes a step, and no other is made for it."""
    stream = [torch.ones(size, 1) for size in (2, 0, 2, 2, 0, 2)]

    def script(worker: Worker) -> tuple[list[int], int, int, float, bool]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, batches = worker.prepare(model, optimizer, stream, reduction=reduction)
        seen = []
        for x in batches:
            seen.append(len(x))
            optimizer.zero_grad()
            getattr(model(x), reduction)().backward()
            optimizer.step()
        weight = float(model.weight.detach())
        return seen, worker.steps_made, worker.step, weight, worker.ledger.report().exactly_once

    for rank, (seen, steps, clock, weight, once) in enumerate(run_workers(2, script, sync)):
        assert (seen, steps) == ([[2, 2, 0], [0, 2, 2]][rank], 3)
        assert math.isfinite(weight)
        if sync in ("bsp", "allreduce"):  # a step is that of the worker with samples, or of both
            assert (clock, weight) == (3, pytest.approx(-0.03 if reduction == "mean" else -0.06))
        assert once or sync == "quorum:0.5"


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_of_bags_count_what_the_script_says(workers: int) -> None:
    """Ids and offsets disagree on how many samples there are: only the script knows."""
    bags = [(torch.arange(3 * n), torch.arange(0, 3 * n, 3)) for n in (1, 3)]

    def script(worker: Worker, says: bool) -> tuple[list[float], float]:
        bag = shoal.nn.EmbeddingBag("bags", dim=1, mode="sum", init=shoal.init.Zeros())
        optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
        bag, optimizer, batches = worker.prepare(bag, optimizer, bags)
        for ids, offsets in batches:
            optimizer.zero_grad()
            bag(ids, offsets).mean().backward()
            if says:
                worker.weight(len(offsets))
            optimizer.step()
        return bag.table.pull([0, 8]).flatten().tolist(), worker.samples

    found = run_workers(workers, lambda worker: script(worker, True))
    if workers == 2:  # one round of one sample and three: as four in one batch
        assert found == [([-0.5, -0.25], 1.0), ([-0.5, -0.25], 3.0)]
    else:
        assert found == [([pytest.approx(-4 / 3), pytest.approx(-1 / 3)], 4.0)]
    with pytest.raises(BadInput, match=r"its parts hold (1, 3|3, 9).*worker\.weight\(n\)"):
        run_workers(workers, lambda worker: script(worker, False))
