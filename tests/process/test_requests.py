"""What a step of training sends, counted by clients of real servers; docs/performance.md has the formulas."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch

import shoal
from shoal.collective.group import Group, ThreadGroup
from shoal.store.many import pull_many
from shoal.sync.words import as_policy
from shoal.train.regroup import Regroup
from shoal.train.worker import Worker

pytestmark = pytest.mark.process
TABLES, DIM, BATCH, STEPS, SHARDS = 26, 4, 64, 6, 64
WIDTHS = (TABLES * DIM, 4, 4, 1)  # of what dense layers take and give
SIZES = [size for wide, narrow in itertools.pairwise(WIDTHS) for size in (wide * narrow, narrow)]
TENSORS, ELEMENTS = len(SIZES), sum(SIZES)
LR, WAIT_S = 1e-6, 60.0
COUNTED = ("pulls", "pushes", "requests", "bytes_sent", "bytes_received")
NAMES = map("layers{}".format, itertools.count())


class Fields(torch.nn.Module):
    """26 tables: one by one or in a collection; dense layers of that name."""

    def __init__(self, collection: bool, dense: str) -> None:
        super().__init__()
        rows = {"dim": DIM, "optimizer": shoal.optim.SGD(lr=LR)}
        modules = {f"f{i}": shoal.nn.Embedding(f"f{i}", **rows) for i in range(TABLES)}
        self.collection = collection
        self.fields = shoal.nn.EmbeddingCollection(modules) if collection else torch.nn.ModuleDict(modules)
        sizes = itertools.pairwise(WIDTHS) if dense else ()
        layers = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        self.layers = torch.nn.ModuleDict({dense or "none": layers})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        given = by_table(ids)
        vectors = (
            self.fields(given)
            if self.collection
            else {name: self.fields[name](given[name]) for name in given}
        )
        (layers,) = self.layers.values()
        return layers(torch.cat(list(vectors.values()), 1)).sum()


def by_table(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"f{i}": ids[:, i].contiguous() for i in range(TABLES)}


KEYS = {"keys": by_table}


class Exchanges(Group):
    """A group that notes what its members exchange without the servers: how, how often, bytes."""

    def __init__(self, group: Group) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size
        self.made: list[tuple[str, int, int]] = []

    def sum_(self, values: torch.Tensor) -> None:
        self.made.append(("sum", 1, values.nbytes))
        self._group.sum_(values)

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        self.made.append(("swap", len(peers), values.nbytes))
        return self._group.swap(values, peers)

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        self._group.copy_from_(values, root)


class Step(Counter[str]):
    """What the client counted within one step; `held`: servers that have dense values; what was exchanged."""

    held = 0
    made: Sequence[tuple[str, int, int]] = ()

    @property
    def asked(self) -> tuple[int, int, int]:
        return self["pulls"], self["pushes"], self["requests"]


def steps_of(worker: Worker, model: Fields, momentum: float, clip: float, **options: Any) -> list[Step]:
    """All steps but the last, with which a pass ends."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    generator = torch.Generator().manual_seed(3)
    batches = [
        torch.stack([torch.randperm(1000, generator=generator)[:BATCH] for _ in range(TABLES)], 1)
        for _ in range(STEPS * worker.world_size)
    ]
    model, optimizer, loader = worker.prepare(model, optimizer, batches, **options)
    worker.waits._slice_s = WAIT_S  # who waits for others asks now and then again: not here
    assert worker.strategy is not None
    before = worker.client.stats()["requests"]
    pull_many(worker.client, [(tensor, None) for tensor in worker.strategy.tensors.values()])
    held = worker.client.stats()["requests"] - before
    made = getattr(worker.group, "made", [])
    counted = []
    for ids in loader:
        optimizer.zero_grad()
        loss = model(ids)
        counted.append((worker.client.stats(), len(made)))
        loss.backward()
        if clip:
            worker.clip_grad_norm_(model, clip)
        optimizer.step()
    steps = []
    for (one, first), (two, last) in itertools.pairwise(counted):
        steps.append(Step({name: two[name] - one[name] for name in COUNTED}))
        steps[-1].held, steps[-1].made = held, made[first:last]
    return steps


class Clusters:
    """Servers for the jobs of all cases, one after the other."""

    def __init__(self, stack: ExitStack) -> None:
        self.of = cache(
            lambda servers, shards: stack.enter_context(shoal.LocalCluster(servers, shards=shards))
        )

    def run(
        self,
        servers: int,
        workers: int,
        word: str,
        collection: bool = False,
        *,
        dense: bool = True,
        lane: str = "auto",
        shards: int = SHARDS,
        momentum: float = 0.0,
        clip: float = 0.0,
        regroup: bool = False,
        **options: Any,
    ) -> list[list[Step]]:
        """What each worker of a job counted in its steps."""
        cluster, name, threads = self.of(servers, shards), next(NAMES) if dense else "", {}
        groups = ThreadGroup.make(workers, WAIT_S)

        def one(rank: int) -> list[Step]:
            client = cluster.connect(lane=lane)
            known = {"rank": rank, "world_size": workers, "threads": threads}
            with Worker(client, as_policy(word), group=Exchanges(groups[rank]), **known) as worker:
                if regroup:
                    worker.group = Regroup(worker)
                return steps_of(worker, Fields(collection, name), momentum, clip, **options)

        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(one, rank) for rank in range(workers)]
            return [job.result(WAIT_S) for job in jobs]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with ExitStack() as stack:
        yield Clusters(stack)


