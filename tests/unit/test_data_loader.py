"""The divided loader against plain torch: the same samples in the same order, whoever takes them."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.data.ledger import LeasedLedger, Ledger
from shoal.data.loader import NO_UNIT, ShardedLoader
from shoal.errors import BadInput

# The workers of a job, in one process: each builds its own loader, as each process of a job does.


def fresh(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


def plain(size: int, batch: int, **options: Any) -> DataLoader[int]:
    return DataLoader(list(range(size)), batch_size=batch, **options)


def passes(loader: Iterable[Any], count: int) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in loader] for _ in range(count)]


class Recorder:
    """Remembers what `on_unit` says."""

    def __init__(self) -> None:
        self.units: list[tuple[int, int, int]] = []

    def __call__(self, epoch: int, unit: int, samples: int) -> None:
        self.units.append((epoch, unit, samples))


def by_unit(build: Any, n: int, count: int, **options: Any) -> dict[tuple[int, int], list[int]]:
    """What each unit of each pass held, over all workers; every unit is seen once."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(n):
        recorder = Recorder()
        batches = [
            b for p in passes(ShardedLoader(build(), rank, n, on_unit=recorder, **options), count) for b in p
        ]
        full = iter(batches)
        for epoch, unit, samples in recorder.units:
            assert (epoch, unit) not in found
            found[epoch, unit] = next(full) if samples else []
            assert len(found[epoch, unit]) == samples
        assert next(full, None) is None
    return found


def joined(found: dict[tuple[int, int], list[int]], n: int, epoch: int) -> list[list[int]]:
    """The global batches of a pass, put together again."""
    units = sorted(unit for e, unit in found if e == epoch)
    assert units == list(range(len(units)))
    return [
        list(itertools.chain(*(found[epoch, unit] for unit in units[b : b + n])))
        for b in range(0, len(units), n)
    ]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    n=st.integers(1, 5),
    batch=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
)
def test_the_parts_of_all_workers_are_plain_torchs_batches(
    size: int, n: int, batch: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    if drop_last and size < batch:
        return

    def build() -> DataLoader[int]:
        return plain(size, batch, shuffle=shuffle, drop_last=drop_last, generator=fresh(seed))

    found = by_unit(build, n, 3)
    expected = passes(build(), 3)
    assert [joined(found, n, epoch) for epoch in range(3)] == expected
    for epoch in range(3):
        sizes = [len(part) for (e, unit), part in sorted(found.items()) if e == epoch]
        assert all(max(step) - min(step) <= 1 for step in zip(*[iter(sizes)] * n, strict=True))


@pytest.mark.gloo
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_processes_that_fetch_change_nothing(n: int, persistent: bool) -> None:
    def build() -> DataLoader[int]:
        return plain(23, 5, shuffle=True, generator=fresh(5), num_workers=2, persistent_workers=persistent)

    found = by_unit(build, n, 3)
    assert [joined(found, n, epoch) for epoch in range(3)] == passes(build(), 3)


def samplers(seed: int | None) -> dict[str, DataLoader[int]]:
    data = list(range(20))
    return {
        "replacement": DataLoader(data, 6, sampler=RandomSampler(data, True, 50, fresh(seed))),
        "subset": DataLoader(data, 6, sampler=SubsetRandomSampler(data[3:], fresh(seed))),
        "weighted": DataLoader(
            data, 6, sampler=WeightedRandomSampler([1.0, 2.0] * 10, 30, generator=fresh(seed))
        ),
        "list": DataLoader(data, 6, sampler=[4, 4, 1, 3, 2, 9, 11]),
        "batches": DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data, generator=fresh(seed)), 7, True)
        ),
        "uneven": DataLoader(data, batch_sampler=[[1], [2, 3, 4, 5, 6], [7, 8], [0, 9, 10, 11]]),
    }


