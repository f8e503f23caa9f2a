"""Shards by what they cost: what servers say, and where the placer puts them."""

import random
from collections.abc import Sequence

import pytest

from shoal.fleet.balance import Balance, Cost, ShardCosts
from shoal.fleet.placer import Placer

SHARDS = 64
MEGABYTE, BUSY = 1 << 20, 10_000_000


def spread(one: Placer, cost: Cost, servers: set[int]) -> list[float]:
    """The load of each server, as a share of the mean."""
    assert one.placed is not None
    loads = dict.fromkeys(sorted(servers), 0.0)
    for shard, chain in enumerate(one.placed.chains):
        for member in chain:
            loads[member] += cost.each[shard]
        if cost.tail:
            loads[chain[-1]] += cost.tail[shard]
    return [load * len(loads) / sum(loads.values()) for load in loads.values()]


def carry_out(one: Placer, up: set[int], costs: Sequence[Cost]) -> int:
    count = 0
    while one.plan(up, (), costs) or one.fills:
        fill = next(iter(one.fills.values()))
        placed = one.filled(fill.shard, fill.term, fill.target)
        assert placed is not None
        one.apply(placed)
        for server in list(one.first_to_know):
            one.knows(server, one.version)
        count += 1
        assert count < 1000, "it never ends"
    return count


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("replicas", [0, 1])
def test_new_servers_even_out_bytes_and_traffic(seed: int, replicas: int) -> None:
    rng = random.Random(seed)
    sizes, pushed, pulled = ([rng.lognormvariate(0.0, 0.7) for _ in range(SHARDS)] for _ in range(3))
    costs = (Cost(sizes), Cost(pushed, tail=pulled))
    one = Placer(replicas)
    one.apply(one.first(SHARDS, 2))
    up = {0, 1, 2, 3}
    assert carry_out(one, up, costs) > 0
    for cost in costs:
        loads = spread(one, cost, up)
        assert 0.8 < min(loads) <= max(loads) < 1.2, loads
    # What comes and goes by itself moves next to nothing.
    sizes, pushed, pulled = ([c * rng.uniform(0.97, 1.03) for c in each] for each in (sizes, pushed, pulled))
    assert carry_out(one, up, (Cost(sizes), Cost(pushed, tail=pulled))) <= 1


def test_pulls_are_evened_out_over_tails() -> None:
    """Half of the shards are read, a hundred times as much as all are written."""
    pulled = Cost([0.01] * SHARDS, tail=[1.0] * 32 + [0.0] * 32)
    one = Placer(1)
    one.apply(one.first(SHARDS, 3))
    up = {0, 1, 2, 3}
    carry_out(one, up, (pulled,))
    assert one.placed is not None
    tails = [chain[-1] for chain in one.placed.chains[:32]]
    assert max(map(tails.count, up)) <= 10, tails


def test_all_the_bytes_on_one_server_and_all_the_traffic_on_another_is_not_even() -> None:
    sizes = Cost([1.0] * 32 + [0.01] * 32)
    rates = Cost([0.01] * 32 + [1.0] * 32)
    one = Placer(0)
    one.apply(one.first(SHARDS, 2))
    carry_out(one, {0, 1}, (sizes, rates))
    for cost in (sizes, rates):
        assert max(spread(one, cost, {0, 1})) < 1.2


def test_one_hot_shard_is_not_carried_to_and_fro() -> None:
    rates = Cost([1000.0] + [1.0] * 63)
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
    assert list(sizes.each) == [8 * MEGABYTE, 2 * MEGABYTE]
    assert list(rates.each) == [BUSY / 10, 0.0]
    small = ShardCosts(2)
    for now in (0.0, 10.0):
        small.heard(0, [(0, 100, 0), (1, 10, 50)], now)
    assert small.of_shards(10.0) == (), "nothing to tell them apart by: they are counted"


def test_a_shard_that_moved_is_as_busy_as_before() -> None:
    costs = ShardCosts(2)
    costs.heard(0, [(0, MEGABYTE, 0), (1, MEGABYTE, 0)], 0.0)
    costs.heard(0, [(0, MEGABYTE, BUSY), (1, MEGABYTE, BUSY)], 10.0)
    _, before = costs.of_shards(10.0)
    costs.heard(0, [(0, MEGABYTE, 2 * BUSY)], 20.0)
    costs.heard(1, [(1, MEGABYTE, 5)], 20.0)  # counts anew there
    assert costs.of_shards(20.0)[1] == before
    costs.gone(1)
    assert len(costs.of_shards(20.0)[0].each) == 2, "what was known of it stays known"


def test_what_only_one_copy_reports_was_pulled_there() -> None:
    costs = ShardCosts(2)
    for now in (0, 10):
        costs.heard(0, [(0, MEGABYTE, now * BUSY), (1, MEGABYTE, now * 4 * BUSY)], now)
        costs.heard(1, [(0, MEGABYTE, now * 3 * BUSY), (1, MEGABYTE, now * 4 * BUSY)], now)
    _, traffic = costs.of_shards(10.0)
    assert (list(traffic.each), list(traffic.tail)) == ([BUSY, 4 * BUSY], [2 * BUSY, 0])


def test_a_server_that_says_nonsense_of_a_shard_that_is_not_changes_nothing() -> None:
    costs = ShardCosts(2)
    for now in (0.0, 10.0):
        costs.heard(0, [(7, MEGABYTE, 1), (-1, MEGABYTE, 1), (0, 4 * MEGABYTE, 0)], now)
    assert [list(cost.each) for cost in costs.of_shards(10.0)] == [[4 * MEGABYTE, 0.0]]


def test_another_chain_gains_what_the_squares_of_loads_lose() -> None:
    costs = (Cost([3.0, 1.0, 2.0]), Cost([1.0, 1.0, 1.0], head=[1.0, 0.0, 0.0], tail=[0.0, 5.0, 1.0]))
    servers = (0, 1, 2)

    def unevenness(chains: list[tuple[int, ...]]) -> float:
        total = 0.0
        for cost in costs:
            loads = dict.fromkeys(servers, 0.0)
            for shard, chain in enumerate(chains):
                each, head, tail = cost.of(shard)
                for member in chain:
                    loads[member] += each
                loads[chain[0]] += head
                loads[chain[-1]] += tail
            total += sum((load / cost.mean(2, len(servers))) ** 2 for load in loads.values())
        return total

    before = [(0, 1), (0, 2), (1, 0)]
    balance = Balance(servers, costs, 2)
    for shard, chain in enumerate(before):
        balance.put(shard, chain)
    for after in ((0, 1), (1, 2), (2, 0), (2, 1)):
        gain = unevenness(before) - unevenness([before[0], after, before[2]])
        assert balance.gain(1, before[1], after) == pytest.approx(gain)
    best = max(servers, key=lambda server: balance.gain(0, (), (server,)))
    assert balance.least_first(0, first=True)[0] == best
