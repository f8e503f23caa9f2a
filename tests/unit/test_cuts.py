"""Cuts and leases, decided without sockets and clocks."""

import msgspec
import pytest

from shoal.errors import Unavailable
from shoal.fleet.attendance import Attendance
from shoal.fleet.cuts import BEGIN_S, GONE_S, HOLD_S, Cuts, Replies
from shoal.fleet.decisions import ClientGranted
from shoal.fleet.leases import LEASE_S, Leases
from shoal.fleet.pulse import Beat, Hello, PulseOrder, prove
from shoal.store import messages as m
from shoal.store.rounds import client_name

SERVERS = {0: 10, 1: 11}
SHARDS = {0: (0, 1), 1: (2, 3)}
CLIENTS = (20, 21)
ASKED = 30
SAVE = m.SaveStore(url="file:///x", name="000001-a", wait_s=60.0)
LOAD = m.LoadStore(url="file:///x", name="000001-a", tables={1: 1}, wait_s=60.0)
ALIVE = Beat(1, 0, 5, 6, 7)


class World:
    def __init__(self, clients: tuple[int, ...] = CLIENTS) -> None:
        self.leases = Leases(-LEASE_S)
        for peer in clients:
            self.leases.open(peer, 1000 + peer, 1, 0.0)
        self.cuts = Cuts(4, self.leases)
        self.shards = SHARDS

    def begin(self, request: m.SaveStore | m.LoadStore = SAVE, now: float = 0.0) -> Replies:
        return self.cuts.begin(ASKED, request, SERVERS, lambda: self.shards, now)

    def report(self, peer: int, did: str, number: int = 1, now: float = 0.1, **more: object) -> Replies:
        return self.cuts.report(peer, m.PartReport(number=number, did=did, **more), now)


def part(name: str) -> m.PartInfo:
    return m.PartInfo(name=name, sha256="", rows=1, bytes=1)


def holds(replies: Replies) -> dict[int, bool]:
    return {peer: reply.hold for peer, reply in replies if isinstance(reply, PulseOrder)}


def orders(replies: Replies) -> dict[int, str]:
    return {peer: reply.do for peer, reply in replies if isinstance(reply, m.PartOrder)}


def test_a_save_holds_then_begins_then_lets_go_then_waits_for_the_files() -> None:
    world = World()
    assert holds(world.begin()) == {20: True, 21: True}
    assert world.cuts.held(20, 1, 0.1) == []
    assert world.cuts.holding
    begun = world.cuts.held(21, 1, 0.2)
    assert orders(begun) == {10: "save", 11: "save"}
    assert begun[0][1].shards == (0, 1)
    assert world.report(10, "begun", clocks=(4,)) == []
    assert holds(world.report(11, "begun")) == {20: False, 21: False}
    assert not world.cuts.holding
    assert world.report(11, "saved", part=part("b")) == []
    assert world.report(10, "saved", part=part("a")) == [
        (ASKED, m.StoreSaved(parts=(part("a"), part("b")), clocks=(4,), shards=4))
    ]


def test_a_server_may_have_written_before_another_has_begun() -> None:
    world = World(())
    assert orders(world.begin()) == {10: "save", 11: "save"}
    world.report(10, "begun")
    assert world.report(10, "saved", part=part("a")) == []
    assert world.report(11, "begun") == []
    ((peer, saved),) = world.report(11, "saved", part=part("b"))
    assert (peer, len(saved.parts)) == (ASKED, 2)


def test_who_does_not_hold_is_let_go_and_asked_again() -> None:
    world = World()
    world.begin()
    world.cuts.held(20, 1, 0.1)
    assert world.cuts.deadline == HOLD_S
    assert holds(world.cuts.tick(HOLD_S)) == {20: False, 21: False}
    assert world.cuts.held(21, 1, 1.05) == []  # too late
    again = world.cuts.tick(world.cuts.deadline or 0.0)
    assert holds(again) == {20: True, 21: True}
    assert {reply.number for _, reply in again} == {2}


