"""Workers that are trusted less, or whose gradients are not finite: what they send counts as little."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers, several

import shoal.nn
from shoal.errors import BadInput
from shoal.train.progress import progress_path, write_trust
from shoal.train.worker import Worker

STEPS, BAD_STEP = 3, 1
REFUSED_STEPS = 4  # even, for softsync:2
WORDS = ["bsp", "quorum:1", "asp", "ssp:1", "softsync:2", "average:1", "downpour:1,1", "gossip", "allreduce"]


class Counts(torch.nn.Module):
    """Its gradients are -1 times what it is called with, of a row and of a dense parameter alike."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = shoal.nn.Embedding("rows", dim=1, init=shoal.init.Zeros())
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


@pytest.mark.parametrize("sync", ["asp", "ssp:1", "dcasgd:1e-9", "downpour:1,1"])
@pytest.mark.parametrize("trust", [1.0, 0.1, 0.0])
def test_where_each_push_is_applied_trust_scales_it(sync: str, trust: float) -> None:
    for row, dense, _ in run_workers(2, one_step(trust), sync):
        assert (row, dense) == (pytest.approx(1.0 + 2.0 * trust), pytest.approx(1.0 + 2.0 * trust))


@pytest.mark.parametrize(
    "sync", ["allreduce,rows=asp", "bsp,rows=asp", "quorum:1,rows=asp", "average:1", "bmuf:1"]
)
@pytest.mark.parametrize("trust", [1.0, 0.1, 0.0])
def test_rows_and_dense_are_scaled_or_weighed_each_by_its_own_word(sync: str, trust: float) -> None:
    for row, dense, _ in run_workers(2, one_step(trust), sync):
        assert row == pytest.approx(1.0 + 2.0 * trust)
        assert dense == pytest.approx((1.0 + 2.0 * trust) / (1.0 + trust))


@pytest.mark.parametrize("sync", ["asp,rows=bsp", "downpour:1,1,rows=bsp"])
@pytest.mark.parametrize("trust", [1.0, 0.1, 0.0])
def test_rows_with_rounds_beside_dense_ones_without(sync: str, trust: float) -> None:
    for row, dense, _ in run_workers(2, one_step(trust), sync):
        assert row == pytest.approx((1.0 + 2.0 * trust) / (1.0 + trust))
        assert dense == pytest.approx(1.0 + 2.0 * trust)


def test_under_softsync_one_that_is_scaled_is_a_tenth_of_its_part() -> None:
    for row, dense, _ in run_workers(2, one_step(0.1), "softsync:2"):
        assert (row, dense) == (pytest.approx((1.0 + 2.0 * 0.1) / 2), pytest.approx((1.0 + 2.0 * 0.1) / 2))


@pytest.mark.parametrize("trust", [1.0, 0.1, 0.0])
def test_under_easgd_trust_is_the_force_on_the_centre(trust: float) -> None:
    with several(2, "easgd:1") as workers:
        prepared = []
        for worker in workers:
            model = Counts()
            prepared.append(worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0)))
        workers[1].trust = trust
        for _ in range(2):  # the forces are those of before the second step
            for rank, (model, optimizer) in enumerate(prepared):
                optimizer.zero_grad()
                model(1.0 + rank).backward()
                optimizer.step()
        centre = 0.45 * 1.0
        centre += trust * 0.45 * (2.0 - centre)
        assert workers[0].strategy is not None
        workers[0].strategy.refresh()
        assert prepared[0][0].dense.item() == pytest.approx(centre)


def test_what_was_summed_up_before_a_worker_is_refused_counts_nothing_either() -> None:
    def script(worker: Worker) -> Any:
        model = Counts()
        model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(2):
            worker.trust = 0.0 if (worker.rank, step) == (1, 1) else 1.0
            optimizer.zero_grad()
            model(1.0 + worker.rank).backward()
            optimizer.step()
        return found(worker, model)

    for sync, row in (("downpour:2,2", 2.0 + 2.0), ("average:2", 2.0 + 2.0)):
        for seen in run_workers(2, script, sync):
            assert seen == (pytest.approx(row), pytest.approx(2.0)), sync


def test_one_that_is_refused_within_a_block_has_no_part_in_its_exchange(tmp_path: Path) -> None:
    progress_path(tmp_path, 1).parent.mkdir()

    def script(worker: Worker) -> Any:
        model = Counts()
        model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        worker.job = tmp_path if worker.rank == 1 else None
        for step in range(2):
            if (worker.rank, step) == (1, 1):
                write_trust(tmp_path, 1, 0.0)  # which nobody tells the worker
            optimizer.zero_grad()
            model(1.0 + worker.rank).backward()
            optimizer.step()
        return found(worker, model)

    for _, dense in run_workers(2, script, "average:2"):
        assert dense == pytest.approx(2.0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.5),
}
SERVER_WORDS = ["bsp", "quorum:1", "ssp:1", "asp", "softsync:2", "dcasgd:0.5", "downpour:1,1"]
ALLREDUCE_WORDS = ["allreduce", "allreduce,rows=asp", "allreduce,rows=softsync:2"]
OUTER = {
    "bmuf:1": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5),
    "diloco:1": lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
}


