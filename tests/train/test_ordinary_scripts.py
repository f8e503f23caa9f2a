"""What ordinary scripts do around `prepare`: it must mean what it means in plain torch, or be refused."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import BadInput
from shoal.train.join import local_workers
from shoal.train.worker import Worker


class Sum(torch.nn.Module):
    """Two lookups whose vectors are added: autograd hands both the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = shoal.nn.Embedding("a", dim=2, init=shoal.init.Zeros())
        self.b = shoal.nn.Embedding("b", dim=2, init=shoal.init.Zeros())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.a(ids) + self.b(ids)


def train(worker: Worker, model: Any, reduction: str, max_norm: float | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(TensorDataset(torch.arange(4)), batch_size=4)
    model, optimizer, batches = worker.prepare(model, optimizer, data, reduction=reduction)
    for (ids,) in batches:
        optimizer.zero_grad()
        model(ids).sum().backward()
        if max_norm is not None:
            worker.clip_grad_norm_(model, max_norm)
        optimizer.step()
    return [module.table.pull(range(4)) for module in (model.a, model.b)]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_lookups_that_are_added_are_scaled_once_each(workers: int) -> None:
    for found in run_workers(workers, lambda worker: train(worker, Sum(), "sum")):
        for rows in found:
            assert rows.tolist() == [[-1.0, -1.0]] * 4


def test_lookups_that_are_added_are_clipped_once_each() -> None:
    (found,) = run_workers(1, lambda worker: train(worker, Sum(), "sum", max_norm=1.0))
    norm = sum(float((rows**2).sum()) for rows in found) ** 0.5
    assert norm == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_a_worker_that_got_no_batch_counts_nothing(sync: str) -> None:
    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        stream = [torch.ones(1, 1)] * 3
        model, optimizer, batches = worker.prepare(model, optimizer, iter(stream))
        for x in batches:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return float(model.weight.detach())

    assert run_workers(2, script, sync) == [-2.0, -2.0]


def test_what_is_only_read_is_no_epoch() -> None:
    def script(worker: Worker) -> list[int]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data, held_out = (DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2) for _ in range(2))
        model, optimizer, batches, held_out = worker.prepare(model, optimizer, data, held_out)
        for (x,) in held_out:
            model(x)
        made = []
        for epoch in worker.epochs(3):
            made.append(epoch)
            for (x,) in batches:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            for (x,) in held_out:
                model(x)
        return made

    assert run_workers(2, script) == [[0, 1, 2], [0, 1, 2]]


def test_models_of_two_calls_are_two_models() -> None:
    def script(worker: Worker) -> list[float]:
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        for value, model in enumerate(models):
            torch.nn.init.constant_(model.weight, value)
            worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [float(model.weight.detach()) for model in models]

    assert run_workers(2, script) == [[0.0, 1.0]] * 2


def test_an_optimizer_may_come_after_its_model_and_copies_are_models_of_their_own() -> None:
    def script(worker: Worker) -> tuple[float, float]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        worker.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.prepare(optimizer)
        twin = copy.deepcopy(model)
        other = torch.optim.SGD(twin.parameters(), lr=0.5)
        worker.prepare(twin, other)
        for one, steps in ((model, optimizer), (twin, other)):
            one(torch.ones(1, 1)).sum().backward()
            steps.step()
        return float(model.weight.detach()), float(twin.weight.detach())

    assert run_workers(1, script) == [(-1.0, -0.5)]


def test_a_parameter_group_that_comes_late_is_refused() -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD([model.weight], lr=1.0)
        worker.prepare(model, optimizer)
        optimizer.add_param_group({"params": [model.bias]})
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(BadInput, match="call add_param_group before prepare"):
        run_workers(1, script)


def test_a_frozen_table_needs_no_optimizer() -> None:
    def script(worker: Worker) -> list[float]:
        model = Sum()
        model.b.requires_grad_(False)
        optimizer = torch.optim.SGD(model.a.parameters(), lr=1.0)
        worker.prepare(model, optimizer)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        return [float(module.table.pull([1])[0, 0]) for module in (model.a, model.b)]

    assert run_workers(1, script) == [[-1.0, 0.0]]


LOADED = ["bsp", "asp", "downpour:2,2", "average:2", "bmuf:2", "diloco:2,lr=1,momentum=0", "allreduce"]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("sync", LOADED)
def test_what_is_loaded_after_prepare_is_trained_on(sync: str, whole: bool) -> None:
    """Two blocks of it, also where a step was made before, and where only a part is loaded."""

    def script(worker: Worker) -> float:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.prepare(model, optimizer)
        for step in range(5):
            if step == 1:
                part = model if whole else model[0]
                part.load_state_dict({name: torch.full((1, 1), 5.0) for name in part.state_dict()})
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        return float(model[0].weight.detach())

    assert run_workers(1, script, sync) == [1.0]


