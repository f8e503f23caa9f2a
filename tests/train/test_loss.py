"""G1 where the loss is no mean over samples, several optimizers step, or a gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from tests.train.models import IDS, ShoalModel, TorchModel, dense_values, initial_rows, loader

from shoal.errors import BadInput
from shoal.train.worker import Worker

SAMPLES, BATCH, EPOCHS = 23, 7, 2  # the last batch has two samples: fewer than workers
LR = 0.02
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Optimizers = Callable[[Any], Sequence[torch.optim.Optimizer]]


def total(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return ((found - wanted) ** 2).sum()


def mean_of_positive(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over the samples that have a positive target: no mean over all samples."""
    mask = wanted > 0
    return (((found - wanted) ** 2) * mask).sum() / mask.sum().clamp(min=1)


def one_sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=LR)]


def two_sgds(model: Any) -> list[torch.optim.Optimizer]:
    rest = [*model.emb.parameters(), *model.out.parameters()]
    return [torch.optim.SGD(model.linear.parameters(), lr=LR), torch.optim.SGD(rest, lr=3 * LR)]


def loop(
    model: Any, optimizers: Any, batches: Any, loss: Loss, before_step: Any = None, after: Any = ()
) -> None:
    for _ in range(EPOCHS):
        for ids, x, y in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(model(ids, x), y).backward()
            if before_step is not None:
                before_step(y)
            for each in (*optimizers, *after):
                each.step()


def values(model: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("emb")}
    return found | {"rows": rows}


def reference(loss: Loss, make: Optimizers, schedule: bool = False) -> dict[str, torch.Tensor]:
    model = TorchModel(initial_rows())
    dense_values(model)
    optimizers = make(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers] if schedule else []
    loop(model, optimizers, loader(SAMPLES, BATCH, False), loss, after=schedulers)
    return values(model, model.emb.weight.detach())


def equal(
    workers: int,
    sync: str,
    loss: Loss,
    make: Optimizers = one_sgd,
    *,
    schedule: bool = False,
    tell: bool = True,
    **prepare: Any,
) -> None:
    weighted = loss is mean_of_positive

    def script(worker: Worker) -> dict[str, torch.Tensor]:
        model = ShoalModel()
        dense_values(model)
        optimizers = make(model)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers] if schedule else []
        _, *_, batches = worker.prepare(
            model, *(schedulers if tell else ()), *optimizers, loader(SAMPLES, BATCH, False), **prepare
        )
        weigh = (lambda y: worker.weight(int((y > 0).sum()))) if weighted else None
        loop(model, optimizers, batches, loss, weigh, schedulers)
        worker.barrier()
        return values(model, torch.from_numpy(model.emb.table.pull(list(range(IDS))).copy()))

    expected = reference(loss, make, schedule)
    for found in run_workers(workers, script, sync):
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_a_sum_over_samples_is_summed_over_workers(workers: int, sync: str) -> None:
    equal(workers, sync, total, reduction="sum")


def test_without_saying_so_a_sum_is_not_the_same() -> None:
    with pytest.raises(AssertionError):
        equal(3, "bsp", total)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_workers_say_what_their_gradient_stands_for(workers: int, sync: str) -> None:
    equal(workers, sync, mean_of_positive)


def test_another_reduction_is_refused() -> None:
    with pytest.raises(BadInput, match="reduction is 'median'; a loss is the 'mean' or the 'sum'"):
        run_workers(1, lambda worker: worker.prepare(ShoalModel(), reduction="median"))


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_several_optimizers_step_with_the_same_share(sync: str) -> None:
    equal(3, sync, torch.nn.functional.mse_loss, two_sgds)


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_schedulers_of_a_worker_without_a_batch_do_not_lag(sync: str) -> None:
    """With two learning rates a shard takes that of the lowest rank that pushed there, not of the round."""
    equal(3, sync, torch.nn.functional.mse_loss, two_groups, schedule=True)