def test_a_cut_that_begins_too_late_is_none() -> None:
    world = World()
    world.begin()
    world.cuts.held(20, 1, 0.1)
    world.cuts.held(21, 1, 0.9)
    world.report(10, "begun")
    assert world.cuts.deadline == pytest.approx(BEGIN_S)
    late = world.cuts.tick(BEGIN_S)
    assert holds(late) == {20: False, 21: False}
    assert orders(late) == {10: "stop", 11: "stop"}
    assert world.report(11, "begun", now=1.9) == []


def test_a_server_that_was_given_up_meanwhile_gives_no_image() -> None:
    world = World(())
    assert orders(world.begin()) == {10: "save", 11: "save"}
    world.shards = {1: (0, 1, 2, 3)}  # it stays connected, and does not know it yet
    assert orders(world.report(10, "begun")) == {10: "stop", 11: "stop"}
    again = world.cuts.tick(world.cuts.deadline or 0.0)
    assert orders(again) == {11: "save"}
    assert again[0][1].shards == (0, 1, 2, 3)
    world.report(11, "begun", number=2)
    ((_, saved),) = world.report(11, "saved", number=2, part=part("b"))
    assert saved.parts == (part("b"),)


def test_what_is_heard_after_clients_went_on_is_no_cut() -> None:
    world = World()
    world.begin()
    for peer in CLIENTS:
        world.cuts.held(peer, 1, 0.1)
    late = world.report(10, "begun", now=BEGIN_S + 3.0)
    assert holds(late) == {20: False, 21: False}
    assert orders(late) == {10: "stop", 11: "stop"}


def test_a_client_that_cannot_be_told_is_waited_for_or_given_up() -> None:
    world = World()
    world.leases.closed(21)
    world.leases.renew(20, ALIVE, 2.0)
    assert world.begin(now=2.0) == []
    assert world.cuts.tick(2.2) == []
    world.leases.renew(20, ALIVE, 2.6)
    assert holds(world.cuts.tick(2.6)) == {20: True}


def test_a_cut_waits_for_workers_that_may_push_and_cannot_be_told() -> None:
    unseen = {7}
    cuts = Cuts(4, Leases(-LEASE_S), unseen=lambda: unseen)
    assert cuts.begin(ASKED, SAVE, SERVERS, lambda: SHARDS, 0.0) == []
    assert cuts.tick(0.2) == []
    unseen.clear()
    assert orders(cuts.tick(0.5)) == {10: "save", 11: "save"}


def test_workers_of_the_journal_are_unseen_until_heard_of_and_evicted_ones_until_they_are_fenced() -> None:
    attendance, worker = Attendance(), ClientGranted(name=client_name(0), client_id=7, incarnation=1)
    attendance.granted(worker, 30.0)
    assert attendance.unseen(()) == set()  # it pushes when its pulse is there, not before
    attendance.restored(worker)
    assert attendance.unseen(()) == {7}
    attendance.heard(7, 1, 0.0)
    assert attendance.unseen((7,)) == set()
    attendance.granted(msgspec.structs.replace(worker, incarnation=2, state="evicting"), 30.0)
    assert attendance.unseen((7,)) == {7}
    attendance.granted(msgspec.structs.replace(worker, incarnation=2, state="left"), 30.0)
    assert attendance.unseen(()) == set()


def test_a_connection_that_ends_within_a_hold_begins_it_anew() -> None:
    world = World()
    world.begin()
    world.cuts.held(20, 1, 0.1)
    world.leases.give_up(20)
    assert holds(world.cuts.closed(20, 0.2)) == {20: False, 21: False}
    assert holds(world.cuts.tick(0.5)) == {21: True}


def test_a_load_changes_nothing_before_all_have_checked() -> None:
    world = World()
    assert orders(world.begin(LOAD)) == {10: "check", 11: "check"}
    assert world.report(10, "checked") == []
    assert orders(world.report(11, "checked")) == {10: "load", 11: "load"}
    assert world.report(10, "loaded") == []
    assert world.report(11, "loaded") == [(ASKED, m.Done())]