@pytest.mark.parametrize("sync", ["asp", "average:2"])
def test_worker_0s_values_are_loaded_and_nobody_resets_what_was_trained_since(sync: str) -> None:
    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.prepare(model, optimizer)
        model.load_state_dict({"weight": torch.full((1, 1), 5.0 + worker.rank)})
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        worker.barrier()
        return float(worker.client.tensor("weight").pull().item())

    assert run_workers(2, script, sync) == [{"asp": 1.0, "average:2": 3.0}[sync]] * 2


def test_a_worker_that_is_started_again_does_not_load_again() -> None:
    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.prepare(model, optimizer)
        model.load_state_dict({"weight": torch.full((1, 1), 5.0)})
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return float(model.weight.detach())

    with shoal.connect("memory://") as client:
        makers = local_workers(2, "asp", client=client, wait_s=5)
        with ThreadPoolExecutor(2) as pool:
            first = [pool.submit(lambda make=make: script(make())) for make in makers]
            assert min(one.result() for one in first) == 3.0
        assert script(makers[0]()) == 2.0


def test_a_prepared_model_can_be_pickled_whole() -> None:
    def script(worker: Worker) -> float:
        model = torch.nn.Linear(1, 1)
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        twin = pickle.loads(pickle.dumps(model))  # noqa: S301
        twin.load_state_dict(model.state_dict())  # and is another model
        return float((twin.weight - model.weight).detach())

    assert run_workers(1, script) == [0.0]


def clamped(worker: Worker | None, how: str = "no_grad") -> list[float]:
    """As a Wasserstein critic's weights are: after every step."""
    model: Any = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    if worker is not None:
        worker.prepare(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.tensor([[1.0 + step, 4.0 - 2 * step]])).sum().backward()
        optimizer.step()
        if step == 5:
            break
        with torch.no_grad():
            (model.weight if how == "no_grad" else model.weight.data).clamp_(-1.0, 1.0)
    return [float(value) for value in model.weight.detach().flatten()]


@pytest.mark.parametrize("sync", ["bsp", "asp", "asp:staleness", "downpour:1,1", "average:2", "allreduce"])
def test_what_is_changed_in_place_stays_changed(sync: str) -> None:
    assert run_workers(1, clamped, sync) == [pytest.approx(clamped(None))]


def test_what_is_changed_in_place_stays_changed_where_all_change_alike() -> None:
    assert run_workers(2, clamped, "allreduce") == [pytest.approx(clamped(None))] * 2


@pytest.mark.parametrize(
    ("workers", "how", "message"), [(2, "no_grad", "outside of optimizer.step"), (1, "data", "through .data")]
)
@pytest.mark.parametrize("sync", ["bsp", "asp", "downpour:1,1"])
def test_what_would_be_undone_is_refused(sync: str, workers: int, how: str, message: str) -> None:
    with pytest.raises(BadInput, match=f"worker ., step .: parameter weight was changed .*{message}"):
        run_workers(workers, lambda worker: clamped(worker, how), sync)


class Shared(torch.nn.Module):
    """Two lookups in one table, as of the titles that a user has read and the one that is shown."""

    def __init__(self, seen: Any, shown: Any) -> None:
        super().__init__()
        self.seen, self.shown = seen, shown

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.seen(ids) * (2 + self.shown(ids.flip(0)))).sum(1)


def shared_rows(worker: Worker | None, clip: float | None, kind: type[torch.optim.Optimizer]) -> Any:
    if worker is None:
        table = torch.nn.Embedding.from_pretrained(torch.full((4, 2), 0.5), freeze=False)
        model = Shared(table, table)
    else:
        tables = [shoal.nn.Embedding("one", dim=2, init=shoal.init.Constant(0.5)) for _ in range(2)]
        model = Shared(*tables)
    optimizer = kind(model.parameters(), lr=0.1)
    data: Any = DataLoader(TensorDataset(torch.tensor([0, 1, 2, 3, 1, 1, 2, 0])), batch_size=4)
    if worker is not None:
        model, optimizer, data = worker.prepare(model, optimizer, data)
    for _ in range(2):
        for (ids,) in data:
            optimizer.zero_grad()
            model(torch.cat([ids, torch.arange(4)])).mean().backward()
            if clip is not None and worker is not None:
                worker.clip_grad_norm_(model, clip)
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model.seen.weight.detach().numpy() if worker is None else model.seen.table.pull(range(4))


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("sync", ["bsp", "asp", "average:2"])
def test_modules_that_share_a_table_step_it_once(sync: str, kind: Any, clip: float | None) -> None:
    alone = shared_rows(None, clip, kind)
    (found,) = run_workers(1, lambda worker: shared_rows(worker, clip, kind), sync)
    np.testing.assert_allclose(found, alone, rtol=1e-5)


