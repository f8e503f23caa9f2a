"""A pass that runs takes in new workers at the end of a step: nothing that is computed changes by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from tests.train.crew import JOIN_S
from tests.train.models import IDS, ShoalModel, dense_values, loader
from tests.train.test_equal import EPOCHS, OPTIMIZERS, Case, _kept, reference
from torch.utils.data import DataLoader

from shoal.data.ledger import StaticLedger
from shoal.data.loader import ShardedLoader
from shoal.store.client import Client
from shoal.store.connect import connect
from shoal.store.rounds import Rounds
from shoal.sync.words import parse
from shoal.train.join import local_workers
from shoal.train.worker import Worker

GROWS_AT = 2  # this batch is the last that two workers share


@dataclass
class Job:
    """Workers in threads, of which some come later."""

    client: Client
    script: Callable[[Worker, Job], Any]
    batch: str
    word: str = "bsp"
    size: int = 0
    results: dict[int, Any] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, size: int) -> None:
        """The workers that are missing to so many."""
        makers = local_workers(size, self.word, client=self.client, batch=self.batch, wait_s=JOIN_S)

        def run(rank: int) -> None:
            try:
                with makers[rank]() as worker:
                    self.results[rank] = self.script(worker, self)
            except BaseException as error:  # noqa: BLE001 - raised by the test's thread
                self.errors.append(error)

        added = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.size, size)]
        self.size = size
        self.threads += added
        for thread in added:
            thread.start()

    def grow(self, size: int) -> None:
        """Others come, and wait for a part; called by a worker that is in a step."""
        before, rounds = self.size, Rounds(self.client, 0, size)
        deadline = monotonic() + JOIN_S
        while "absent" in rounds.state()["phases"]:  # that one is told of the first size, and has yet to join
            assert monotonic() < deadline, rounds.state()
            sleep(0.01)
        rounds.open(**parse(self.word).core_spec(size), resize=True)
        self.start(size)
        waiting = {"at_end"} if self.word == "bsp" else {"working", "waiting", "at_end"}
        while not set(rounds.state()["phases"][before:]) <= waiting and not self.errors:
            assert monotonic() < deadline, rounds.state()
            sleep(0.01)


@contextmanager
def job(script: Callable[[Worker, Job], Any], batch: str = "split", word: str = "bsp") -> Iterator[Job]:
    with connect("memory://", timeout=JOIN_S) as client:
        found = Job(client, script, batch, word)
        found.start(2)
        for thread in found.threads:  # grows meanwhile
            thread.join(JOIN_S)
        if found.errors:
            raise found.errors[0]
        assert not any(thread.is_alive() for thread in found.threads), "a worker hangs"
        yield found


def train(worker: Worker, job: Job, case: Case, grows: dict[int, int]) -> Any:
    name, samples, batch, shuffle, schedule, _ = case
    model = ShoalModel()
    dense_values(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    model, optimizer, batches = worker.prepare(model, optimizer, loader(samples, batch, shuffle))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7) if schedule else None
    made = []
    for epoch in range(EPOCHS):
        made.append(0)
        for ids, x, y in batches:
            if worker.rank == 0 and epoch == 0 and made[0] in grows:
                job.grow(grows[made[0]])
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(ids, x), y).backward()
            optimizer.step()
            made[-1] += 1
            if scheduler is not None:
                scheduler.step()
    found = {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("emb")}
    found["rows"] = torch.from_numpy(model.emb.table.pull(list(range(IDS))).copy())
    return found, made, worker.world_size, worker.ledger.report(0)


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("grows", [{GROWS_AT: 4}, {1: 3, 2: 5}])
def test_a_pass_that_grows_computes_what_one_process_does(name: str, grows: dict[int, int]) -> None:
    case = (name, 59, 7, True, name == "adam", 0.0)  # batches of 7, which 4 do not divide; the last has 3
    _kept.clear()
    expected = reference(*case)
    with job(lambda worker, job: train(worker, job, case, grows)) as done:
        assert len(done.results) == max(grows.values())
        for found, _, size, report in done.results.values():
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
            assert size == max(grows.values())
            assert report.exactly_once, report
            assert report.units == sum(_size(grows, batch) for batch in range(9))
        assert all(done.results[rank][1][0] for rank in done.results)  # steps in the first pass
        assert done.results[0][1] == [9] * EPOCHS


def _size(grows: dict[int, int], batch: int) -> int:
    return max([2, *(size for at, size in grows.items() if batch > at)])


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_batch_with_two_steps_is_not_grown_in_between(optimizers: int) -> None:
    x = torch.arange(40.0).view(-1, 1) / 40

    def made() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        models = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(optimizers))
        for parameter in models.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        return models, [torch.optim.SGD(model.parameters(), 0.1) for model in models]

    def steps(models: Any, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor) -> None:
        for i in range(2):
            k = i % len(optimizers)
            optimizers[k].zero_grad()
            ((models[k](batch) - 1) ** 2).mean().backward()
            optimizers[k].step()

    def script(worker: Worker, job: Job) -> Any:
        models, each = made()
        models, batches, *each = worker.prepare(models, DataLoader(x, batch_size=8), *each)
        sizes = []
        for epoch in range(3):
            for at, batch in enumerate(batches):
                if (worker.rank, epoch, at) == (0, 0, GROWS_AT):
                    job.grow(4)
                steps(models, each, batch)
            sizes.append(worker.world_size)
        return [p.detach().clone() for p in models.parameters()], sizes

    models, each = made()
    for _ in range(3):
        for batch in x.split(8):
            steps(models, each, batch)
    with job(script) as done:
        for found, sizes in done.results.values():
            torch.testing.assert_close(found, [p.detach() for p in models.parameters()])
            assert sizes[1:] == [4, 4]


def test_a_loader_that_is_only_read_does_not_say_how_many_there_are() -> None:
    def script(worker: Worker, job: Job) -> Any:
        model = torch.nn.Linear(1, 1)
        x = torch.arange(64.0).view(-1, 1)
        data, val = DataLoader(x, batch_size=8), DataLoader(x, batch_size=16)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model, optimizer, batches, val = worker.prepare(model, optimizer, data, val)
        sizes, at = [], 0 if worker.rank < 2 else GROWS_AT + 1
        for batch in batches:
            if worker.rank == 0 and at == GROWS_AT:
                job.grow(4)
            model.eval()
            seen = sum(map(len, val))
            model.train()
            sizes.append((at, worker.world_size, seen))
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            at += 1
        state = batches.state_dict()
        batches.load_state_dict(state)  # its own
        return sizes

    with job(script) as done:
        read = [one for found in done.results.values() for one in found]
    for at in range(8):
        assert {size for batch, size, _ in read if batch == at} == {2 if at <= GROWS_AT else 4}
        assert sum(seen for batch, _, seen in read if batch == at) == 64


def test_a_new_worker_reads_nothing_of_what_is_cut_for_those_before_it() -> None:
    def script(worker: Worker, job: Job) -> Any:
        model = torch.nn.Linear(1, 1)
        x = torch.arange(64.0).view(-1, 1)
        data, val = DataLoader(x, batch_size=1), DataLoader(x, batch_size=16)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model, optimizer, batches, val = worker.prepare(model, optimizer, data, val)
        for at, batch in enumerate(batches):
            if (worker.rank, at) == (0, GROWS_AT):
                job.grow(3)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        with torch.no_grad():
            return sum(map(len, val))

    with job(script, word="asp") as done:
        assert sorted(done.results) == [0, 1, 2]
        assert sum(done.results.values()) == 64


def test_whole_batches_go_to_new_workers_in_turn() -> None:
    def script(worker: Worker, job: Job) -> Any:
        model = torch.nn.Linear(1, 1)
        data = DataLoader(torch.arange(23.0).view(-1, 1), batch_size=1)
        model, optimizer, batches = worker.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
        drawn: list[list[float]] = []
        for _ in range(2):
            drawn.append([])
            for x in batches:
                if worker.rank == 0 and len(drawn) == 1 and len(drawn[0]) == GROWS_AT:
                    job.grow(4)
                drawn[-1] += x.flatten().tolist()
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        return drawn, worker.ledger.report(0), len(batches)

    with job(script, "each") as done:
        drawn = [done.results[rank][0] for rank in range(4)]
        assert drawn[3] == [[9.0, 13.0, 17.0, 21.0], [3.0, 7.0, 11.0, 15.0, 19.0]]
        for epoch in range(2):
            assert sorted(x for one in drawn for x in one[epoch]) == list(range(23))
        assert all(report.exactly_once for _, report, _ in done.results.values())


def test_evaluation_and_means_within_the_pass_are_of_all_workers() -> None:
    def script(worker: Worker, job: Job) -> Any:
        model = torch.nn.Linear(1, 1)
        x = torch.arange(64.0).view(-1, 1)
        data, val = DataLoader(x, batch_size=8), DataLoader(x, batch_size=16)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model, optimizer, batches, val = worker.prepare(model, optimizer, data, val)
        read, at = [], 0 if worker.rank < 2 else GROWS_AT + 1
        for batch in batches:
            if worker.rank == 0 and at == GROWS_AT:
                job.grow(4)
            with torch.no_grad():
                seen = sum(map(len, val))
            read.append((at, worker.world_size, seen, worker.mean(float(worker.rank))))
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            at += 1
        return read

    with job(script) as done:
        read = [one for found in done.results.values() for one in found]
    for at in range(8):
        n = 2 if at <= GROWS_AT else 4
        here = [(size, mean) for batch, size, _, mean in read if batch == at]
        assert here == [(n, (n - 1) / 2)] * n
        assert sum(seen for batch, _, seen, _ in read if batch == at) == 64


@pytest.mark.parametrize("batch", ["split", "each"])
def test_the_state_of_a_loader_whose_pass_has_grown_is_of_the_present_workers(batch: Any) -> None:
    def loaders(n: int) -> list[ShardedLoader]:
        data = DataLoader(range(48), batch_size=4)
        return [ShardedLoader(data, rank, n, batch=batch) for rank in range(n)]

    cuts = ((0, 2), (6, 3))  # of 12 batches
    first = loaders(3)
    used: list[int] = []
    for rank, one in enumerate(first):
        assert isinstance(one.ledger, StaticLedger)
        one.ledger._begin = lambda *_: cuts
        drawn = iter(one)
        for _ in range((3 if rank < 2 else 0) + (2 if batch == "split" else 1)):
            used += next(drawn).tolist()
    second = loaders(3)
    for one, before in zip(second, first, strict=True):
        one.load_state_dict(before.state_dict())
        used += [index for part in one for index in part.tolist()]
    assert sorted(used) == list(range(48))