def test_one_failure_ends_it_everywhere() -> None:
    world = World()
    world.begin(LOAD)
    failed = world.report(10, "failed", code=4, message="damaged")
    assert orders(failed) == {10: "stop", 11: "stop"}
    assert failed[-1] == (ASKED, m.Failure(code=4, message="server 0: damaged"))
    assert world.cuts.deadline is None


def test_servers_that_go_and_deadlines_end_it() -> None:
    world = World(())
    world.begin()
    assert "server 1 has gone" in world.cuts.closed(11, 1.0)[-1][1].message
    world.begin(now=2.0)
    for peer in (10, 11):
        world.report(peer, "begun", number=2, now=2.1)
    assert "write waits for 0, 1" in world.cuts.tick(62.0)[-1][1].message


def test_one_at_a_time_and_all_servers() -> None:
    world = World()
    world.begin()
    with pytest.raises(Unavailable, match="another checkpoint"):
        world.begin()
    ((peer, failure),) = World().cuts.begin(ASKED, SAVE, {0: 10}, lambda: SHARDS, 10.0)
    assert (peer, failure.message) == (ASKED, "server 1 is not connected to the coordinator")


def test_servers_find_a_coordinator_that_was_started_again() -> None:
    cuts = Cuts(8, Leases(now=100.0))
    servers = {0: 10}
    assert cuts.begin(ASKED, LOAD, servers, lambda: SHARDS, 100.1) == []
    servers[1] = 11
    assert orders(cuts.tick(100.4)) == {10: "check", 11: "check"}


def test_leases_run_out_without_renewal_only() -> None:
    leases = Leases(-LEASE_S)
    leases.open(1, 7, 1, 0.0)
    leases.open(2, 8, 1, 0.0)
    assert leases.renew(1, ALIVE, 2.0)
    assert [lease.client_id for lease in leases.expired(LEASE_S + 0.1)] == [8]
    leases.was_late(1.0)
    assert leases.expired(LEASE_S + 0.1) == []
    leases.closed(1)
    assert [lease.client_id for lease in leases.unreachable()] == [7]
    assert not leases.renew(1, ALIVE, 3.0)


def test_leases_show_progress_and_the_newest_life() -> None:
    leases = Leases(-LEASE_S)
    leases.open(1, 7, 1, 0.0)
    leases.renew(1, ALIVE, 1.0)
    leases.renew(1, ALIVE, 2.0)
    (lease,) = leases
    assert (lease.renewed, lease.progressed, lease.clock) == (2.0, 1.0, 5)
    leases.open(2, 7, 2, 2.5)
    assert not leases.renew(1, ALIVE, 3.0)
    assert leases.peers() == {2: 7}


def test_nobody_expires_right_after_a_start() -> None:
    leases = Leases(100.0)
    leases.open(1, 7, 1, 97.0)
    assert leases.starting(101.0)
    assert leases.expired(101.0) == []
    assert [lease.client_id for lease in leases.expired(100.1 + LEASE_S)] == [7]


def test_proofs_of_the_two_sides_differ() -> None:
    hello = Hello(1, 2, b"n" * 32)
    assert prove("t", "client", hello, b"m" * 32) != prove("t", "server", hello, b"m" * 32)


CALL = m.SaveStore(url="file:///x", name="000002-b", wait_s=60.0, call_s=20.0)


def test_workers_are_called_and_the_cut_waits_until_all_are_ready() -> None:
    world = World(())

    def attend(rank: int, **said: str) -> Replies:
        return world.cuts.attend(40 + rank, m.AttendCut(rank=rank, **said), 1.0)

    for rank in (0, 1, 2):
        assert attend(rank)[0][1].state == ""
    assert world.begin(CALL) == []
    ((_, news),) = attend(0, ready="000002-b")
    assert (news.state, news.name) == ("called", "000002-b")
    attend(2, ready="000002-b")
    assert orders(attend(1, ready="000002-b")) == {10: "save", 11: "save"}
    assert attend(0, ready="000002-b")[0][1].state == "begins"
    world.report(10, "begun", clocks=(4, 5, 6))
    world.report(11, "begun")
    assert attend(0, ready="000002-b")[0][1].clocks == (4, 5, 6)
    world.report(10, "saved", part=part("a"))
    ((_, saved),) = world.report(11, "saved", part=part("b"))
    assert saved.workers == (0, 1, 2)


