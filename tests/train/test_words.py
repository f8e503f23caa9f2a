"""Every word trains: the conformance suite, and what is special to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from tests.train.models import ShoalModel, dense_values, loader, steps

from shoal.sync import (
    Bounded,
    Difference,
    Each,
    Elastic,
    Every,
    First,
    Gradient,
    GradientSum,
    Mean,
    Neighbours,
    Outer,
    Parameters,
    Policy,
    Round,
    Share,
    Staleness,
    WithNeighbours,
    parse,
)
from shoal.train.worker import Worker

ASP = parse("asp")
WORDS = [
    "bsp",
    "quorum:0.5",
    "ssp:0",
    "ssp:2",
    "delay:1",
    "asp",
    "asp,scale=staleness",
    "softsync:1",
    "softsync:2",
    "dcasgd:0.04",
    "downpour:2,3",
    "average:4",
    "average:4,state=average",
    "bmuf:4",
    "easgd:3",
    "diloco:4",
    "allreduce",
    "allreduce,rows=ssp:1",
    "gossip",
    "hogwild",
]
# Of no word.
OWN = {
    "a quorum of models": Policy(Round(), First(0.5), Mean(), Parameters(3), ASP, "average", "worker"),
    "bounded by twos": Policy(Bounded(2), Every(2), Share(), Gradient()),
    "gossip at times": Policy(WithNeighbours(), Neighbours(), Mean(), Parameters(3), ASP, dense_home="peers"),
    "sums that are bounded": Policy(Bounded(1), Each(), Staleness(), GradientSum(2, 3)),
    "a force with momentum": Policy(
        Bounded(1), Each(), Elastic(), Difference(3, Outer(momentum=0.3)), ASP, dense_home="worker"
    ),
}
SAMPLES, BATCH, EPOCHS = 90, 12, 8


def train(worker: Worker) -> tuple[float, float, int, float, Any]:
    model = ShoalModel()
    dense_values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = worker.prepare(model, optimizer, loader(SAMPLES, BATCH, True))
    losses = list(steps(model, optimizer, batches, EPOCHS))
    model.eval()
    with torch.no_grad():
        everything = next(iter(loader(SAMPLES, SAMPLES, False)))
        final = float(torch.nn.functional.mse_loss(model(*everything[:2]), everything[2]))
    worker.barrier()
    reports = [worker.ledger.report(epoch) for epoch in range(1, EPOCHS)]  # 8 are kept, a barrier is one
    return final, losses[0], len(losses), worker.samples, reports


def alone() -> float:
    return float(run_workers(1, train, "bsp")[0][0])


@pytest.mark.parametrize("word", [*WORDS, *OWN])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_word_trains_and_uses_every_sample(word: str, workers: int) -> None:
    results = run_workers(workers, train, OWN.get(word, word))
    start = float(torch.nn.functional.mse_loss(*_start()))
    for final, _, made, _, _ in results:
        assert final < 0.85 * start, (final, start)  # all workers see the job's model after a pass
        assert made > 0
    for report in results[0][4]:
        assert report.done == report.units
        assert report.exactly_once, str(report)


def _start() -> tuple[torch.Tensor, torch.Tensor]:
    import shoal

    model = ShoalModel()
    dense_values(model)
    with shoal.connect("memory://") as client:
        model.emb.bind(client, shoal.optim.SGD(lr=0.1))
        ids, x, y = next(iter(loader(SAMPLES, SAMPLES, False)))
        with torch.no_grad():
            return model(ids, x), y
