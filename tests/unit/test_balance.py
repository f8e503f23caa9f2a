"""Shards by what they cost: what servers say, and where the placer puts them."""

import random
from collections.abc import Sequence

import pytest

from shoal.fleet.balance import Balance, ShardCosts
from shoal.fleet.placer import Placer

SHARDS = 64
MEGABYTE, BUSY = 1 << 20, 10_000_000


def spread(one: Placer, cost: Sequence[float], servers: set[int]) -> list[float]:
    """The load of each server, as a share of the mean."""
    assert one.placed is not None
    loads = [
        sum(cost[s] for s, chain in enumerate(one.placed.chains) for member in chain if member == server)
        for server in sorted(servers)
    ]
    return [load * len(loads) / sum(loads) for load in loads]


def carry_out(one: Placer, up: set[int], costs: tuple[Sequence[float], ...]) -> int:
    count = 0
    while one.plan(up, (), costs) or one.fills:
        fill = next(iter(one.fills.values()))
        placed = one.filled(fill.shard, fill.term, fill.target)
        assert placed is not None
        one.apply(placed)
        count += 1
        assert count < 1000, "it never ends"
    return count


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("replicas", [0, 1])
def test_new_servers_even_out_bytes_and_traffic(seed: int, replicas: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.lognormvariate(0.0, 0.7) for _ in range(SHARDS)]
    rates = [rng.lognormvariate(0.0, 0.7) for _ in range(SHARDS)]
    one = Placer(replicas)
    one.apply(one.first(SHARDS, 2))
    up = {0, 1, 2, 3}
    assert carry_out(one, up, (sizes, rates)) > 0
    for cost in (sizes, rates):
        loads = spread(one, cost, up)
        assert 0.8 < min(loads) <= max(loads) < 1.2, loads
    # What comes and goes by itself moves next to nothing.
    wobbly = tuple([cost * rng.uniform(0.97, 1.03) for cost in costs] for costs in (sizes, rates))
    assert carry_out(one, up, wobbly) <= 1


def test_all_the_bytes_on_one_server_and_all_the_traffic_on_another_is_not_even() -> None:
    sizes = [1.0] * 32 + [0.01] * 32
    rates = [0.01] * 32 + [1.0] * 32
    one = Placer(0)
    one.apply(one.first(SHARDS, 2))
    carry_out(one, {0, 1}, (sizes, rates))
    for cost in (sizes, rates):
        assert max(spread(one, cost, {0, 1})) < 1.2


def test_one_hot_shard_is_not_carried_to_and_fro() -> None:
    rates = [1000.0] + [1.0] * 63
    one = Placer(0)
    one.apply(one.first(SHARDS, 2))
    assert carry_out(one, {0, 1}, (rates,)) <= 31
    assert one.placed is not None
    assert one.placed.chains[0] == (0,), "the hot one stays, others may make room"


def test_costs_are_known_when_they_were_seen_long_enough_and_are_large_enough() -> None:
    costs = ShardCosts(2)
    costs.heard(0, [(0, 8 * MEGABYTE, 0), (1, 2 * MEGABYTE, 0)], 0.0)
    assert costs.of_shards(1.0) == ()
    costs.heard(0, [(0, 8 * MEGABYTE, BUSY), (1, 2 * MEGABYTE, 0)], 10.0)
    sizes, rates = costs.of_shards(10.0)
    assert list(sizes) == [8 * MEGABYTE, 2 * MEGABYTE]
    assert list(rates) == [BUSY / 10, 0.0]
    small = ShardCosts(2)
    for now in (0.0, 10.0):
        small.heard(0, [(0, 100, 0), (1, 10, 50)], now)
    assert small.of_shards(10.0) == (), "nothing to tell them apart by: they are counted"


def test_a_shard_that_moved_is_as_busy_as_before() -> None:
    costs = ShardCosts(2)
    costs.heard(0, [(0, MEGABYTE, 0), (1, MEGABYTE, 0)], 0.0)
    costs.heard(0, [(0, MEGABYTE, BUSY), (1, MEGABYTE, BUSY)], 10.0)
    _, before = costs.of_shards(10.0)
    first = list(before)
    costs.heard(0, [(0, MEGABYTE, 2 * BUSY)], 20.0)
    costs.heard(1, [(1, MEGABYTE, 5)], 20.0)  # counts anew there
    assert list(costs.of_shards(20.0)[1]) == first
    costs.gone(1)
    assert len(costs.of_shards(20.0)[0]) == 2, "what was known of it stays known"


def test_a_server_that_says_nonsense_of_a_shard_that_is_not_changes_nothing() -> None:
    costs = ShardCosts(2)
    for now in (0.0, 10.0):
        costs.heard(0, [(7, MEGABYTE, 1), (-1, MEGABYTE, 1), (0, 4 * MEGABYTE, 0)], now)
    assert [list(cost) for cost in costs.of_shards(10.0)] == [[4 * MEGABYTE, 0.0]]


def test_a_move_gains_what_the_squares_of_loads_lose() -> None:
    costs = ([3.0, 1.0, 2.0], [1.0, 1.0, 1.0])

    def unevenness(where: list[int]) -> float:
        total = 0.0
        for cost in costs:
            mean = sum(cost) / 2
            total += sum(
                (sum(c for c, w in zip(cost, where, strict=True) if w == s) / mean) ** 2 for s in (0, 1)
            )
        return total

    balance = Balance({0, 1}, costs, 1)
    for shard, server in enumerate([0, 0, 1]):
        balance.put(server, shard)
    assert balance.least_first() == [1, 0]
    assert balance.gain(1, 0, 1) == pytest.approx(unevenness([0, 0, 1]) - unevenness([0, 1, 1]))