def plain(name: str, steps: int) -> float:
    """What torch makes of so many gradients of -1."""
    one = torch.nn.Parameter(torch.zeros(1))
    optimizer = OPTIMIZERS[name]([one])
    for _ in range(steps):
        one.grad = torch.tensor([-1.0])
        optimizer.step()
    return one.item()


def plain_blocks(name: str, sync: str) -> float:
    """Of blocks of one step, with the outer rule."""
    one, centre = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer, outer = OPTIMIZERS[name]([one]), OUTER[sync]([centre])
    for _ in range(REFUSED_STEPS):
        one.data.copy_(centre.data)
        one.grad = torch.tensor([-1.0])
        optimizer.step()
        centre.grad = centre.data - one.data
        outer.step()
    return centre.item()


def plain_elastic(name: str) -> float:
    """The centre of one worker's forces, of before each step but the first."""
    one, centre = torch.nn.Parameter(torch.zeros(1)), 0.0
    optimizer = OPTIMIZERS[name]([one])
    for step in range(REFUSED_STEPS):
        if step:
            force = 0.45 * (one.item() - centre)
            centre += force
            one.data -= force
        one.grad = torch.tensor([-1.0])
        optimizer.step()
    return centre


def refused(name: str) -> Any:
    """Steps of worker 0 with gradients of -1, and of worker 1, which is refused, with others."""

    def script(worker: Worker) -> Any:
        model = Counts()
        model, optimizer = worker.prepare(model, OPTIMIZERS[name](model.parameters()))
        worker.trust = 0.0 if worker.rank == 1 else 1.0
        for _ in range(REFUSED_STEPS):
            optimizer.zero_grad()
            model(1.0 if worker.rank == 0 else -7.0).backward()
            optimizer.step()
        return *found(worker, model), worker.progress.value.empty_steps

    return script


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "sync",
    [*SERVER_WORDS, "average:1", *OUTER, "easgd:1", *ALLREDUCE_WORDS, "hogwild"],
)
def test_one_that_is_refused_changes_nothing_whatever_the_optimizer_remembers(sync: str, name: str) -> None:
    by_twos = REFUSED_STEPS // 2
    row = plain(name, by_twos if "softsync" in sync else REFUSED_STEPS)
    if sync in OUTER:
        dense = plain_blocks(name, sync)
    elif sync == "easgd:1":
        dense = plain_elastic(name)
    else:
        dense = plain(name, by_twos if sync == "softsync:2" else REFUSED_STEPS)
    results = run_workers(2, refused(name), sync)
    assert [empty for *_, empty in results] == [0, REFUSED_STEPS]
    for seen_row, seen_dense, _ in results:
        assert seen_row == pytest.approx(row, rel=1e-4)
        assert seen_dense == pytest.approx(dense, rel=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_gossip_one_that_is_refused_adds_nothing_to_rows_and_only_halves_what_others_add(
    name: str,
) -> None:
    """Its model stays in the mix, where the other's steps reach both: their mean is half of them."""
    for row, dense, _ in run_workers(2, refused(name), "gossip"):
        assert row == pytest.approx(plain(name, REFUSED_STEPS), rel=1e-4)
        if name != "momentum":  # whose decay depends on the values
            assert dense == pytest.approx(plain(name, REFUSED_STEPS) / 2, rel=1e-4)


def test_where_one_is_refused_and_the_other_counts_for_nothing_no_optimizer_steps() -> None:
    def script(worker: Worker) -> Any:
        model = Counts()
        model, optimizer = worker.prepare(model, OPTIMIZERS["momentum"](model.parameters()))
        values = []
        for step in range(3):
            worker.trust = 0.0 if (worker.rank, step) == (1, 1) else 1.0
            worker.weight(0.0 if (worker.rank, step) == (0, 1) else 1.0)
            optimizer.zero_grad()
            model(1.0).backward()
            optimizer.step()
            values.append(model.dense.item())
        return values

    first, second = run_workers(2, script, "allreduce")
    assert first == second
    assert first[0] == first[1] != first[2]


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


def test_reports_of_a_loss_are_counted_and_nothing_else() -> None:
    def script(worker: Worker) -> Any:
        worker.bears_nan = True
        counts = []
        for told in ({"auc": 0.5}, {"loss": 0.7}, {"auc": 0.6}, {"loss": 0.7}, {"loss": math.nan}):
            worker.report(**told)
            counts.append(worker.progress.value.reports)
        return counts

    assert run_workers(1, script) == [[0, 1, 1, 2, 2]]