@pytest.mark.parametrize("name", samplers(0))
@pytest.mark.parametrize("n", [1, 3])
def test_samplers_keep_their_meaning(name: str, n: int) -> None:
    found = by_unit(lambda: samplers(7)[name], n, 2)
    assert [joined(found, n, epoch) for epoch in range(2)] == passes(samplers(7)[name], 2)


@pytest.mark.parametrize("name", samplers(None))
def test_workers_agree_without_a_generator(name: str) -> None:
    first = by_unit(lambda: samplers(None)[name], 3, 2)
    alone = by_unit(lambda: samplers(None)[name], 1, 2)
    assert joined(first, 3, 1) == joined(alone, 1, 1)


def test_a_shuffle_without_a_generator_depends_on_seed_and_pass_only() -> None:
    one, two = (passes(ShardedLoader(plain(30, 30, shuffle=True), 0, 1, seed=seed), 2) for seed in (1, 2))
    torch.manual_seed(99)
    again = passes(ShardedLoader(plain(30, 30, shuffle=True), 0, 1, seed=1), 2)
    assert one == again
    assert len({tuple(batch) for run in (one, two) for (batch,) in run}) == 4
    assert all(sorted(batch) == list(range(30)) for run in (one, two) for (batch,) in run)


class Careless(Sampler[int]):
    """A sampler that draws from all global randomness there is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        import random

        order = torch.randperm(self.size).tolist()
        np.random.shuffle(order)
        for index in order:
            yield (index + random.randrange(self.size)) % self.size


def test_global_randomness_is_not_touched_and_foreign_samplers_agree() -> None:
    import random

    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]

    before = state()
    one = by_unit(lambda: DataLoader(range(20), 6, sampler=Careless(20)), 3, 2)
    passes(ShardedLoader(plain(30, 4, shuffle=True), 0, 2), 2)
    assert state() == before
    torch.manual_seed(torch.initial_seed() + 1)
    random.seed(4)
    two = by_unit(lambda: DataLoader(range(20), 6, sampler=Careless(20)), 3, 2)
    assert one == two
    assert joined(one, 3, 0) != joined(one, 3, 1)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Gives what a fetching process draws, as an augmentation does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())

    def __len__(self) -> int:
        return 8


@pytest.mark.gloo
def test_fetching_processes_of_different_workers_do_not_augment_alike() -> None:
    drawn = [
        torch.cat(list(ShardedLoader(DataLoader(Noisy(), 4, num_workers=1, generator=fresh(3)), rank, 2)))
        for rank in (0, 1)
    ]
    alone = torch.cat(list(ShardedLoader(DataLoader(Noisy(), 4, num_workers=1, generator=fresh(3)), 0, 1)))
    assert not torch.equal(*drawn)
    assert torch.equal(alone, torch.cat(list(DataLoader(Noisy(), 4, num_workers=1, generator=fresh(3)))))


class Counting(torch.utils.data.Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size, self.read = size, list[int]()

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index

    def __len__(self) -> int:
        return self.size


def test_only_ones_own_samples_are_fetched() -> None:
    data = Counting(20)
    got = passes(ShardedLoader(DataLoader(data, 8), 1, 2), 1)
    assert data.read == list(itertools.chain(*got[0])) == [4, 5, 6, 7, 12, 13, 14, 15, 18, 19]


def test_settings_of_the_loader_are_kept() -> None:
    loader = DataLoader(list(range(6)), 4, collate_fn=lambda samples: ("mine", samples))
    divided = ShardedLoader(loader, 0, 2)
    assert list(divided) == [("mine", [0, 1]), ("mine", [4])]
    assert divided.batch_size == 4
    assert len(divided.dataset) == 6


def test_lists_of_indexes_without_batching_are_cut_too() -> None:
    data = torch.arange(10) * 10
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), 4, False))
    assert passes(ShardedLoader(loader, 1, 2), 1) == [[[20, 30], [60, 70], [90]]]


def test_items_without_batching_are_whole_units() -> None:
    loader = DataLoader(torch.arange(12).view(6, 2), batch_size=None)
    recorder = Recorder()
    assert passes(ShardedLoader(loader, 1, 4, on_unit=recorder), 1) == [[[2, 3], [10, 11]]]
    assert recorder.units == [(0, 1, 2), (0, 5, 2)]


# Empty parts, whole batches, streams.


def test_an_empty_part_is_told_and_yields_no_batch() -> None:
    recorder = Recorder()
    assert passes(ShardedLoader(plain(9, 4), 2, 3, on_unit=recorder), 1) == [[[3], [7]]]
    assert recorder.units == [(0, 2, 1), (0, 5, 1), (0, 8, 0)]


@pytest.mark.parametrize("fetching", [0, pytest.param(2, marks=pytest.mark.gloo)])
def test_fewer_samples_than_workers_leave_some_abstaining(fetching: int) -> None:
    told = []
    for rank in range(4):
        recorder = Recorder()
        passes(ShardedLoader(plain(2, 2, num_workers=fetching), rank, 4, on_unit=recorder), 1)
        told += recorder.units
    assert told == [(0, 0, 1), (0, 1, 1), (0, 2, 0), (0, 3, 0)]


@pytest.mark.parametrize("fetching", [0, pytest.param(2, marks=pytest.mark.gloo)])
def test_empty_parts_keep_their_place_in_the_order(fetching: int) -> None:
    loader = DataLoader(range(20), batch_sampler=[[1], [2, 3], [4], [5], [6, 7], [8]], num_workers=fetching)
    recorder = Recorder()
    assert passes(ShardedLoader(loader, 1, 2, on_unit=recorder), 1) == [[[3], [7]]]
    assert [(unit, samples) for _, unit, samples in recorder.units] == [
        (1, 0),
        (3, 1),
        (5, 0),
        (7, 0),
        (9, 1),
        (11, 0),
    ]


def test_the_size_of_the_global_batch_is_known_with_each_unit() -> None:
    sizes: list[int] = []
    loader = ShardedLoader(plain(7, 4), 2, 3, on_unit=lambda *unit: sizes.append(loader.global_samples))
    list(loader)
    assert sizes == [4, 3]


def test_whole_batches_are_dealt_in_turn_and_the_rest_idles() -> None:
    recorders = [Recorder() for _ in range(3)]
    got = [
        passes(ShardedLoader(plain(20, 5), rank, 3, batch="each", on_unit=recorders[rank]), 1)[0]
        for rank in range(3)
    ]
    assert got == [[[0, 1, 2, 3, 4], [15, 16, 17, 18, 19]], [[5, 6, 7, 8, 9]], [[10, 11, 12, 13, 14]]]
    assert [recorder.units[-1] for recorder in recorders] == [(0, 3, 5), (0, NO_UNIT, 0), (0, NO_UNIT, 0)]
    assert [len(ShardedLoader(plain(20, 5), rank, 3, batch="each")) for rank in range(3)] == [2, 1, 1]


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_streams_go_by_whole_batches_in_turn(n: int) -> None:
    found = by_unit(lambda: DataLoader(Stream(14), 4), n, 2) if n in (1, 2) else {}
    for rank in range(n):
        expected = passes(DataLoader(Stream(14), 4), 1)[0][rank::n]
        assert passes(ShardedLoader(DataLoader(Stream(14), 4), rank, n), 2) == [expected, expected]
    assert not found or joined(found, 1, 0) == passes(DataLoader(Stream(14), 4), 1)[0]


def test_generators_and_lists_are_loaders_too() -> None:
    batches = [torch.ones(size) for size in (3, 2, 4, 1)]
    recorder = Recorder()
    assert len(list(ShardedLoader((batch for batch in batches), 1, 3, on_unit=recorder))) == 1
    assert recorder.units == [(0, 1, 2), (0, NO_UNIT, 0)]
    assert len(ShardedLoader(batches, 0, 3)) == 2
    with pytest.raises(TypeError):
        len(ShardedLoader(iter(batches), 0, 3))


@pytest.mark.parametrize(
    "build",
    [
        lambda: DataLoader([], 4),
        lambda: DataLoader([1, 2, 3], 4, drop_last=True),
        lambda: [],
        lambda: DataLoader(range(3), batch_sampler=[]),
    ],
)
def test_an_empty_dataset_is_refused_at_once(build: Any) -> None:
    with pytest.raises(BadInput, match="empty"):
        ShardedLoader(build(), 0, 2)


def test_an_empty_stream_is_refused_when_it_ends() -> None:
    with pytest.raises(BadInput, match="empty"):
        list(ShardedLoader(DataLoader(Stream(0), 4), 0, 2))


class Halved(Sampler[int]):
    num_replicas = 2

    def __iter__(self) -> Iterator[int]:
        return iter([0, 2])


class OwnIteration(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader([1, 2, 3, 4], 2, sampler=Halved()), "divides the data itself"),
        (OwnIteration([1, 2], 2), "__iter__ of its own"),
        (7, "not int"),
    ],
)
def test_what_cannot_be_divided_is_refused(loader: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        ShardedLoader(loader, 0, 2)


@pytest.mark.parametrize(
    ("rank", "n", "batch"), [(2, 2, "split"), (-1, 2, "split"), (0, 0, "split"), (0, 1, "half")]
)
def test_wrong_places_are_refused(rank: int, n: int, batch: Any) -> None:
    with pytest.raises(BadInput):
        ShardedLoader(plain(4, 2), rank, n, batch=batch)


# Leases.


class SharedUnits(Ledger):
    """All workers of a test draw from one list, in any order."""

    def __init__(self, left: dict[int, list[int]], order: Any) -> None:
        self._left, self._order = left, order

    def units(self, epoch: int, total: int) -> Iterator[int]:
        left = self._left.setdefault(epoch, self._order(range(total)))
        while left:
            yield left.pop()


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), n=st.integers(1, 4), batch=st.integers(1, 12), random=st.randoms())
def test_leased_units_hold_the_same_samples_as_static_ones(
    size: int, n: int, batch: int, random: Any
) -> None:
    def shuffled(units: Iterable[int]) -> list[int]:
        return random.sample(list(units), len(list(units)))

    def build() -> DataLoader[int]:
        return plain(size, batch, shuffle=True, generator=fresh(1))

    left: dict[int, list[int]] = {}
    recorders = [Recorder() for _ in range(n)]
    loaders = [
        ShardedLoader(build(), rank, n, SharedUnits(left, shuffled), on_unit=recorders[rank])
        for rank in range(n)
    ]
    found: dict[tuple[int, int], list[int]] = {}
    for _ in range(2):
        running = {rank: iter(loader) for rank, loader in enumerate(loaders)}
        while running:
            rank = random.choice(list(running))
            got = next(running[rank], None)
            if got is None:
                del running[rank]
            else:
                epoch, unit, _ = recorders[rank].units[-1]
                found[epoch, unit] = got.tolist()
    found |= {(e, unit): [] for r in recorders for e, unit, samples in r.units if not samples}
    static = by_unit(build, n, 2)
    assert found == static


def test_units_that_come_back_are_trained_before_the_pass_ends() -> None:
    answers = [[(0, 2)], [], [(3, 4)], []]
    ends = [False, True]
    ledger = LeasedLedger(0, 2, lambda *_: answers.pop(0), end=lambda *_: ends.pop(0))
    loader = ShardedLoader(plain(8, 4, shuffle=True, generator=fresh(2)), 0, 2, ledger)
    static = by_unit(lambda: plain(8, 4, shuffle=True, generator=fresh(2)), 2, 1)
    assert passes(loader, 1) == [[static[0, 0], static[0, 1], static[0, 3]]]
    assert (answers, ends, loader.epoch) == ([], [], 1)
