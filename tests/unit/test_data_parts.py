"""The small parts of the data layer: the plan of units, sets of them, ledgers, and the size of a batch."""

import itertools
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.ledger import LEASE_UNITS_MAX, LeasedLedger, Ledger, StaticLedger
from shoal.data.plan import Plan
from shoal.data.samples import samples_in
from shoal.errors import BadInput, Internal


@pytest.mark.parametrize("module", ["plan", "ledger", "samples", "handed"])
def test_torch_is_imported_only_where_it_is_needed(module: str) -> None:
    code = f"import sys, shoal.data.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@given(st.integers(1, 50), st.integers(0, 200))
def test_parts_are_contiguous_and_differ_by_at_most_one(n: int, samples: int) -> None:
    bounds = [Plan(n).bounds(part, samples) for part in range(n)]
    sizes = [end - begin for begin, end in bounds]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == samples
    assert all(one[1] == two[0] for one, two in itertools.pairwise(bounds))
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 9), st.integers(0, 40))
def test_units_number_the_parts_of_batches(n: int, batches: int) -> None:
    assert [Plan(n).place(unit) for unit in range(Plan(n).units(batches))] == [
        (batch, part) for batch in range(batches) for part in range(n)
    ]
    assert Plan(n, "each").units(batches) == batches
    assert Plan(n, "each").bounds(0, 17) == (0, 17)


@pytest.mark.parametrize(("n", "batches", "idle"), [(3, 4, [1, 2]), (3, 6, []), (1, 5, []), (4, 3, [3])])
def test_the_last_step_of_whole_batches_leaves_some_idle(n: int, batches: int, idle: list[int]) -> None:
    assert [rank for rank in range(n) if Plan(n, "each").idle(rank, batches)] == idle
    assert not any(Plan(n).idle(rank, batches) for rank in range(n))


@given(st.integers(1, 6), st.integers(0, 50))
def test_static_ledgers_share_all_units(n: int, total: int) -> None:
    taken = [list(StaticLedger(rank, n).units(0, total)) for rank in range(n)]
    assert sorted(itertools.chain(*taken)) == list(range(total))
    assert all(unit % n == rank for rank, units in enumerate(taken) for unit in units)


def test_the_size_of_a_pass_is_told_first() -> None:
    told: list[tuple[int, int]] = []
    StaticLedger(0, 1, begin=lambda *of: told.append(of) or ((0, 1),)).begin(3, 9, 1)
    LeasedLedger(0, 1, lambda *_: [], begin=lambda *of: told.append(of) or ((0, 1),)).begin(4, 8, 1)
    assert told == [(3, 9), (4, 8)]


class Counter:
    """A job's ledger of one pass: hands out units in order and remembers how many each asked for."""

    def __init__(self, total: int) -> None:
        self.left, self.asked = list(range(total)), list[tuple[int, int, int]]()

    def lease(self, rank: int, epoch: int, want: int) -> list[tuple[int, int]]:
        self.asked.append((rank, epoch, want))
        taken, self.left = self.left[:want], self.left[want:]
        return [(unit, unit + 1) for unit in taken]


def test_the_first_lease_is_one_unit_and_later_ones_a_second_of_work() -> None:
    counter = Counter(10_000)
    ledger = LeasedLedger(1, 2, counter.lease)
    units = ledger.units(5, 10_000)
    assert next(units) == 0
    ledger.spent(0.1)
    assert [next(units) for _ in range(10)] == list(range(1, 11))
    assert counter.asked == [(1, 5, 1), (1, 5, 10)]


@pytest.mark.parametrize(
    ("unit_s", "total", "want"),
    [(5.0, 10_000, 1), (0.5, 10_000, 2), (0.001, 10_000, 625), (0.001, 8, 1), (0.0, 10**9, LEASE_UNITS_MAX)],
)
def test_a_lease_has_limits(unit_s: float, total: int, want: int) -> None:
    ledger = LeasedLedger(0, 2, lambda *_: [])
    ledger.spent(unit_s)
    assert ledger.want(total) == want