def two_halves(worker: Worker | None, clipped: str) -> list[float]:
    """Each half has an optimizer; what is clipped before its step is one half, both, or a part of one."""
    halves = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    for half in halves:
        torch.nn.init.ones_(half.weight)
        torch.nn.init.zeros_(half.bias)
    model = torch.nn.ModuleList(halves)
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.5) for half in halves]
    data: Any = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2)), batch_size=4)
    if worker is not None:
        model, *optimizers, data = worker.prepare(model, *optimizers, data)
    for (x,) in data:
        for half, optimizer in zip(halves, optimizers, strict=True):
            optimizer.zero_grad()
            (half(x) ** 2).mean().backward()
            what = {"half": half, "both": model, "part": torch.nn.ParameterList([half.weight])}[clipped]
            if worker is None:
                torch.nn.utils.clip_grad_norm_(what.parameters(), 0.1)
            else:
                worker.clip_grad_norm_(what, 0.1)
            optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_each_optimizer_has_a_norm_of_its_own(sync: str) -> None:
    alone = pytest.approx(two_halves(None, "half"), rel=1e-5)
    assert run_workers(2, lambda worker: two_halves(worker, "half"), sync) == [alone, alone]


@pytest.mark.parametrize(
    ("clipped", "message"), [("both", "2 optimizers step them"), ("part", "0.bias is stepped with them")]
)
def test_a_norm_that_no_round_has_is_refused(clipped: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run_workers(2, lambda worker: two_halves(worker, clipped))


def sparse_rows(worker: Worker | None) -> list[float]:
    model = torch.nn.Embedding(6, 1, sparse=True, _weight=torch.ones(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    data: Any = DataLoader(TensorDataset(torch.tensor([0, 1, 1, 2, 3, 3, 3, 5])), batch_size=4)
    if worker is not None:
        model, optimizer, data = worker.prepare(model, optimizer, data)
    for (ids,) in data:
        optimizer.zero_grad()
        (model(ids) ** 2).mean().backward()
        optimizer.step()
    return model.weight.detach().flatten().tolist()


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_sparse_gradients_of_torchs_own_embedding(sync: str) -> None:
    alone = pytest.approx(sparse_rows(None), rel=1e-5)
    assert run_workers(2, sparse_rows, sync) == [alone, alone]


@pytest.mark.parametrize(
    "sync", ["quorum:0.5", "ssp:1", "asp:staleness", "softsync:2", "dcasgd:0.1", "downpour:2,2", "average:2",
             "bmuf:2", "easgd:2", "diloco:2,lr=1,momentum=0", "gossip"]
)  # fmt: skip
def test_sparse_gradients_under_the_other_words(sync: str) -> None:
    one, other = run_workers(2, sparse_rows, sync)
    assert one[4] == 1.0 > max(one[:4])
    assert one == pytest.approx(other)


def test_modules_that_share_a_table_share_its_hyper_parameters() -> None:
    def script(worker: Worker) -> None:
        model = Shared(*(shoal.nn.Embedding("one", dim=2) for _ in range(2)))
        groups = [{"params": model.seen.parameters()}, {"params": model.shown.parameters(), "lr": 0.2}]
        worker.prepare(model, torch.optim.SGD(groups, lr=0.1))

    with pytest.raises(shoal.Mismatch, match=r"optimizer SGD\(lr=0.1\) in module seen and optimizer SGD\(lr"):
        run_workers(1, script)


class Frozen(torch.nn.Module):
    """Its first layer, a random projection and a mask are stepped by nobody; a normalisation has means."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.norm = torch.nn.BatchNorm1d(2)
        torch.nn.init.constant_(self.first.weight, float(rank))
        self.register_buffer("projection", torch.full((2, 2), float(rank + 1)))
        self.register_buffer("mask", torch.tensor([float("-inf"), float(rank)]))
        self.register_buffer("cache", torch.tensor([float(rank)]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x) @ self.projection))


@pytest.mark.parametrize("sync", ["bsp", "asp", "average:2", "allreduce"])
def test_what_nobody_steps_is_equal_on_all_workers(sync: str) -> None:
    def script(worker: Worker) -> dict[str, Any]:
        model = Frozen(worker.rank)
        optimizer = torch.optim.SGD([*model.last.parameters(), *model.norm.parameters()], lr=0.1)
        data = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
        model, optimizer, batches = worker.prepare(model, optimizer, data)
        fixed = ["first.weight", "projection"]  # the rest may have been stepped by others
        if sync in ("bsp", "allreduce"):  # elsewhere worker 0 may have ended before another begins
            fixed.append("norm.running_mean")
        begins = {f"begins {name}": model.state_dict()[name].clone() for name in fixed}
        assert float(model.cache) == worker.rank
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return begins | model.state_dict()

    one, other = run_workers(2, script, sync)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert float(one["begins first.weight"][0, 0]) in (0.0, 1.0)
    assert one["mask"].tolist() in ([-math.inf, 0.0], [-math.inf, 1.0])
    if sync in ("bsp", "allreduce"):  # elsewhere worker 0 may come too late for any
        assert int(one["norm.num_batches_tracked"]) == 2