@pytest.mark.parametrize("collection", [True, False])
def test_26_tables_on_2_servers_are_2_pulls_and_2_pushes_a_step(clusters: Clusters, collection: bool) -> None:
    for steps in clusters.run(2, 2, "asp", collection, dense=False, **({} if collection else KEYS)):
        # To each server a pull and a push; to the first, what was done.
        assert [step.asked for step in steps] == [(1, 1, 2 + 2 + 1)] * (STEPS - 1)


def test_tables_one_by_one_are_a_pull_each(clusters: Clusters) -> None:
    """The counters do count: this is what `keys=` saves."""
    (steps,) = clusters.run(2, 1, "asp", dense=False)
    assert [step.asked for step in steps] == [(TABLES, 1, 2 * TABLES + 2 + 1)] * (STEPS - 1)


# What goes to S servers, of which `held` have dense values: pulls, pushes, requests.
PARTS = {
    "rows": lambda s, held: (1, 1, 2 * s),  # with the push also dense gradients
    "done": lambda s, held: (0, 0, 1),
    "commit": lambda s, held: (0, 0, s),
    "up": lambda s, held: (0, 1, held),  # dense values, or gradients, by themselves
    "down": lambda s, held: (1, 0, held),
    "each up": lambda s, held: (0, TENSORS, TENSORS),
    "each down": lambda s, held: (TENSORS, 0, TENSORS),
}
ASP, BSP = ["rows", "done", "down"], ["rows", "done", "commit", "down"]
BLOCK = ["up", "done", "commit", "down"]
WORDS: dict[str, list[str]] = {
    "asp": ASP,
    "ssp:1": ASP,
    "softsync:1": ASP,
    "softsync:2": ASP,
    "bsp": BSP,
    "quorum:1": BSP,
    "dcasgd:0.1": ["rows", "each up", "done", "down"],
    "downpour:2,3": ["rows", "done"],
    "average:2": ["rows"],
    "bmuf:2": ["rows"],
    "diloco:2": ["rows"],
    "easgd:2": ["rows", "done"],
    "allreduce": ["rows", "done", "commit"],
    "gossip": ["rows", "done"],
    "hogwild": ["rows", "done"],
}
# And in every so-many-th step, from that one on.
NOW_AND_THEN: dict[str, list[tuple[int, int, list[str]]]] = {
    "softsync:2": [(2, 1, ["commit"])],  # of one worker
    "downpour:2,3": [(2, 1, ["up"]), (3, 2, ["down"])],
    "average:2": [(2, 1, BLOCK)],
    "bmuf:2": [(2, 1, BLOCK)],
    "diloco:2": [(2, 1, BLOCK)],
    "easgd:2": [(2, 2, ["each down", "up"])],
}


def expected(word: str, number: int, servers: int, held: int) -> tuple[int, ...]:
    parts = list(WORDS[word])
    for period, first, more in NOW_AND_THEN.get(word, ()):
        parts += more * (number >= first and (number - first) % period == 0)
    return tuple(map(sum, zip(*(PARTS[part](servers, held) for part in parts), strict=True)))


@pytest.mark.parametrize(
    ("servers", "workers", "word"),
    [
        (1, 2, "asp"), (3, 1, "asp"), (2, 2, "bsp"), (3, 1, "bsp"), (3, 2, "ssp:1"), (2, 2, "quorum:1"),
        (2, 1, "softsync:1"), (2, 1, "softsync:2"), (2, 1, "dcasgd:0.1"), (2, 1, "downpour:2,3"),
        (2, 2, "average:2"), (3, 1, "bmuf:2"), (2, 1, "diloco:2"), (2, 2, "easgd:2"), (2, 2, "allreduce"),
        (2, 3, "gossip"), (2, 2, "hogwild"),
    ],
)  # fmt: skip
def test_messages_of_a_step(clusters: Clusters, servers: int, workers: int, word: str) -> None:
    """As docs/performance.md says: more workers or more tables do not make a worker send more."""
    for steps in clusters.run(servers, workers, word, **KEYS):
        assert len(steps) == STEPS - 1
        for number, step in enumerate(steps):
            assert 0 < step.held <= servers or word in ("allreduce", "gossip", "hogwild")
            assert step.asked == expected(word, number, servers, step.held), number


