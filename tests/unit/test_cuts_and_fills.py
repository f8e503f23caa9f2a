"""A shard has one image: cuts and fills take turns, and neither waits for ever."""

import pytest

from shoal.config import CoordinatorOptions
from shoal.fleet.coordinator import Coordinator, Outcome
from shoal.fleet.cuts import COPIES_S
from shoal.store import messages as m

ASKED = 50
SHARDS = 4


class World:
    """Servers that watch, and whoever saves; no client holds anything."""

    def __init__(self, servers: int, replicas: int) -> None:
        self.coordinator = Coordinator(CoordinatorOptions(servers=servers, shards=SHARDS, replicas=replicas))
        self.servers: list[int] = []
        self.orders: list[m.PartOrder] = []
        self.said: list[m.Reply] = []  # to whoever saves
        for index in range(servers):
            self.join(index)

    def join(self, index: int, now: float = 0.0) -> None:
        request = m.RegisterServer(
            identity=f"server-{index}", pid=1, host="x", port=1 + index, unix_path="", shards=SHARDS
        )
        self.take(self.coordinator.handle(index, request, now))
        self.servers.append(index)

    def take(self, outcome: Outcome) -> None:
        self.orders += [said for _, said in outcome.replies if isinstance(said, m.PartOrder)]
        self.said += [said for peer, said in outcome.replies if peer == ASKED]

    def look(self, now: float) -> None:
        """All servers are heard of, and say what their shards cost, as they do every two seconds."""
        version = self.coordinator._placer.version
        for index in self.servers:
            request = m.WatchPlacement(
                after=version, wait_s=0.5, server=index, identity=f"server-{index}", loads=((0, 1, 1),)
            )
            self.take(self.coordinator.handle(100 + index, request, now))
        self.take(self.coordinator.tick(now))

    def save(self, now: float, *, gives_way: bool = True) -> None:
        request = m.SaveStore(url="file:///x", name="000001-a", wait_s=3600.0, gives_way=gives_way)
        self.take(self.coordinator.handle(ASKED, request, now))

    def report(self, did: str, now: float) -> None:
        for order in list(self.orders):
            part = m.PartInfo(name="", sha256="", rows=0, bytes=0) if did == "saved" else None
            report = m.PartReport(number=order.number, did=did, part=part)
            self.take(self.coordinator.handle(order.index, report, now))

    def fills(self) -> dict[int, int]:
        return {fill.shard: fill.target for fill in self.coordinator._placer.fills.values()}

    def end_fills(self, now: float) -> int:
        fills = list(self.coordinator._placer.fills.values())
        for fill in fills:
            done = m.Filled(number=fill.number, shard=fill.shard, term=fill.term, target=fill.target)
            self.take(self.coordinator.handle(100 + fill.source, done, now))
        return len(fills)

    def lose(self, index: int, now: float) -> None:
        self.servers.remove(index)
        self.coordinator.closed(index, now)
        self.take(self.coordinator.handle(99, m.EvictServer(index=index, why="it ended"), now))


@pytest.fixture
def moving() -> World:
    """One server more has come, without replicas: shards move to it."""
    world = World(1, 0)
    world.join(1)
    world.look(0.1)
    assert set(world.fills().values()) == {1}
    return world


def test_a_save_waits_for_fills_and_is_of_who_has_the_shards_then(moving: World) -> None:
    moving.save(1.0)
    moving.look(1.3)
    assert moving.orders == []
    assert moving.end_fills(1.4) == 2
    moving.look(1.5)
    assert moving.fills() == {}  # no other begins
    assert {order.index: len(order.shards) for order in moving.orders} == {0: 2, 1: 2}


def test_no_fill_begins_until_the_cut_is_written() -> None:
    world = World(2, 0)
    world.save(1.0)
    world.report("begun", 1.1)
    world.join(2, 1.2)
    world.look(1.3)
    assert world.fills() == {}
    world.report("saved", 100.0)
    assert isinstance(world.said[-1], m.StoreSaved)
    assert len(world.said[-1].parts) == 2
    world.save(100.0)  # at once again
    assert set(world.fills().values()) == {2}


