"""Passes: one after the other, broken off, skipped, and gone on with after a restart."""

import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from shoal.data.ledger import LeasedLedger
from shoal.data.loader import ShardedLoader
from shoal.errors import BadInput


def loader_of(size: int = 23, batch: int = 5, *, seed: int | None = 3, **options: Any) -> DataLoader[int]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(list(range(size)), batch, shuffle=True, generator=generator, **options)


def lists(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_a_plain_loop_advances_the_pass() -> None:
    loader = ShardedLoader(loader_of(), 1, 2)
    seen = []
    for epoch in range(3):
        assert loader.epoch == epoch
        seen.append(lists(loader))
        assert loader.epoch == epoch + 1
    assert len({str(one) for one in seen}) == 3


def test_the_end_of_a_pass_is_told() -> None:
    ended: list[int] = []
    loader = ShardedLoader(loader_of(), 0, 2, on_pass=ended.append)
    for _ in range(3):
        lists(loader)
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 3])
def test_after_a_break_the_next_pass_is_as_in_plain_torch(n: int) -> None:
    plain = loader_of()
    expected = [lists(itertools.islice(plain, 2)), lists(plain)]
    found = []
    for rank in range(n):
        loader = ShardedLoader(loader_of(), rank, n)
        found.append([lists(itertools.islice(loader, 2)), lists(loader)])
        assert loader.epoch == 2
    for one in (0, 1):
        parts = zip(*(worker[one] for worker in found), strict=True)
        assert [list(itertools.chain(*step)) for step in parts] == expected[one]


def test_leased_passes_agree_after_a_break_wherever_each_worker_stood() -> None:
    firsts = []
    for taken in (1, 3):
        # With replacement torch draws 32 at a time, so how much was drawn would show.
        lazy = RandomSampler(range(10), True, 200, torch.Generator().manual_seed(1))
        loader = ShardedLoader(
            DataLoader(range(10), 40, sampler=lazy), 0, 1, LeasedLedger(0, 1, one_worker())
        )
        list(itertools.islice(loader, taken))
        firsts.append(lists(loader))
    assert firsts[0] == firsts[1]


def one_worker() -> Any:
    """A lease that hands everything to one worker, one unit at a time, and remembers by pass."""
    left: dict[int, Iterator[int]] = {}

    def lease(rank: int, epoch: int, want: int) -> list[tuple[int, int]]:
        unit = next(left.setdefault(epoch, iter(range(5))), None)
        return [] if unit is None else [(unit, unit + 1)]

    return lease


SEEDS = pytest.mark.parametrize("seed", [3, None])
FETCHING = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="0"),
        pytest.param({"num_workers": 2}, id="2", marks=pytest.mark.gloo),
        pytest.param({"num_workers": 2, "persistent_workers": True}, id="stay", marks=pytest.mark.gloo),
    ],
)


@SEEDS
@FETCHING
def test_a_state_taken_in_a_pass_goes_on_there(seed: int | None, options: dict[str, Any]) -> None:
    whole = ShardedLoader(loader_of(seed=seed, **options), 1, 2)
    first, running = lists(whole), iter(whole)
    second = [next(running).tolist() for _ in range(2)]
    state = json.loads(json.dumps(whole.state_dict()))
    second += lists(running)
    third = lists(whole)

    again = ShardedLoader(loader_of(seed=seed, **options), 1, 2)
    again.load_state_dict(state)
    assert again.epoch == 1
    assert lists(again) == second[2:]
    assert lists(again) == third
    assert first not in (second, third)


@SEEDS
def test_a_state_between_passes_starts_the_next(seed: int | None) -> None:
    whole = ShardedLoader(loader_of(seed=seed), 0, 2)
    lists(whole)
    state = whole.state_dict()
    again = ShardedLoader(loader_of(seed=seed), 0, 2)
    again.load_state_dict(state)
    assert lists(again) == lists(whole)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 4), rank=st.integers(0, 3), taken=st.integers(0, 12), size=st.integers(1, 40))