def test_rows_that_are_pulled_ahead_and_changed_since_are_one_pull_more(clusters: Clusters) -> None:
    (steps,) = clusters.run(2, 1, "asp", **KEYS, prefetch=1)
    *most, last = [step.asked for step in steps]
    held = steps[0].held
    assert most == [(3, 1, 2 + 2 + 2 + 1 + held)] * (STEPS - 2)
    assert last == (2, 1, 2 + 2 + 1 + held)  # behind the batch that it is for comes none


def test_optimizer_state_that_is_averaged_is_pulled_twice(clusters: Clusters) -> None:
    (steps,) = clusters.run(2, 1, "average:2,state=average", momentum=0.9, **KEYS)
    pulls, pushes, requests = expected("average:2", 3, 2, steps[3].held)
    # The second block: in the first its tensors are made.
    assert steps[3].asked == (pulls + 2 * TENSORS, pushes, requests + 2 * TENSORS)


def test_a_clip_in_a_round_asks_each_server_for_its_part_of_the_norm(clusters: Clusters) -> None:
    for step in itertools.chain(*clusters.run(2, 2, "bsp", clip=1.0, **KEYS)):
        *_, requests = expected("bsp", 0, 2, step.held)
        assert step["requests"] == requests + 2


@pytest.mark.parametrize("workers", [2, 3])
def test_what_workers_exchange_without_the_servers(clusters: Clusters, workers: int) -> None:
    """allreduce: who has a gradient, rate, samples and norm in doubles, then gradients. gossip: the model."""
    for step in itertools.chain(*clusters.run(1, workers, "allreduce", **KEYS)):
        assert step.made == [("sum", 1, 8 * (TENSORS + 1 + 2)), ("sum", 1, 4 * ELEMENTS)]
    for step in itertools.chain(*clusters.run(1, workers, "gossip", **KEYS)):
        assert step.made == [("swap", min(2, workers - 1), 4 * ELEMENTS)]


@pytest.mark.gloo
def test_allreduce_of_workers_that_may_die_asks_who_has_finished(clusters: Clusters) -> None:
    servers = 2
    for steps in clusters.run(servers, 2, "allreduce", regroup=True, **KEYS):
        *_, requests = expected("allreduce", 0, servers, 0)
        # More where others are long in coming.
        assert min(step["requests"] for step in steps) == requests + 1 + servers


FRAME, PART, PAD = 128, 64, 64  # bytes of a frame's header, of a part's descriptor, of an array's alignment
DONE, UNIT, LEAVE, COMMIT, ENTRY = 96, 16, 40, 24, 32


def padding(*sizes: int) -> int:
    return sum(-size % PAD for size in sizes)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("word", ["asp", "bsp"])
def test_bytes_of_a_step(clusters: Clusters, servers: int, workers: int, word: str) -> None:
    """Over tcp everything is counted: keys and gradients up, rows and dense values down, and what frames add.
    With a shard for each server it is known how many parts there are; with one server also how long arrays.
    """
    keys, parts = TABLES * BATCH, TABLES * servers
    commit = COMMIT + ENTRY * workers if word == "bsp" else 0
    leave = LEAVE + commit + padding(LEAVE + commit)
    for step in itertools.chain(*clusters.run(servers, workers, word, True, lane="tcp", shards=servers)):
        frames = step["requests"] * FRAME
        pieces = 2 * TENSORS * (8 + PART)  # of dense tensors, by number: pushed and pulled
        arrays = keys * 8 + keys * (8 + 4 * DIM) + 4 * ELEMENTS
        up = frames + 2 * parts * PART + pieces + arrays + DONE + UNIT + servers * commit
        versions = servers  # a push is answered for each shard
        down = frames + (parts + versions + TENSORS) * PART + keys * 4 * DIM + 4 * ELEMENTS + leave
        if servers == 1:
            up += padding(*(4 * size for size in SIZES), *[8] * 2 * TENSORS)
            assert step["bytes_sent"] == up
            assert step["bytes_received"] == down + padding(4 * ELEMENTS)
        else:
            assert up <= step["bytes_sent"] < up + (3 * parts + 3 * TENSORS) * PAD
            assert down <= step["bytes_received"] < down + (servers + step.held) * PAD


def test_bytes_of_many_small_parts(clusters: Clusters) -> None:
    """A part is what one table sends to one shard: of 26 tables and 64 shards there are many."""
    keys, parts, servers = TABLES * BATCH, TABLES * SHARDS, 2  # parts at most
    for step in itertools.chain(*clusters.run(servers, 2, "asp", True, dense=False, lane="tcp")):
        frames = step["requests"] * FRAME
        arrays = keys * 8 + keys * (8 + 4 * DIM)
        most = frames + arrays + 2 * parts * PART + 3 * parts * PAD
        assert arrays + frames < step["bytes_sent"] < most
        most = frames + keys * 4 * DIM + (parts + SHARDS) * PART + servers * PAD + LEAVE
        assert keys * 4 * DIM < step["bytes_received"] < most