def test_a_cut_within_a_batch_is_tried_again() -> None:
    world = World(())
    ready = m.AttendCut(rank=0, ready="000002-b", whole=(4, 6))
    other = m.AttendCut(rank=1, ready="000002-b")  # whose steps end batches
    world.cuts.attend(40, ready, 0.0)
    world.cuts.attend(41, other, 0.0)
    assert orders(world.begin(CALL, 1.0)) == {10: "save", 11: "save"}
    assert orders(world.report(10, "begun", now=1.0, clocks=(5, 5))) == {10: "stop", 11: "stop"}
    assert orders(world.cuts.tick(1.5)) == {10: "save", 11: "save"}
    assert world.report(10, "begun", 2, now=1.5, clocks=(6, 5)) == []
    assert orders(world.report(11, "begun", 2, now=1.5)) == {}
    assert world.cuts.attend(40, ready, 1.5)[0][1].state == "made"


def test_tries_do_not_keep_time_with_the_batches() -> None:
    """Of workers that are between batches for a fifth of each, whatever their length: one is found soon."""
    for length in (0.05, 0.1, 0.2, 0.3, 0.4):
        world, now, tries = World(()), 1.0, 1
        world.cuts.attend(40, m.AttendCut(rank=0, ready="000002-b", whole=(4,)), 0.0)
        world.begin(CALL, now)
        while now % length < 0.8 * length:
            assert orders(world.report(10, "begun", tries, now=now, clocks=(5,))) == {10: "stop", 11: "stop"}
            now = world.cuts.deadline
            world.cuts.tick(now)
            tries += 1
        assert tries < 20


def test_a_cut_waits_for_no_worker_that_left_or_does_not_come() -> None:
    world = World(())
    for rank in (0, 1):
        world.cuts.attend(40 + rank, m.AttendCut(rank=rank), 0.0)
    world.begin(CALL)
    assert world.cuts.deadline == 20.0
    assert len(world.cuts.attend(40, m.AttendCut(rank=0, here=False), 1.0)) == 1
    said = world.cuts.attend(41, m.AttendCut(rank=1, here=False), 1.0)
    assert orders(said) == {10: "save", 11: "save"}
    world = World(())
    world.cuts.attend(40, m.AttendCut(rank=0), 0.0)
    world.begin(CALL)
    assert orders(world.cuts.tick(20.0)) == {10: "save", 11: "save"}
    world = World(())
    world.cuts.attend(40, m.AttendCut(rank=0), 0.0)
    world.cuts.attend(41, m.AttendCut(rank=1), 0.0)
    world.begin(CALL)
    assert len(world.cuts.attend(41, m.AttendCut(rank=1, waits=True), 1.0)) == 1
    stands = m.AttendCut(rank=0, ready="000002-b", stands=True)
    assert orders(world.cuts.attend(40, stands, 1.0)) == {10: "save", 11: "save"}


def test_who_has_gone_without_a_word_is_waited_for_a_while() -> None:
    world = World(())
    for rank in (0, 1):
        world.cuts.attend(40 + rank, m.AttendCut(rank=rank, ready="000002-b"), 0.0)
    world.cuts.closed(41, 0.5)  # as all are by and by in a job that is being ended
    assert world.begin(CALL, 1.0) == []
    assert len(world.cuts.attend(52, m.AttendCut(rank=1), 2.0)) == 1  # another in its place
    assert orders(world.cuts.attend(52, m.AttendCut(rank=1, ready="000002-b"), 3.0)) == {
        10: "save",
        11: "save",
    }
    world = World(())
    world.cuts.attend(40, m.AttendCut(rank=0), 0.0)
    world.cuts.closed(40, 0.5)
    world.cuts.attend(41, m.AttendCut(rank=1), 0.0)
    assert world.begin(CALL) == []
    assert world.cuts.deadline == GONE_S
    assert world.cuts.tick(GONE_S) == []  # it is given up, but another is not ready
    assert world.cuts.deadline == 20.0
    ready = m.AttendCut(rank=1, ready="000002-b")
    assert orders(world.cuts.attend(41, ready, 11.0)) == {10: "save", 11: "save"}
    for did in ("begun", "saved"):
        for peer in (10, 11):
            world.report(peer, did, now=11.1, clocks=(4, 4), part=part("a") if did == "saved" else None)
    assert orders(world.begin(CALL, 30.0)) == {10: "save", 11: "save"}  # and is waited for no more


