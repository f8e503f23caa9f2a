"""What lies on workers is in a checkpoint with the rows of the same step: jobs end, and go on from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import JOIN_S, run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
import shoal.nn
from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.client import save as save_
from shoal.checkpoint.place import Place
from shoal.errors import Mismatch, Refused
from shoal.store.client import Client
from shoal.train.worker import Worker

IDS, SAMPLES, BATCH, EPOCHS = 11, 96, 8, 1000


class Net(torch.nn.Module):
    """Rows, running means, dropout. (Threads share random state: several workers have none.)"""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb = shoal.nn.Embedding("items", dim=4, seed=3, init=shoal.init.Uniform(0.5))
        self.hidden = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(dropout)
        self.out = torch.nn.Linear(6, 1)
        generator = torch.Generator().manual_seed(5)
        for dense in (self.hidden, self.out):
            for parameter in dense.parameters():
                parameter.data.normal_(generator=generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.relu(self.norm(self.hidden(self.emb(ids)))))).squeeze(1)


def values(model: Net, optimizer: torch.optim.Optimizer, *, random: bool = False) -> dict[str, Any]:
    """All that there is of a worker, in bits."""
    found = {name: one.detach().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}
    state = optimizer.state_dict()["state"]
    found |= {f"{at}/{key}": torch.as_tensor(one).clone() for at in state for key, one in state[at].items()}
    found["rows"] = model.emb(torch.arange(IDS)).detach().clone()
    found["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    if random:
        found |= {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.random.get_state()[1].copy())}
    return found


def same(one: dict[str, Any], two: dict[str, Any], *without: str) -> None:
    names = one.keys() - set(without)
    assert names == two.keys() - set(without)
    assert [name for name in sorted(names) if not torch.equal(one[name], two[name])] == []


def trains(
    worker: Worker, steps: int, after: Callable[[int], Any] = lambda step: None, *, dropout: float = 0.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A script that makes so many steps in all (0: none): what it is before the first, and behind the last.

    `after(step)` is called behind each; True ends it.
    """
    if dropout:
        torch.manual_seed(1)
    model = Net(dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = TensorDataset(torch.arange(SAMPLES) % IDS, torch.linspace(-1, 1, SAMPLES))
    batches = DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))
    model, optimizer, schedule, batches = worker.prepare(model, optimizer, schedule, batches)
    now = lambda: values(model, optimizer, random=bool(dropout))  # noqa: E731
    begins = now()
    if steps == 0:
        return begins, begins
    for _ in worker.epochs(EPOCHS):
        for ids, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(ids), y).backward()
            optimizer.step()
            schedule.step()
            np.random.rand()
            if after(worker.steps_made) or worker.steps_made >= steps:
                return begins, now()
    raise AssertionError("there were not so many steps")


def saves(worker: Worker, url: Path) -> dict[str, Any]:
    """A script that trains, and saves while the others wait: what it is then."""
    found = trains(worker, 4)[1]
    worker.barrier()
    if worker.rank == 0:
        worker.save(str(url))
    worker.barrier()
    return found


@pytest.mark.parametrize("word", ["bsp", "allreduce", "downpour:2,3", "average:3"])
def test_a_script_that_is_killed_ends_with_the_same_bits(tmp_path: Path, word: str) -> None:
    """Alone: with dropout, so with random state; the checkpoint is in the middle of a pass."""

    def saves(worker: Worker) -> None:
        trains(worker, 8, lambda step: worker.save(str(tmp_path)) if step == 6 else None, dropout=0.4)

    (whole,) = run_workers(1, lambda worker: trains(worker, 15, dropout=0.4), word)
    run_workers(1, saves, word)
    (again,) = run_workers(1, lambda worker: trains(worker, 15, dropout=0.4), word, resume=str(tmp_path))
    same(whole[1], again[1])
    assert not torch.equal(again[0]["hidden.weight"], whole[0]["hidden.weight"])


@pytest.mark.parametrize("word", ["bsp", "allreduce"])
def test_a_cut_while_workers_train_is_of_one_step(tmp_path: Path, word: str) -> None:
    """Somebody else saves, as `shoal run` does, and nobody waits for it."""
    early, saved = threading.Event(), threading.Event()
    last: list[int] = []  # the step that ends it, for both: they are at most one apart

    def endless(worker: Worker) -> None:
        def after(step: int) -> bool:
            if step == 3:
                early.set()
            if saved.is_set():
                last.append(step + 2)
            return bool(last) and step >= last[0]

        trains(worker, 1 << 20, after)

    def beside(client: Client) -> None:
        assert early.wait(JOIN_S)
        save_(client, str(tmp_path), JOIN_S, call_s=JOIN_S)
        saved.set()

    run_workers(2, endless, word, beside=beside)
    found = manifest_.latest(Place(str(tmp_path)))
    assert [(state.rank, state.clock, state.why) for state in found.workers] == [
        (rank, clock, "") for rank, clock in enumerate(found.clocks)
    ]
    steps = max(found.clocks) + 5
    again = run_workers(2, lambda worker: trains(worker, steps), word, resume=str(tmp_path))
    whole = run_workers(2, lambda worker: trains(worker, steps), word)
    for one, two in zip(again, whole, strict=True):
        same(one[1], two[1])


