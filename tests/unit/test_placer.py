"""Where shards are and how they come to be elsewhere, without servers: what must hold after any events."""

import random
from collections import Counter

import pytest

from shoal.fleet.decisions import Placed
from shoal.fleet.placer import Placer, first_chains

SHARDS = 16


@pytest.mark.parametrize(("shards", "servers"), [(64, 1), (64, 2), (64, 3), (64, 64), (7, 5), (1, 1)])
def test_the_first_placement_is_balanced(shards: int, servers: int) -> None:
    for replicas in range(min(servers, 3)):
        chains = first_chains(shards, servers, replicas)
        for members in (
            [chain[0] for chain in chains],
            [chain[-1] for chain in chains],
            [member for chain in chains for member in chain],
        ):
            counts = [members.count(server) for server in range(servers)]
            assert max(counts) - min(counts) <= replicas + 1
        assert all(len(set(chain)) == replicas + 1 for chain in chains)


def placer(servers: int, replicas: int, shards: int = SHARDS) -> Placer:
    made = Placer(replicas)
    made.apply(made.first(shards, servers))
    return made


def lose(one: Placer, server: int) -> None:
    placed = one.gone(server)
    assert placed is not None
    one.apply(placed)


def all_know(one: Placer) -> None:
    for server in list(one.first_to_know):
        one.knows(server, one.version)


def carry_out(one: Placer, up: set[int], leaving: frozenset[int] = frozenset()) -> int:
    """Do what is planned until nothing is; gives the number of fills. Copies never become fewer by one."""
    count = 0
    while one.plan(up, leaving) or one.fills:
        fill = next(iter(one.fills.values()))
        copies = len(chains(one)[fill.shard])
        placed = one.filled(fill.shard, fill.term, fill.target)
        assert placed is not None
        assert len(placed.chains[fill.shard]) >= copies
        one.apply(placed)
        all_know(one)
        count += 1
        assert count < 1000, "it never ends"
    return count


def chains(one: Placer) -> tuple[tuple[int, ...], ...]:
    assert one.placed is not None
    return one.placed.chains


def test_a_dead_server_leaves_its_chains_and_is_replaced() -> None:
    one = placer(3, 1)
    placed = one.gone(1)
    assert placed is not None
    one.apply(placed)
    assert all(chain and 1 not in chain for chain in chains(one))
    assert one.degraded() > 0
    carry_out(one, {0, 2})
    assert all(sorted(chain) == [0, 2] for chain in chains(one))
    assert one.degraded() == 0


def spread(one: Placer, up: set[int]) -> dict[str, int]:
    """The most that two servers differ by."""
    members = [member for chain in chains(one) for member in chain]
    ends = {"heads": [c[0] for c in chains(one)], "tails": [c[-1] for c in chains(one)], "copies": members}
    counts = {what: [which.count(server) for server in up] for what, which in ends.items()}
    return {what: max(each) - min(each) for what, each in counts.items()}


@pytest.mark.parametrize(
    ("servers", "more", "replicas"),
    [(2, 3, 1), (2, 4, 1), (3, 4, 1), (4, 5, 1), (3, 8, 1), (3, 4, 2), (4, 5, 2), (3, 6, 2)],
)
def test_heads_and_tails_are_even_when_servers_have_come_and_when_they_have_left(
    servers: int, more: int, replicas: int
) -> None:
    one = placer(servers, replicas, 64)
    carry_out(one, set(range(more)))
    assert max(spread(one, set(range(more))).values()) <= 2, chains(one)
    carry_out(one, set(range(more)), frozenset(range(servers, more)))
    assert one.members() == set(range(servers))
    assert max(spread(one, set(range(servers))).values()) <= 2, chains(one)


@pytest.mark.parametrize(("servers", "replicas"), [(2, 1), (3, 1), (4, 1), (3, 2), (4, 2)])
def test_heads_and_tails_are_even_when_a_dead_server_was_replaced(servers: int, replicas: int) -> None:
    one = placer(servers, replicas, 64)
    lose(one, 0)
    up = set(range(1, servers))
    carry_out(one, up)
    if len(up) > replicas:
        assert max(spread(one, up).values()) <= 2, chains(one)
    up.add(servers)
    carry_out(one, up)
    assert one.degraded() == 0
    assert max(spread(one, up).values()) <= 2, chains(one)


def test_shards_that_can_be_copied_at_once_are_before_those_that_turn() -> None:
    one = placer(2, 1, 64)
    lose(one, 0)
    degraded = []
    while one.plan({1, 2}) or one.fills:
        fill = next(iter(one.fills.values()))
        placed = one.filled(fill.shard, fill.term, fill.target)
        assert placed is not None
        one.apply(placed)
        all_know(one)
        degraded.append(one.degraded())
    assert degraded[31] == 32
    assert len(degraded) == 64 + 32


def test_with_weak_replication_no_head_leaves_to_even_out_heads() -> None:
    one = Placer(1, weak=True)
    one.apply(one.first(SHARDS, 2))
    lose(one, 0)
    assert carry_out(one, {1, 2}) == SHARDS
    assert set(chains(one)) == {(1, 2)}


def test_the_last_copy_stays_where_it_is() -> None:
    one = placer(2, 0)
    assert one.gone(1) is None
    assert {member for chain in chains(one) for member in chain} == {0, 1}