def test_a_save_that_waits_too_long_says_for_which_shards(moving: World) -> None:
    moving.save(1.0)
    moving.coordinator._cuts._work.until = 2.0
    moving.look(2.0)
    assert "not done within 3600 s: shard 0, 1 is being copied" in moving.said[-1].message
    moving.look(2.1)
    assert moving.end_fills(2.2) == 2


def degraded() -> World:
    """Two of three servers are left, and each shard is to have a copy."""
    world = World(2, 1)
    world.lose(1, 0.5)
    world.look(0.6)
    assert world.coordinator._placer.degraded() == SHARDS
    return world


def test_shards_without_a_copy_get_it_before_a_save_begins() -> None:
    world = degraded()
    world.join(2, 1.0)
    world.save(1.1)
    now = 1.1
    while not world.orders:
        now += 0.5
        world.look(now)
        world.end_fills(now)
    assert world.coordinator._placer.degraded() == 0
    assert now < COPIES_S


def test_copies_that_cannot_be_made_hold_no_save_up_for_longer_than_a_minute() -> None:
    world = degraded()
    world.join(2, 1.0)
    world.save(1.1)
    for now in range(2, 65):
        assert now > COPIES_S or world.orders == []
        for fill in list(world.coordinator._placer.fills.values()):
            failed = m.Filled(
                number=fill.number, shard=fill.shard, term=fill.term, target=fill.target, error="disk full"
            )
            world.take(world.coordinator.handle(100 + fill.source, failed, now))
        world.look(float(now))
    assert {order.do for order in world.orders} == {"save"}


def test_a_long_save_gives_way_to_shards_without_a_copy_once() -> None:
    world = degraded()
    world.save(1.0)
    world.report("begun", 1.1)
    world.join(2, 2.0)
    world.look(2.0)
    assert world.fills() == {}
    world.look(COPIES_S + 5.0)
    assert world.orders[-1].do == "stop"
    assert world.said[-1].again == "shard 0, 1, 2, 3 is short of copies"
    world.look(COPIES_S + 6.0)
    assert world.fills()
    # Asked again, it waits for those, and then runs to its end.
    world.orders.clear()
    now = COPIES_S + 7.0
    world.save(now, gives_way=False)
    while not world.orders:
        now += 0.5
        world.end_fills(now)
        world.look(now)
    world.report("begun", now)
    world.look(now + 10 * COPIES_S)
    assert [order.do for order in world.orders] == ["save"] * len(world.orders)


def test_a_server_without_a_part_in_the_cut_may_go() -> None:
    world = World(2, 1)
    world.join(2, 0.1)
    world.save(0.2)
    world.end_fills(0.3)  # and no other begins: what has come has copies, and heads no shard yet
    world.look(1.0)
    assert {order.index for order in world.orders} == {0, 1}
    assert 2 in world.coordinator._placer.members()
    world.report("begun", 1.1)
    world.lose(2, 1.2)
    world.report("saved", 1.3)
    assert isinstance(world.said[-1], m.StoreSaved)


def test_without_replicas_a_server_that_dies_while_it_comes_is_given_up(moving: World) -> None:
    terms = moving.coordinator._placer.placed.terms
    shards = list(moving.fills())
    moving.coordinator.closed(1, 1.0)
    moving.servers.remove(1)
    for now in (1.2, 1.6):
        moving.look(now)
    placed = moving.coordinator._placer.placed
    assert placed.chains == ((0,),) * SHARDS
    assert [placed.terms[shard] - terms[shard] for shard in shards] == [1, 1]  # so the source ends its fill
    assert moving.fills() == {}


def test_without_replicas_a_server_that_has_a_shard_is_waited_for(moving: World) -> None:
    moving.end_fills(1.0)
    moving.coordinator.closed(1, 1.1)
    moving.servers.remove(1)
    for now in range(2, 20):
        moving.look(float(now))
    assert moving.coordinator._roster.gone == {}