@pytest.mark.parametrize("word", ["gossip", "easgd:4", "average:2", "diloco:2", "hogwild"])
def test_each_worker_has_its_own_state_again(tmp_path: Path, word: str) -> None:
    """Leased data: each worker is saved within a pass, at a step of its own."""
    together = threading.Barrier(2, timeout=JOIN_S)

    def saves(worker: Worker) -> dict[str, Any]:
        def after(step: int) -> bool:
            together.wait()  # so that each has as much of the pass
            if step == 4:
                worker.barrier()
                if worker.rank == 0:
                    worker.save(str(tmp_path))
                worker.barrier()
            return step == 4

        return trains(worker, 99, after)[1]

    before = run_workers(2, saves, word)
    after = run_workers(2, lambda worker: trains(worker, 0)[0], word, resume=str(tmp_path))
    for one, two in zip(before, after, strict=True):
        same(one, two)
    if word in ("gossip", "easgd:4"):
        assert not torch.equal(before[0]["hidden.weight"], before[1]["hidden.weight"])


@pytest.mark.parametrize("word", ["asp", "easgd:4"])
def test_a_worker_that_comes_late_loses_nothing(tmp_path: Path, word: str) -> None:
    """Another has trained, and saved, before it has a model; then both are gone, and begin again."""
    first, second = tmp_path / "first", tmp_path / "second"
    saved = threading.Event()

    def one_is_late(worker: Worker) -> dict[str, Any] | None:
        if worker.rank == 1:
            assert saved.wait(JOIN_S)
            return None

        def after(step: int) -> None:
            if step == 6:
                worker.save(str(second))
                saved.set()

        try:
            return trains(worker, 6, after)[1]
        finally:
            saved.set()

    before = run_workers(2, lambda worker: saves(worker, first), word)
    trained, _ = run_workers(2, one_is_late, word, resume=str(first))
    (name,) = manifest_.names(Place(str(first)))
    found = manifest_.latest(Place(str(second))).workers
    assert [(state.why, state.since) for state in found] == [("", ""), ("", name)]
    after = run_workers(2, lambda worker: trains(worker, 0)[0], word, resume=str(second))
    same(trained, after[0])
    assert after[1]["lr"] == before[1]["lr"] != after[0]["lr"]
    if word == "easgd:4":  # the model lies on the workers; rows are the job's
        same(before[1], after[1], "rows")


def test_a_job_may_have_more_or_fewer_workers_than_the_one_that_was_saved(tmp_path: Path) -> None:
    before = run_workers(2, lambda worker: saves(worker, tmp_path), "allreduce")
    for count in (1, 3):
        found = run_workers(count, lambda worker: trains(worker, 0)[0], "allreduce", resume=str(tmp_path))
        for one, two in zip(found, [*before, before[0]], strict=False):
            same(one, two, "lr")
        assert found[0]["lr"] == before[0]["lr"]


def test_one_that_saves_within_a_pass_does_not_wait_for_those_who_wait_for_it(tmp_path: Path) -> None:
    def script(worker: Worker) -> None:
        def after(step: int) -> None:
            if (step, worker.rank) == (3, 0):
                worker.save(str(tmp_path))

        trains(worker, 6, after)

    run_workers(2, script, "allreduce")
    own, other = manifest_.latest(Place(str(tmp_path))).workers
    assert (own.clock, own.why) == (3, "")
    assert other.clock == 3


def test_a_checkpoint_without_the_model_is_refused(tmp_path: Path) -> None:
    def saves(worker: Worker) -> None:
        trains(worker, 2)
        worker.client.save(str(tmp_path / "store"))
        worker.save(str(tmp_path / "bsp"))

    run_workers(1, saves, "bsp")
    with pytest.raises(Refused, match="no state of any worker, and under allreduce the model lies there"):
        run_workers(1, lambda worker: trains(worker, 9), "allreduce", resume=str(tmp_path / "store"))
    with pytest.raises(Mismatch, match="made under bsp, where the model lies at the servers"):
        run_workers(1, lambda worker: trains(worker, 9), "allreduce", resume=str(tmp_path / "bsp"))