def test_a_lease_follows_the_speed() -> None:
    ledger = LeasedLedger(0, 1, lambda *_: [])
    for _ in range(50):
        ledger.spent(0.1)
    ledger.spent(1.0)
    assert ledger.want(10_000) >= 3
    for _ in range(50):
        ledger.spent(1.0)
    assert ledger.want(10_000) == 1


def test_leases_are_short_at_the_end_of_a_pass() -> None:
    wanted: list[int] = []
    handed = 0

    def lease(rank: int, epoch: int, want: int) -> list[tuple[int, int]]:
        nonlocal handed
        begin, handed = handed, min(100, handed + want)
        wanted.append(want)
        return [(begin, handed)] if begin < handed else []

    ledger = LeasedLedger(0, 2, lease)
    ledger.spent(0.001)
    assert list(ledger.units(0, 100)) == list(range(100))
    assert wanted[0] == 6
    assert wanted == sorted(wanted, reverse=True)
    assert wanted[-10:] == [1] * 10


def test_two_workers_take_what_they_can() -> None:
    counter = Counter(100)
    fast, slow = LeasedLedger(0, 2, counter.lease), LeasedLedger(1, 2, counter.lease)
    fast.spent(0.001)
    slow.spent(10.0)
    taken: dict[int, list[int]] = {0: [], 1: []}
    running = {0: fast.units(0, 100), 1: slow.units(0, 100)}
    while running:
        for rank in list(running):
            for _ in range(6 if rank == 0 else 1):
                unit = next(running[rank], None) if rank in running else None
                if unit is None:
                    running.pop(rank, None)
                else:
                    taken[rank].append(unit)
    assert sorted(taken[0] + taken[1]) == list(range(100))
    assert len(taken[0]) > 3 * len(taken[1]) > 0


@pytest.mark.parametrize("leased", [(0, 11), (5, 5), (-1, 2)])
def test_a_lease_outside_the_pass_is_our_mistake(leased: tuple[int, int]) -> None:
    with pytest.raises(Internal, match="units"):
        list(LeasedLedger(0, 1, lambda *_: [leased]).units(0, 10))


@pytest.mark.parametrize("ledger", [StaticLedger, lambda rank, n: LeasedLedger(rank, n, lambda *_: [])])
@pytest.mark.parametrize(("rank", "n"), [(1, 1), (-1, 2), (0, 0)])
def test_ranks_are_checked(ledger: Any, rank: int, n: int) -> None:
    with pytest.raises(BadInput, match="rank is"):
        ledger(rank, n)


@pytest.mark.parametrize("ledger", [StaticLedger(0, 2), LeasedLedger(0, 2, lambda *_: [])])
def test_every_ledger_has_the_whole_interface(ledger: Ledger) -> None:
    ledger.spent(1.0)
    assert list(ledger.units(0, 0)) == []
    assert ledger.finish(0) is True


# How many samples a batch holds.


@dataclass
class Pair:
    x: torch.Tensor
    y: Any = None


Named = namedtuple("Named", ["ids", "label"])
PACKED = torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2), torch.zeros(1)])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        (np.zeros((5, 2)), 5),
        (torch.zeros(0, 2), 0),
        ([torch.zeros(3, 1), torch.zeros(3)], 3),
        ((torch.zeros(3), {"a": torch.zeros(3, 9), "scale": 0.5, "none": None}), 3),
        ({"text": ["a", "b"], "y": torch.zeros(2)}, 2),
        (Pair(torch.zeros(6), [torch.zeros(6, 1)]), 6),
        (Named(torch.zeros(2, 8), torch.zeros(2)), 2),
        ([torch.tensor(1.0), torch.zeros(7)], 7),
        (PACKED, 3),
        ([1, 2, 3], 3),
        ([[torch.zeros(2)], [[torch.zeros(2, 2)]]], 2),
    ],
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((torch.zeros(9), torch.zeros(3)), "its parts hold 3, 9"),
        (torch.tensor(1.0), "no part of it has a length"),
        ("text", "no part"),
        (object(), "no part"),
        ([], "no part"),
        (None, "no part"),
    ],
)
def test_samples_that_cannot_be_known(batch: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refused:
        samples_in(batch)
    assert "worker.weight(n)" in str(refused.value)
