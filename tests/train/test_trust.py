"""Workers that are trusted less, or whose gradients are not finite: what they send counts as little."""

import math
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers

import shoal.nn
from shoal.errors import BadInput
from shoal.train.worker import Worker

STEPS, BAD_STEP = 3, 1
WORDS = ["bsp", "quorum:1", "asp", "ssp:1", "softsync:2", "average:1", "downpour:1,1", "gossip", "allreduce"]


class Counts(torch.nn.Module):
    """Its gradients are -1 times what it is called with, of a row and of a dense parameter alike."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = shoal.nn.Embedding("rows", dim=1)
        self.dense = torch.nn.Parameter(torch.zeros(1))

    def forward(self, times: float) -> torch.Tensor:
        return -times * (self.rows(torch.tensor([7])).sum() + self.dense.sum())


def found(worker: Worker, model: Any) -> tuple[float, float]:
    """The row and the dense parameter, once all have made their steps."""
    worker.barrier()
    assert worker.strategy is not None
    worker.strategy.refresh()
    return model.rows.table.pull([7]).item(), model.dense.item()


def one_step(trust: float) -> Any:
    """Of worker 0 with a gradient of -1, and of worker 1, which is trusted so much, with one of -2."""

    def script(worker: Worker) -> Any:
        model = Counts()
        model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        worker.trust = trust if worker.rank == 1 else 1.0
        model(1.0 + worker.rank).backward()
        optimizer.step()
        return *found(worker, model), worker.progress.value.empty_steps

    return script


@pytest.mark.parametrize("sync", ["bsp", "quorum:1", "allreduce"])
@pytest.mark.parametrize("trust", [1.0, 0.1, 0.0])
def test_in_a_round_trust_is_a_weight_of_rows_and_dense_alike(sync: str, trust: float) -> None:
    mean = (1.0 + 2.0 * trust) / (1.0 + trust)
    for rank, (row, dense, empty) in enumerate(run_workers(2, one_step(trust), sync)):
        assert (row, dense) == (pytest.approx(mean), pytest.approx(mean))
        assert empty == (trust == 0.0 and rank == 1)


@pytest.mark.parametrize("sync", ["asp", "ssp:1"])
@pytest.mark.parametrize("trust", [1.0, 0.1, 0.0])
def test_where_each_push_is_applied_trust_scales_it(sync: str, trust: float) -> None:
    for row, dense, _ in run_workers(2, one_step(trust), sync):
        assert (row, dense) == (pytest.approx(1.0 + 2.0 * trust), pytest.approx(1.0 + 2.0 * trust))


def not_finite(value: float) -> Any:
    """Steps with gradients of -1, but for one of worker 1."""

    def script(worker: Worker) -> Any:
        worker.bears_nan = True
        model = Counts()
        model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(value if (worker.rank, step) == (1, BAD_STEP) else 1.0)
            loss.backward()
            worker.report(loss=loss)
            optimizer.step()
        said = worker.progress.value
        return *found(worker, model), said.empty_steps, said.nan_step

    return script


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sync", WORDS)
def test_where_the_job_bears_it_a_worker_abstains_from_what_is_not_finite(sync: str, value: float) -> None:
    results = run_workers(2, not_finite(value), sync)
    assert [empty for _, _, empty, _ in results] == [0, 1]
    assert results[0][3] is None
    assert results[1][3] is not None
    for row, dense, *_ in results:
        assert math.isfinite(row)
        assert math.isfinite(dense)
        if sync in ("bsp", "quorum:1", "allreduce"):
            assert (row, dense) == (STEPS, STEPS)  # of that step the mean of worker 0 alone
        elif sync in ("asp", "ssp:1"):
            assert (row, dense) == (2 * STEPS - 1, 2 * STEPS - 1)


def test_elsewhere_it_raises() -> None:
    def script(worker: Worker) -> None:
        worker.report(loss=math.nan)

    with pytest.raises(BadInput, match="worker 0, step 0: the loss is nan"):
        run_workers(1, script)