def test_workers_load_what_lies_on_them(tmp_path: Path) -> None:
    def loads(worker: Worker) -> dict[str, Any]:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        worker.prepare(model, optimizer)
        worker.load(str(tmp_path))
        return values(model, optimizer)

    saved = run_workers(2, lambda worker: saves(worker, tmp_path), "allreduce")
    for one, two in zip(saved, run_workers(2, loads, "allreduce"), strict=True):
        same(one, two, "lr")


class OtherNet(Net):
    """With wider rows, another layer in place of one, and one that is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = shoal.nn.Embedding("items", dim=5)
        self.more = shoal.nn.Embedding("users", dim=2)
        self.hidden = torch.nn.Linear(5, 7)
        self.last, self.out = self.out, None


@pytest.mark.parametrize("word", ["bsp", "average:2"])
def test_a_checkpoint_of_another_model_is_refused_with_all_that_differs(tmp_path: Path, word: str) -> None:
    def other(worker: Worker) -> None:
        model = OtherNet()
        worker.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))

    run_workers(1, lambda worker: saves(worker, tmp_path), word)
    with pytest.raises(Mismatch, match=r"goes on from checkpoint .*, which is of another model") as found:
        run_workers(1, other, word, resume=str(tmp_path))
    lines = sorted(line.strip() for line in str(found.value).splitlines()[1:-1])
    assert lines == [
        "table 'items': dim is 5 here, 4 in the checkpoint",
        "table 'users' is not in the checkpoint",
        "tensor 'hidden.bias': shape is (7,) here, (6,) in the checkpoint",
        "tensor 'hidden.weight': shape is (7, 5) here, (6, 4) in the checkpoint",
        "tensor 'last.bias' is not in the checkpoint",
        "tensor 'last.weight' is not in the checkpoint",
        "tensor 'out.bias' is in the checkpoint alone",
        "tensor 'out.weight' is in the checkpoint alone",
    ]


def test_a_checkpoint_of_other_optimizers_is_refused_with_all_of_them(tmp_path: Path) -> None:
    def other(worker: Worker) -> None:
        model = Net()
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))

    run_workers(1, lambda worker: saves(worker, tmp_path))
    with pytest.raises(Mismatch) as found:
        run_workers(1, other, resume=str(tmp_path))
    assert "table 'items': optimizer is ('sgd',) here, ('adam',) in the checkpoint" in str(found.value)
    assert str(found.value).count("optimizer is ('sgd',)") == 7


LOADED = ["bsp", "asp", "average:2", "allreduce"]


def pretrained(model: torch.nn.Module) -> dict[str, Any]:
    """Something that the model is not, from which it learns."""
    here = {key: one for key, one in model.state_dict().items() if "weight." not in key}
    state = {
        key: torch.linspace(1, 2, one.numel()).to(one.dtype).view(one.shape) for key, one in here.items()
    }
    keys, rows = torch.arange(IDS), torch.linspace(-1, 1, 4 * IDS).sin().view(IDS, 4)
    return {**state, "emb.weight.keys": keys, "emb.weight.values": rows}


def trains_what_it_loads(worker: Worker, url: Path, *, divide: bool, by_client: bool = False) -> Any:
    """The model when it was prepared, when it has loaded a pretrained one, and in the end."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = DataLoader(TensorDataset(torch.arange(SAMPLES) % IDS, torch.rand(SAMPLES)), batch_size=BATCH)
    model, optimizer, loader = worker.prepare(model, optimizer, data, split=divide)
    found = [values(model, optimizer)]
    model.load_state_dict(pretrained(model))
    found.append(values(model, optimizer))
    for ids, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(ids), target).backward()
        optimizer.step()
    worker.client.save(str(url)) if by_client else worker.save(str(url))
    found.append(values(model, optimizer))
    model.load_state_dict(pretrained(model))  # the best one, to be judged
    return [*found, values(model, optimizer)]


def momenta(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    return {str(index): one["momentum_buffer"].clone() for index, one in state.items()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))]