def test_nothing_is_lost_or_repeated_over_a_resume(n: int, rank: int, taken: int, size: int) -> None:
    rank %= n
    expected = lists(ShardedLoader(loader_of(size), rank, n))
    loader = ShardedLoader(loader_of(size), rank, n)
    running = iter(loader)
    before = lists(itertools.islice(running, taken))
    again = ShardedLoader(loader_of(size), rank, n)
    again.load_state_dict(loader.state_dict())
    assert before + (lists(again) if again.epoch == 0 else []) == expected


def test_a_state_of_another_job_is_refused() -> None:
    state = ShardedLoader(loader_of(), 0, 2).state_dict()
    for other in (ShardedLoader(loader_of(), 0, 3), ShardedLoader(loader_of(), 0, 2, batch="each")):
        with pytest.raises(BadInput, match="this loader has"):
            other.load_state_dict(state)
    with pytest.raises(BadInput, match="generators"):
        ShardedLoader(loader_of(seed=None), 0, 2).load_state_dict(state)


@SEEDS
@FETCHING
def test_a_restarted_worker_in_a_plain_range_catches_up(seed: int | None, options: dict[str, Any]) -> None:
    whole = [
        lists(one)
        for loader in [ShardedLoader(loader_of(seed=seed, **options), 1, 2)]
        for one in [loader] * 4
    ]
    again = ShardedLoader(loader_of(seed=seed, **options), 1, 2)
    again.set_start(2, done_units=[0, 1, 2, 3, 6])  # of rank 1: units 1 and 3, which are batches 0 and 1
    assert [lists(again) for _ in range(4)] == [[], [], whole[2][2:], whole[3]]


@SEEDS
def test_a_restarted_worker_can_jump_to_its_pass(seed: int | None) -> None:
    whole = ShardedLoader(loader_of(seed=seed), 1, 2)
    expected = [lists(whole) for _ in range(4)]
    again = ShardedLoader(loader_of(seed=seed), 1, 2)
    again.set_start(2, done_units=[1])
    again.set_epoch(2)
    assert [lists(again), lists(again)] == [expected[2][1:], expected[3]]
    with pytest.raises(BadInput, match="at 4 already"):
        again.set_epoch(1)


def test_setting_the_running_pass_again_changes_nothing() -> None:
    loader = ShardedLoader(loader_of(), 0, 1)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert len(lists(itertools.islice(loader, 2))) == 2
    assert loader.epoch == 1


class Stream(IterableDataset[torch.Tensor]):
    """Draws from the randomness of its fetching process."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(12):
            yield torch.randint(1000, ())


@SEEDS
@pytest.mark.gloo
def test_streams_are_resumed_by_reading_over_what_was_done(seed: int | None) -> None:
    def build() -> ShardedLoader:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return ShardedLoader(DataLoader(Stream(), 2, num_workers=1, generator=generator), 1, 2)

    whole, again = build(), build()
    first, running = lists(whole), iter(whole)
    second = [next(running).tolist()]
    state = whole.state_dict()
    second += lists(running)
    again.load_state_dict(state)
    assert lists(again) == second[1:]
    late = build()
    late.set_start(1, done_units=[1])
    assert [lists(late), lists(late)] == [[], second[1:]]
    assert first != second


def test_a_lease_remembers_and_the_loader_does_not_argue() -> None:
    loader = ShardedLoader(loader_of(), 0, 1, LeasedLedger(0, 1, one_worker()))
    loader.set_start(0, done_units=[0, 1, 2, 3])
    assert len(lists(loader)) == 5


class Careless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(200).tolist())


def test_threads_do_not_disturb_each_others_order() -> None:
    def work(rank: int) -> None:
        loader = ShardedLoader(DataLoader(range(200), 4, sampler=Careless()), rank, 4)
        found[rank] = [lists(loader) for _ in range(3)]

    found: dict[int, Any] = {}
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for epoch in range(3):
        drawn = [index for rank in range(4) for batch in found[rank][epoch] for index in batch]
        assert sorted(drawn) == list(range(200))