def test_under_allreduce_all_step_with_the_rate_of_rank_0() -> None:
    equal(3, "allreduce", torch.nn.functional.mse_loss, schedule=True, tell=False)


def two_groups(model: Any) -> list[torch.optim.Optimizer]:
    rest = [*model.linear.parameters(), *model.out.parameters()]
    return [torch.optim.SGD([{"params": model.emb.parameters(), "lr": 5 * LR}, {"params": rest}], lr=LR)]


# Not finite.

STEPS, BAD_STEP, BAD_RANK = 5, 2, 1


def scaled_script(worker: Worker) -> Any:
    model = ShoalModel()
    dense_values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    worker.prepare(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ids, x, y = (
        part[4 * worker.rank : 4 * worker.rank + 4] for part in loader(12, 12, False).dataset.tensors
    )
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(ids, x), y)
        bad = step == BAD_STEP and worker.rank == BAD_RANK
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    worker.barrier()
    return values(model, torch.from_numpy(model.emb.table.pull(list(range(IDS))).copy())), seen


def scaled_reference() -> dict[str, torch.Tensor]:
    from tests.train.test_equal import LazyRows

    rows = initial_rows()
    model = TorchModel(rows)
    dense_values(model)
    make = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5)  # noqa: E731
    optimizer = make([p for n, p in model.named_parameters() if not n.startswith("emb")])
    lazy = LazyRows(make, rows)
    ids, x, y = loader(12, 12, False).dataset.tensors
    for step in range(STEPS):
        kept = torch.ones(12, dtype=torch.bool)
        kept[4 * BAD_RANK : 4 * BAD_RANK + 4] = step != BAD_STEP
        model.zero_grad()
        torch.nn.functional.mse_loss(model(ids[kept], x[kept]), y[kept]).backward()
        optimizer.step()
        lazy.step(model.emb.weight.grad, 0.1)
        with torch.no_grad():
            model.emb.weight.copy_(torch.stack([row.detach() for row in lazy.rows]))
    return values(model, model.emb.weight.detach())


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_a_worker_whose_gradient_is_not_finite_abstains(sync: str) -> None:
    expected = scaled_reference()
    for rank, (found, scales) in enumerate(run_workers(3, scaled_script, sync)):
        assert scales[BAD_STEP] == (512.0 if rank == BAD_RANK else 1024.0)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


WORDS = ["quorum:0.5", "ssp:0", "asp", "softsync:2", "dcasgd:0.04", "downpour:2,2", "average:2", "bmuf:2",
         "easgd:2", "easgd:2,rows=bsp", "diloco:2", "gossip", "hogwild", "hogwild,rows=bsp"]  # fmt: skip


@pytest.mark.parametrize("sync", WORDS)
def test_nobody_waits_for_a_gradient_that_is_not_finite(sync: str) -> None:
    for rank, (found, scales) in enumerate(run_workers(3, scaled_script, sync)):
        assert scales[-1] == (512.0 if rank == BAD_RANK else 1024.0)
        assert all(bool(value.isfinite().all()) for value in found.values())


def stepped(worker: Worker, scaled: bool, unscale: bool) -> dict[str, torch.Tensor]:
    """Steps on the same data, with a GradScaler that does something or nothing."""
    model = ShoalModel()
    dense_values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    worker.prepare(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    ids, x, y = loader(12, 12, False).dataset.tensors
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.mse_loss(model(ids, x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return values(model, torch.from_numpy(model.emb.table.pull(list(range(IDS))).copy()))


@pytest.mark.parametrize("sync", ["bsp", "allreduce", *WORDS])
def test_a_scaler_changes_nothing_where_gradients_are_finite(sync: str) -> None:
    (plain,) = run_workers(1, lambda worker: stepped(worker, False, False), sync)
    for unscale in (False, True):
        (found,) = run_workers(1, lambda worker, u=unscale: stepped(worker, True, u), sync)
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-7)