@pytest.mark.parametrize("sync", LOADED)
@pytest.mark.parametrize("divide", [True, False])
def test_what_a_script_loads_to_begin_with_is_not_loaded_again(
    tmp_path: Path, sync: str, divide: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts from a pretrained model; when it goes on from a checkpoint it has something better."""

    def script(worker: Worker) -> Any:
        return trains_what_it_loads(worker, tmp_path, divide=divide)

    [(prepared, loaded, trained, best)] = run_workers(1, script, sync)
    assert len(differing(prepared, loaded)) > 5
    moved = {"rows", "norm.running_mean", "hidden.weight", "norm.weight"} & trained.keys()
    assert moved <= set(differing(loaded, trained))
    again = run_workers(1, script, sync, resume=str(tmp_path))[0]
    assert differing(again[0], trained) == []
    assert differing(again[1], trained) == []
    assert caplog.text.count("load_state_dict is passed over") == 1
    # What it loads when it has trained, or all was trained, is loaded.
    weights = [name for name in best if name in dict(Net().named_parameters())]
    assert differing({name: best[name] for name in weights}, again[3]) == []


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_what_a_script_loads_is_passed_over_without_any_workers_state(tmp_path: Path, sync: str) -> None:
    def script(worker: Worker) -> Any:
        return trains_what_it_loads(worker, tmp_path, divide=True, by_client=True)

    [(*_, trained, _)] = run_workers(1, script, sync)
    again = run_workers(1, script, sync, resume=str(tmp_path))[0]
    dense = [name for name, _ in Net().named_parameters() if name != "emb.weight"]
    assert differing({name: trained[name] for name in dense}, again[1]) == []


def test_momentum_that_lies_on_the_worker_is_not_loaded_again(tmp_path: Path) -> None:
    def script(worker: Worker) -> Any:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(TensorDataset(torch.ones(32, 1)), batch_size=8)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        state = {
            index: {"momentum_buffer": torch.full_like(p, 5)} for index, p in enumerate(model.parameters())
        }
        before = momenta(optimizer)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        after = momenta(optimizer)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        worker.save(str(tmp_path))
        return before, after, momenta(optimizer)

    [(before, after, trained)] = run_workers(1, script, "allreduce")
    assert not before
    assert all((one == 5).all() for one in after.values())
    [(_, again, _)] = run_workers(1, script, "allreduce", resume=str(tmp_path))
    assert differing(again, trained) == []


@pytest.mark.parametrize(("sync", "workers"), [("bsp", 1), ("bsp", 2), ("allreduce", 2), ("average:2", 2)])
def test_what_no_optimizer_steps_is_loaded_again(tmp_path: Path, sync: str, workers: int) -> None:
    """A frozen backbone, and a teacher without an optimizer: no checkpoint has anything better."""

    def script(worker: Worker) -> Any:
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
        teacher = torch.nn.Linear(1, 1, bias=False)
        for parameter in (*model.parameters(), *teacher.parameters()):
            torch.nn.init.constant_(parameter, -1.0)
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0625)
        data = DataLoader(torch.ones(8, 1), batch_size=4)
        model, optimizer, loader = worker.prepare(model, optimizer, data)
        prepared = model[0].weight.item()
        worker.barrier()
        teacher = worker.prepare(teacher)
        model.load_state_dict({"0.weight": torch.tensor([[5.0]]), "1.weight": torch.tensor([[2.0]])})
        teacher.load_state_dict({"weight": torch.tensor([[7.0]])})
        loaded = [prepared, *(one.weight.item() for one in (*model, teacher))]
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        if worker.rank == 0:
            worker.save(str(tmp_path))
        worker.barrier()
        return loaded, model[1].weight.item()

    first = run_workers(workers, script, sync)
    again = run_workers(workers, script, sync, resume=str(tmp_path))
    trained = first[0][1]
    assert first == [([-1.0, 5.0, 2.0, 7.0], trained)] * workers
    prepared = 5.0 if workers > 1 else -1.0  # one with a store of its own has them in the script alone
    assert [loaded for loaded, _ in again] == [[prepared, 5.0, trained, 7.0]] * workers
    assert trained < 2.0


@pytest.mark.parametrize(("sync", "workers"), [("bsp", 1), ("bsp", 2), ("allreduce", 2)])
def test_a_teacher_that_a_job_gets_when_it_goes_on_is_loaded_whole(
    tmp_path: Path, sync: str, workers: int
) -> None:
    def script(worker: Worker, teaches: bool) -> Any:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = DataLoader(TensorDataset(torch.arange(SAMPLES) % IDS, torch.rand(SAMPLES)), batch_size=BATCH)
        model, optimizer, loader = worker.prepare(model, optimizer, data)
        found = None
        if teaches:
            teacher = worker.prepare(torch.nn.BatchNorm1d(2))
            given = {name: one + 3 for name, one in teacher.state_dict().items()}
            teacher.load_state_dict(given)
            found = differing(teacher.state_dict(), given)
        for ids, target in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(ids), target).backward()
            optimizer.step()
        if worker.rank == 0:
            worker.save(str(tmp_path))
        worker.barrier()
        return found

    run_workers(workers, lambda worker: script(worker, False), sync)
    assert (
        run_workers(workers, lambda worker: script(worker, True), sync, resume=str(tmp_path))
        == [[]] * workers
    )
