"""What a step of training sends, counted by clients of real servers; docs/performance.md has the formulas."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from shoal.collective.group import Lone
from shoal.sync.words import as_policy
from shoal.train.worker import Worker

pytestmark = pytest.mark.process
TABLES, DIM, BATCH, STEPS, SHARDS = 26, 4, 64, 5, 64
WAIT_S = 30.0
COUNTED = ("pulls", "pushes", "requests", "bytes_sent", "bytes_received")
FRAME, PART, PAD = 128, 64, 64  # bytes of a frame's header, of a part's descriptor, of an array's alignment


class Fields(torch.nn.Module):
    """26 tables: one by one or in a collection, with a dense layer or without."""

    def __init__(self, collection: bool, dense: bool) -> None:
        super().__init__()
        modules = {f"f{i}": shoal.nn.Embedding(f"f{i}", dim=DIM) for i in range(TABLES)}
        self.collection = collection
        self.fields = shoal.nn.EmbeddingCollection(modules) if collection else torch.nn.ModuleDict(modules)
        self.out = torch.nn.Linear(TABLES * DIM, 1) if dense else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        given = by_table(ids)
        vectors = (
            self.fields(given)
            if self.collection
            else {name: self.fields[name](given[name]) for name in given}
        )
        whole = torch.cat(list(vectors.values()), 1)
        return (whole if self.out is None else self.out(whole)).sum()


def by_table(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"f{i}": ids[:, i].contiguous() for i in range(TABLES)}


KEYS = {"keys": by_table}


def steps_of(worker: Worker, model: Fields, **options: Any) -> list[dict[str, int]]:
    """What the client counted in each step but the last, with which a pass ends."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    batches = [
        torch.stack([torch.randperm(1000, generator=generator)[:BATCH] for _ in range(TABLES)], 1)
        for _ in range(STEPS * worker.world_size)
    ]
    model, optimizer, loader = worker.prepare(model, optimizer, batches, **options)
    counted = []
    for ids in loader:
        optimizer.zero_grad()
        loss = model(ids)
        counted.append(worker.client.stats())
        loss.backward()
        optimizer.step()
    return [
        {name: after[name] - before[name] for name in COUNTED}
        for before, after in itertools.pairwise(counted)
    ]


def run_job(
    servers: int,
    workers: int,
    word: str,
    collection: bool,
    *,
    dense: bool,
    lane: str = "auto",
    **options: Any,
) -> list[dict[str, int]]:
    """What all workers counted in their steps, on servers of their own."""
    with shoal.LocalCluster(servers=servers, shards=SHARDS) as cluster, ThreadPoolExecutor(workers) as pool:

        def one(rank: int) -> list[dict[str, int]]:
            client = cluster.connect(lane=lane)
            with Worker(client, as_policy(word), rank=rank, world_size=workers, group=Lone()) as worker:
                return steps_of(worker, Fields(collection, dense), **options)

        jobs = [pool.submit(one, rank) for rank in range(workers)]
        return [step for job in jobs for step in job.result(WAIT_S)]


@pytest.mark.parametrize("collection", [True, False])
def test_26_tables_on_2_servers_are_2_pulls_and_2_pushes_a_step(collection: bool) -> None:
    counted = run_job(2, 2, "asp", collection, dense=False, **({} if collection else KEYS))
    assert len(counted) == 2 * (STEPS - 1)
    for step in counted:
        assert (step["pulls"], step["pushes"]) == (1, 1)
        assert step["requests"] == 2 + 2 + 1  # to each server a pull and a push; to the first, what was done


def test_tables_one_by_one_are_a_pull_each() -> None:
    """The counters do count: this is what `keys=` saves."""
    for step in run_job(2, 1, "asp", False, dense=False):
        assert step["pulls"] == TABLES
        assert step["requests"] == 2 * TABLES + 2 + 1


@pytest.mark.parametrize(
    ("servers", "workers", "word", "prefetch"),
    [(1, 2, "asp", 0), (2, 1, "asp", 1), (2, 2, "bsp", 0), (3, 2, "ssp:1", 0)],
)
def test_messages_of_a_step(servers: int, workers: int, word: str, prefetch: int) -> None:
    """As docs/performance.md says: more workers or more tables do not make a worker send more."""
    rows, dense, done = 2 * servers, servers, 1
    commits = servers if word == "bsp" else 0
    for step in run_job(servers, workers, word, False, dense=True, **KEYS, prefetch=prefetch):
        assert step["pushes"] == 1
        assert step["pulls"] in ((2, 3) if prefetch else (2,))
        fewest, most = rows + done, rows + dense + done + commits + servers * prefetch
        assert fewest < step["requests"] <= most


def test_bytes_of_a_step() -> None:
    """Over tcp everything is counted: keys and gradients up, rows down, and what frames add to that."""
    servers, keys = 2, TABLES * BATCH
    parts = TABLES * SHARDS  # at most; a part is what one table sends to one shard
    arrays = keys * 8 + keys * (8 + 4 * DIM)
    for step in run_job(servers, 1, "asp", True, dense=False, lane="tcp"):
        frames = servers * 2 * FRAME + 2 * parts * PART + parts * 2 * PAD + TABLES * servers * PAD
        assert arrays < step["bytes_sent"] <= arrays + frames + 4 * FRAME
        rows = keys * 4 * DIM
        assert rows < step["bytes_received"] <= rows + servers * 2 * FRAME + parts * (PART + PAD) + 4 * FRAME