@pytest.mark.parametrize("told_first", [True, False])
def test_who_was_dismissed_is_not_waited_for_until_that_rank_comes_again(told_first: bool) -> None:
    world = World(())
    for rank in (0, 1):
        world.cuts.attend(40 + rank, m.AttendCut(rank=rank, ready="000002-b"), 0.0)
    happens = [
        lambda: world.cuts.attend(60, m.AttendCut(rank=1, here=False, dismissed=True), 0.5),
        lambda: world.cuts.closed(41, 0.5),
    ]
    for one in happens if told_first else reversed(happens):
        one()
    assert orders(world.begin(CALL, 1.0)) == {10: "save", 11: "save"}
    world = World(())
    world.cuts.attend(60, m.AttendCut(rank=1, here=False, dismissed=True), 0.5)
    world.cuts.attend(41, m.AttendCut(rank=1), 1.0)  # the job was made larger again
    world.cuts.closed(41, 2.0)
    assert world.begin(CALL, 3.0) == []


def test_a_save_tells_what_the_job_went_on_from_and_who_has_come_since() -> None:
    def saved(world: World) -> m.StoreSaved:
        number = world.begin()[0][1].number
        for did in ("begun", "saved"):
            for peer in (10, 11):
                replies = world.report(peer, did, number=number, part=part("a") if did == "saved" else None)
        return replies[-1][1]

    world = World(())
    world.cuts.attend(40, m.AttendCut(rank=0), 0.0)
    world.begin(msgspec.structs.replace(LOAD, resume=True))
    for did in ("checked", "loaded"):
        for peer in (10, 11):
            world.report(peer, did)
    assert (saved(world).restored, saved(world).came) == ("file:///x/000001-a", ())
    world.cuts.attend(41, m.AttendCut(rank=1, here=False), 0.0)
    world.cuts.attend(42, m.AttendCut(rank=2), 0.0)
    assert saved(world).came == (2,)
    (kept,) = world.cuts.to_keep()
    world.cuts.restore(kept)
    assert world.cuts.to_keep() == []
    later = World(())  # the next coordinator
    later.cuts.restore(kept)
    assert later.cuts.to_keep() == []
    assert (saved(later).restored, saved(later).came) == ("file:///x/000001-a", (2,))


def test_a_cut_within_a_step_that_workers_make_together_is_made_again() -> None:
    world = World(())
    for rank in (0, 1):
        world.cuts.attend(40 + rank, m.AttendCut(rank=rank, ready="000002-b", aligned=True), 0.0)
    assert orders(world.begin(CALL)) == {10: "save", 11: "save"}
    assert orders(world.report(10, "begun", clocks=(4, 5))) == {10: "stop", 11: "stop"}
    again = world.cuts.tick(world.cuts.deadline or 0.0)
    assert orders(again) == {10: "save", 11: "save"}
    number = again[0][1].number
    world.report(10, "begun", number=number, clocks=(5, 5))
    world.report(11, "begun", number=number)
    assert world.cuts.attend(40, m.AttendCut(rank=0), 1.0)[0][1].clocks == (5, 5)


def test_a_call_that_fails_is_over() -> None:
    world = World(())
    world.cuts.attend(40, m.AttendCut(rank=0), 0.0)
    world.begin(CALL)
    world.cuts.closed(ASKED, 1.0)
    assert world.cuts.attend(40, m.AttendCut(rank=0), 1.0)[0][1].state == ""