def test_a_new_server_gets_its_part_and_one_that_leaves_is_emptied() -> None:
    one = placer(2, 0)
    assert carry_out(one, {0, 1}) == 0
    carry_out(one, {0, 1, 2, 3})
    assert set(Counter(chain[0] for chain in chains(one)).values()) == {4}
    carry_out(one, {0, 1, 2, 3}, frozenset({0}))
    assert one.members() == {1, 2, 3}


def test_a_fill_is_void_when_its_target_or_source_dies() -> None:
    one = placer(3, 1)
    placed = one.gone(2)
    assert placed is not None
    one.apply(placed)
    fill = one.plan({0, 1})[0]
    placed = one.gone(fill.target)
    assert placed is not None
    assert placed.terms[fill.shard] > fill.term
    one.apply(placed)
    assert one.filled(fill.shard, fill.term, fill.target) is None


@pytest.mark.parametrize("seed", range(60))
def test_terms_grow_with_every_change_and_no_copy_is_trusted_that_was_not_filled(seed: int) -> None:
    random_ = random.Random(seed)
    replicas = random_.randrange(3)
    up = set(range(random_.randint(replicas + 1, 5)))
    one = placer(len(up), replicas)
    whole = {shard: set(chain) for shard, chain in enumerate(chains(one))}  # who has a shard's data
    unaware: dict[int, set[int]] = {shard: set() for shard in whole}  # who has left, and has not learnt it
    for _ in range(60):
        before = one.placed
        assert before is not None
        placed: Placed | None = None
        event = random_.randrange(5)
        if event == 0 and len(up) > 1:
            dead = random_.choice(sorted(up))
            if not any(chain == (dead,) for chain in before.chains):
                up.discard(dead)
                placed = one.gone(dead)
        elif event == 1 and len(up) < 7:
            up.add(max(up) + 1 + random_.randrange(2))
        elif event == 2 and one.fills:
            fill = random_.choice(list(one.fills.values()))
            assert fill.source == before.chains[fill.shard][-1]
            assert fill.target in up
            assert fill.target not in unaware[fill.shard]
            whole[fill.shard].add(fill.target)
            placed = one.filled(fill.shard, fill.term, fill.target)
            assert placed is not None
            assert len(placed.chains[fill.shard]) >= len(before.chains[fill.shard])
        elif event == 3 and one.first_to_know:
            aware = random_.choice(sorted(one.first_to_know))
            one.knows(aware, one.version)
            for shard in unaware:
                unaware[shard].discard(aware)
        if placed is not None:
            assert placed.version == before.version + 1
            for shard in range(SHARDS):
                changed = placed.chains[shard] != before.chains[shard]
                assert placed.terms[shard] >= before.terms[shard] + changed
            one.apply(placed)
            for shard, have in whole.items():
                unaware[shard] |= have.difference(placed.chains[shard]) & up
            whole = {shard: have.intersection(placed.chains[shard]) for shard, have in whole.items()}
        one.plan(up)
        for shard, chain in enumerate(chains(one)):
            assert len(set(chain)) == len(chain) > 0
            assert set(chain) <= whole[shard]
    all_know(one)
    carry_out(one, up)
    assert one.degraded() == 0 or len(up) <= replicas


def test_whoever_answered_pulls_learns_first_that_it_does_no_more() -> None:
    one = placer(3, 1)
    chain = one.placed.chains[0]  # type: ignore[union-attr]
    new = one.gone(chain[0])
    assert new is not None
    one.apply(new)
    assert one.may_know(0)
    assert one.may_know(1)
    assert one.may_know(2)
    [fill, *_] = one.plan({0, 1, 2} - {chain[0]})
    filled = one.filled(fill.shard, fill.term, fill.target)
    assert filled is not None
    one.apply(filled)
    assert one.may_know(fill.source)
    assert not one.may_know(fill.target)
    assert not one.knows(fill.source, one.version - 1)
    assert not one.may_know(fill.target)
    assert one.knows(fill.source, one.version)
    assert one.may_know(fill.target)


def test_a_server_that_does_not_know_that_it_has_left_is_not_filled_with_the_shard_again() -> None:
    one = placer(2, 1, 2)
    lose(one, 0)
    while (leaving := next((f for f in one.plan({1, 2}) if f.leaving == 1), None)) is None:
        fill = next(iter(one.fills.values()))
        placed = one.filled(fill.shard, fill.term, fill.target)
        assert placed is not None
        one.apply(placed)
    placed = one.filled(leaving.shard, leaving.term, leaving.target)
    assert placed is not None
    one.apply(placed)
    assert chains(one)[leaving.shard] == (2,)
    assert one.plan({1, 2}) == []
    all_know(one)
    assert [(fill.source, fill.target) for fill in one.plan({1, 2})] == [(2, 1)]


def test_a_dead_server_need_not_learn_anything() -> None:
    one = placer(3, 1)
    one.apply(one.joined())
    [fill, *_] = one.plan({0, 1, 2, 3})
    filled = one.filled(fill.shard, fill.term, fill.target)
    assert filled is not None
    one.apply(filled)
    assert not one.may_know(fill.target)
    for server in list(one.first_to_know):
        placed = one.gone(server)
        if placed is not None:
            one.apply(placed)
    assert one.may_know(fill.target)


def test_a_shard_that_is_alone_is_copied_even_to_a_server_that_is_to_leave() -> None:
    one = placer(2, 1)
    new = one.gone(0)
    assert new is not None
    one.apply(new)
    assert {fill.target for fill in one.plan({1, 2}, {2})} == {2}
