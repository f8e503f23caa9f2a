"""The mistakes that people make first, workers as threads: docs/mistakes.md has a heading for each test."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from tests.train.models import ShoalModel, dataset, loader, steps
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.errors import BadInput, Mismatch, ShoalError, Timeout, Unavailable, Unbound, WrongProcess
from shoal.train.join import local_workers
from shoal.train.worker import Worker

ROOT = Path(__file__).parents[2]
HEADINGS = re.findall(r"^## (.+)$", (ROOT / "docs" / "mistakes.md").read_text(), re.MULTILINE)


def prepared(worker: Worker, **settings: Any) -> Any:
    model = ShoalModel()
    data = loader(40, 8, False) if not settings else DataLoader(dataset(40), batch_size=8, **settings)
    return worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def fails(
    script: Callable[[Worker], Any],
    kind: type[ShoalError],
    message: str,
    *,
    workers: int = 1,
    sync: str = "bsp",
) -> str:
    """The error of the first worker that fails; it must be of this kind and hold this message."""
    with pytest.raises(kind) as failure:
        run_workers(workers, script, sync, wait_s=3.0)
    assert message in str(failure.value)
    return str(failure.value)


def test_every_mistake_of_the_page_has_its_test_and_every_test_its_heading() -> None:
    sources = [path.read_text() for path in ROOT.glob("tests/*/test_mistakes.py")]
    tests = re.findall(r"^def test_mistake_(\w+)\(", "\n".join(sources), re.MULTILINE)
    expected = [re.sub(r"\W+", "_", heading.lower()) for heading in HEADINGS]
    assert sorted(set(tests)) == sorted(expected)
    assert len(expected) == 10


def test_mistake_forward_before_prepare() -> None:
    def script(worker: Worker) -> None:
        ShoalModel()(torch.tensor([1]), torch.zeros(1, 4))

    message = (
        "table 'items': this Embedding is not bound to a store. Hand its model to worker.prepare(...), or "
        "call module.bind(client)"
    )
    fails(script, Unbound, message)


def test_mistake_an_optimizer_of_another_model() -> None:
    def script(worker: Worker) -> None:
        worker.prepare(ShoalModel(), torch.optim.SGD(ShoalModel().parameters(), lr=0.1))

    message = "SGD steps 5 parameters of no model that was given to prepare (the first of shape (0, 3))"
    fails(script, BadInput, message)


def test_mistake_no_optimizer_for_a_table() -> None:
    message = (
        "table 'items' (emb) is stepped by nobody: its handle emb.weight is in no optimizer that was given "
        "to prepare. Give prepare the optimizer that was built from model.parameters(), or the module an "
        "optimizer="
    )
    fails(lambda worker: worker.prepare(ShoalModel()), BadInput, message)


def test_mistake_float_ids() -> None:
    def script(worker: Worker) -> None:
        prepared(worker)[0](torch.tensor([1.5]), torch.zeros(1, 4))

    message = "table 'items': keys are float32; allowed: int64, int32, uint64"
    assert "keys.long() in torch" in fails(script, BadInput, message)


def test_mistake_one_table_name_two_dims() -> None:
    def script(worker: Worker) -> None:
        modules = {"a": shoal.nn.Embedding("items", dim=3), "b": shoal.nn.Embedding("items", dim=4)}
        model = torch.nn.ModuleDict(modules)
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    fails(
        script, Mismatch, "table 'items' has dim 3 in module a and dim 4 in module b; one name is one table"
    )


@pytest.mark.parametrize("then", ["leaves", "goes on", "waits elsewhere"])
def test_mistake_a_break_on_one_worker_only(then: str) -> None:
    def script(worker: Worker) -> None:
        model, optimizer, batches = prepared(worker)
        for _ in range(1 if then == "leaves" else 2):
            for number, _loss in enumerate(steps(model, optimizer, batches, 1)):
                if worker.rank == 1 and number == 1:
                    break
            if then == "waits elsewhere" and worker.rank == 1:
                worker.barrier()

    message = (
        "worker 0: pass 0 cannot end: 3 of its 10 units are left, and nobody trains them: worker 1 did 2 of 5"
    )
    said = fails(script, BadInput, message, workers=2)
    assert "Let all workers leave a loop at the same step" in said


def test_the_others_train_what_a_worker_that_left_had_leased() -> None:
    def script(worker: Worker) -> Any:
        model, optimizer, batches = prepared(worker)
        for number, _loss in enumerate(steps(model, optimizer, batches, 1)):
            if worker.rank == 1 and number == 1:
                return None
        return worker.ledger.report()

    report = run_workers(2, script, "asp")[0]
    assert report.done == report.units == 10


def test_mistake_no_step_on_one_worker() -> None:
    def script(worker: Worker) -> None:
        model, optimizer, batches = prepared(worker)
        for ids, x, _ in batches:
            model(ids, x).sum().backward()
            if worker.rank == 0:
                optimizer.step()
            else:
                worker.ended.wait(10.0)  # type: ignore[attr-defined]  # it works on something else

    message = (
        "worker 0, the end of step 0: waited 3 s for worker 1, which is at step 0. Does it call "
        "optimizer.step() as often as the others? SHOAL_WAIT_S (now 3) allows more time"
    )
    fails(_with_event(script), Timeout, message, workers=2)


def test_a_worker_that_never_steps_and_ends_is_named() -> None:
    def script(worker: Worker) -> None:
        model, optimizer, batches = prepared(worker)
        for ids, x, _ in batches:
            model(ids, x).sum().backward()
            if worker.rank == 0:
                optimizer.step()

    fails(script, BadInput, "nobody trains them: worker 1 did 0 of 5 and has left", workers=2)
    message = "worker 0, step 0: the exchange with the others failed; not here: worker 1, which has left"
    fails(script, Unavailable, message, workers=2, sync="allreduce")


@pytest.mark.parametrize("skips", [0, 1])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_worker_that_leaves_out_a_step_now_and_then_is_named(accumulated: int, skips: int) -> None:
    def script(worker: Worker) -> None:
        model, optimizer, batches = prepared(worker)
        for _ in range(2):
            for number, (ids, x, _) in enumerate(batches):
                model(ids, x).sum().backward()
                if number % accumulated == 0 and (worker.rank, number) != (skips, 2):
                    optimizer.step()
                    optimizer.zero_grad()

    made = len(range(0, 5, accumulated))
    message = f"pass 0: worker {skips} made {made - 1} steps, and worker {1 - skips} made {made}. Under bsp"
    assert "Call optimizer.step() for every batch" in fails(script, Mismatch, message, workers=2)


def test_who_comes_in_the_middle_of_a_pass_may_make_fewer_steps() -> None:
    """Its earlier life has made two of them."""

    def script(worker: Worker, most: int = 5) -> int:
        model, optimizer, batches = prepared(worker)
        return sum(1 for _ in islice(steps(model, optimizer, batches, 1), most))

    with shoal.connect("memory://") as client:
        makers = local_workers(3, client=client, wait_s=10.0)

        def run(rank: int) -> list[int]:
            lives = [makers[rank]()]
            made = [script(lives[0], 2 if rank == 1 else 5)]
            if rank == 1:
                lives.append(makers[rank]())
                made.append(script(lives[1]))
            lives[-1].close()
            return made

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(run, range(3))) == [[5], [2, 3], [5]]


@pytest.mark.parametrize("sync", ["allreduce", "gossip"])
def test_a_worker_that_left_out_a_step_says_how_many_it_made_itself(sync: str) -> None:
    def script(worker: Worker) -> str:
        model, optimizer, batches = prepared(worker)
        try:
            for number, (ids, x, _) in enumerate(batches):
                optimizer.zero_grad()
                model(ids, x).sum().backward()
                if (worker.rank, number) != (1, 2):
                    optimizer.step()
        except ShoalError as error:
            return str(error)
        return ""

    other, skipped = run_workers(2, script, sync, wait_s=2.0)
    assert "not here: worker 1, which " in other
    assert "for worker 0, which is at step 4. This worker made 4 steps with its 5 units" in skipped


def _with_event(script: Callable[[Worker], None]) -> Callable[[Worker], None]:
    """The script with `worker.ended`, an event that is set as soon as one of the workers has failed."""
    ended = threading.Event()

    def run(worker: Worker) -> None:
        worker.ended = ended  # type: ignore[attr-defined]
        try:
            script(worker)
        finally:
            ended.set()

    return run


UNKNOWN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rmsprop": (
        lambda params: torch.optim.RMSprop(params),
        "torch.optim.rmsprop.RMSprop has no twin at the servers; those that have: torch.optim.SGD, "
        "torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW",
    ),
    "amsgrad": (
        lambda params: torch.optim.Adam(params, amsgrad=True),
        "Adam(amsgrad=True), in parameter group 0, has no twin at the servers; leave amsgrad out",
    ),
    "maximize": (
        lambda params: torch.optim.SGD(params, lr=0.1, maximize=True),
        "SGD(maximize=True), in parameter group 0, has no twin at the servers; leave maximize out",
    ),
}


@pytest.mark.parametrize("case", [*UNKNOWN, "closure"])
def test_mistake_an_optimizer_that_the_servers_do_not_know(case: str) -> None:
    def script(worker: Worker) -> None:
        if case == "closure":
            prepared(worker)[1].step(lambda: 1.0)
        model = ShoalModel()
        worker.prepare(model, UNKNOWN[case][0](model.parameters()))

    message = "SGD.step(closure) is not supported: a step of the job has one gradient"
    fails(script, BadInput, message if case == "closure" else UNKNOWN[case][1])


@pytest.mark.parametrize("sync", ["bsp", "asp", "downpour:2,2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_that_the_servers_do_not_hold_are_refused(dtype: torch.dtype, sync: str) -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(2, 1).to(dtype)
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    fails(script, BadInput, f"parameter weight is {dtype}; the servers hold float32", sync=sync)


@pytest.mark.parametrize("sync", ["average:2", "bmuf:2", "diloco:2", "easgd:2"])
def test_parameters_that_the_servers_would_round_are_refused(sync: str) -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(2, 1).double()
        worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    message = f"parameter weight is torch.float64; under {sync} the servers hold the model, in float32"
    fails(script, BadInput, message, sync=sync)


class Pulling(Dataset[Any]):
    """Reads rows where batches are fetched, which is another process."""

    def __init__(self, table: shoal.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.table.pull([index])


def test_mistake_a_client_in_a_dataloader_worker() -> None:
    with shoal.connect("memory://") as client:
        table = client.table("items", dim=2, optimizer=shoal.optim.SGD(lr=0.1))
        fetching = DataLoader(Pulling(table), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(WrongProcess) as failure:
            next(iter(fetching))
    assert "forked from it. Call shoal.connect() in the new process" in str(failure.value)
    assert "in a DataLoader worker pull in the training loop instead" in str(failure.value)
    # torch joins the process when the iterator goes, for seconds: not in a thread of a later test.
    del failure
    gc.collect()


def test_a_model_that_is_trained_without_its_optimizer_is_refused() -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(1, 1)
        data = DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, batches = worker.prepare(model, data)
        for (x,) in batches:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    fails(script, BadInput, "the model is trained, and prepare was given no optimizer", workers=2)


def test_a_loader_that_was_not_prepared_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def script(worker: Worker) -> None:
        model = torch.nn.Linear(1, 1)
        model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.ones(4, 1)).mean().backward()
            optimizer.step()

    run_workers(2, script)
    assert caplog.text.count("no loader was given to prepare: each of the 2 workers trains all") == 1
    caplog.clear()
    run_workers(1, script)

    def divides(worker: Worker) -> None:
        worker.prepare([torch.ones(4, 1)], split=False)
        script(worker)

    run_workers(2, divides)
    assert "no loader" not in caplog.text


@pytest.mark.parametrize(("sync", "advised"), [("bsp", True), ("allreduce", False), ("average:2", False)])
def test_a_word_is_advised_only_where_another_one_would_help(sync: str, advised: bool) -> None:
    def script(worker: Worker) -> None:
        model = ShoalModel()
        worker.prepare(model, torch.optim.RMSprop(model.parameters()))

    said = fails(script, BadInput, "torch.optim.rmsprop.RMSprop has no twin at the servers", sync=sync)
    assert ("or a sync word whose optimizer runs on the workers (allreduce" in said) == advised
    assert "Take one of them" in said
    assert "A table can have one of its own under every word" in said


@pytest.mark.parametrize("workers", [1, 2])
def test_clipping_parameters_is_told_to_take_the_model(workers: int) -> None:
    def script(worker: Worker) -> None:
        model, *_ = prepared(worker)
        worker.clip_grad_norm_(model.parameters(), 1.0)

    fails(script, BadInput, "pass the model itself, as worker.clip_grad_norm_(model, 1.0)", workers=workers)
