"""Which workers a coordinator evicts, and who may come back: decided without sockets and clocks."""

import pytest

from shoal.config import CoordinatorOptions
from shoal.errors import Refused
from shoal.fleet.attendance import RESTORED_S
from shoal.fleet.coordinator import Coordinator
from shoal.fleet.decisions import Decision
from shoal.fleet.leases import LEASE_S
from shoal.fleet.outcome import Outcome
from shoal.fleet.pulse import Beat, BeatKind, Hello
from shoal.store import messages as m
from shoal.store.rounds import client_name

OPTIONS = CoordinatorOptions(servers=1, shards=4)
ALIVE, BYE = (Beat(kind, 0, 0, 0, 0) for kind in (BeatKind.ALIVE, BeatKind.BYE))


class World:
    """A coordinator and what it has journaled; a client's connection has the number of its incarnation."""

    def __init__(self, journal: tuple[Decision, ...] = (), now: float = -LEASE_S) -> None:
        self.coordinator = Coordinator(OPTIONS, now=now)
        self.journal = list(journal)
        for decision in journal:
            self.coordinator.restore(decision)
        self.done(self.coordinator.begin())
        self.register(max(now, 0.0))

    def register(self, now: float) -> None:
        server = m.RegisterServer(identity="a", pid=1, host="h", port=1, unix_path="", shards=4)
        self.done(self.coordinator.handle(1000, server, now))

    def done(self, outcome: Outcome) -> Outcome:
        self.journal += outcome.decisions
        return outcome

    def joins(self, name: str, now: float, instead_of: int | None = None) -> m.ClientGrant | m.Failure:
        request = m.JoinCluster(name=name, wait_s=1.0, instead_of=instead_of)
        ((_, grant),) = self.done(self.coordinator.handle(0, request, now)).replies
        return grant

    def pulses(self, grant: m.ClientGrant, now: float) -> None:
        hello = Hello(grant.incarnation, grant.client_id, b"")
        self.coordinator.open_pulse(grant.incarnation, hello, now)

    def evicts(self, now: float) -> list[tuple[str, int]]:
        outcome = self.done(self.coordinator.tick(now))
        return [(name, grant.incarnation) for name, grant in outcome.evictions]


def worker(world: World, rank: int = 1) -> m.ClientGrant:
    grant = world.joins(client_name(rank), 0.0)
    assert isinstance(grant, m.ClientGrant)
    world.pulses(grant, 0.0)
    return grant


def test_a_worker_is_evicted_once_its_lease_is_over_and_other_clients_are_not() -> None:
    world = World()
    worker(world)
    for name in ("saver", "worker-01"):
        world.pulses(world.joins(name, 0.0), 0.0)
    world.coordinator.beat(1, ALIVE, 1.0)
    assert world.evicts(LEASE_S + 0.9) == []
    assert world.coordinator.next_deadline() == LEASE_S + 1.0
    assert world.evicts(LEASE_S + 1.0) == [("worker-1", 2)]
    assert world.evicts(LEASE_S + 1.1) == []  # it is being done
    with pytest.raises(Refused):  # of the older life
        world.coordinator.beat(77, ALIVE, LEASE_S + 1.2)


def test_nobody_is_evicted_for_a_coordinator_that_stood_still_or_has_just_begun() -> None:
    world = World()
    worker(world)
    world.coordinator.late(10.0)
    assert world.evicts(10.0) == []
    again = World(tuple(world.journal), now=50.0)
    assert again.evicts(50.0 + LEASE_S) == []
    assert again.evicts(50.0 + RESTORED_S) == [("worker-1", 2)]


def test_one_that_took_its_leave_is_not_missed_also_after_a_restart() -> None:
    world = World()
    worker(world)
    world.done(world.coordinator.beat(1, BYE, 1.0))
    assert world.evicts(99.0) == []
    assert World(tuple(world.journal), now=0.0).evicts(99.0) == []


def test_an_eviction_that_the_coordinator_died_in_is_made_again() -> None:
    world = World()
    grant = worker(world)
    assert world.evicts(LEASE_S) == [("worker-1", 2)]
    again = World(tuple(world.journal), now=50.0)
    assert again.evicts(50.0 + RESTORED_S) == [("worker-1", 3)]
    again.done(again.coordinator.left(grant.client_id, 3, "evicting"))
    assert World(tuple(again.journal), now=0.0).evicts(99.0) == []


def test_who_was_evicted_may_come_back_unless_another_has_its_place() -> None:
    world = World()
    grant = worker(world)
    assert world.evicts(LEASE_S) == [("worker-1", 2)]
    back = world.joins("worker-1", 3.0, instead_of=1)
    assert (back.client_id, back.incarnation) == (grant.client_id, 3)
    world.joins("worker-1", 3.0)
    refused = world.joins("worker-1", 3.0, instead_of=3)
    assert isinstance(refused, m.Failure)
    assert "another process has its place (incarnation 4; this was 3)" in refused.message


def test_who_comes_back_and_does_not_hear_of_it_may_ask_again() -> None:
    world = World()
    worker(world)
    assert world.evicts(LEASE_S) == [("worker-1", 2)]
    world.joins("worker-1", 3.0, instead_of=1)  # answered by nobody: the coordinator died
    again = World(tuple(world.journal), now=50.0)
    assert again.joins("worker-1", 50.0, instead_of=1).incarnation == 4


def test_nobody_is_evicted_while_a_shard_has_no_server() -> None:
    world = World()
    worker(world)
    world.done(world.coordinator.closed(1000, 1.0))
    assert world.evicts(2 * LEASE_S) == []
    assert (world.coordinator.next_deadline() or 0.0) > 2 * LEASE_S  # looked at again, not at once
    world.register(2 * LEASE_S)
    assert world.evicts(3 * LEASE_S) == [("worker-1", 2)]


def test_a_worker_that_is_there_without_progress_is_said_to_stand_still() -> None:
    world = World()
    works, stuck = worker(world, 1), world.joins(client_name(2), 0.0)
    assert isinstance(stuck, m.ClientGrant)
    hello = Hello(stuck.incarnation, stuck.client_id, b"")
    world.coordinator.open_pulse(7, hello, 0.0)
    for now in range(1, 71):
        world.coordinator.beat(works.incarnation, Beat(BeatKind.ALIVE, 0, 3, now, 0), float(now))
        world.coordinator.beat(7, Beat(BeatKind.ALIVE, 0, 2, 5, 9), float(now))
        ((_, status),) = world.coordinator.handle(0, m.GetStatus(), float(now)).replies
        assert (status.still == ()) == (now < 61)
    assert status.still == ((2, 2, 69.0),)
    assert world.evicts(71.0) == []
