"""The coordinator's decisions, without sockets, files or clocks; and its journal."""

import random
import sqlite3
from pathlib import Path

import msgspec
import pytest

from shoal import optim
from shoal.config import CoordinatorOptions
from shoal.errors import BadInput, Unavailable
from shoal.fleet.coordinator import Coordinator, Outcome
from shoal.fleet.decisions import ClocksRestored, Decision, decode, encode
from shoal.fleet.sqlite_journal import SqliteJournal
from shoal.store import messages as m
from shoal.store.catalogue import TableRequest

SGD = optim.SGD(lr=0.1)


def make(servers: int = 2, shards: int = 8) -> Coordinator:
    return Coordinator(CoordinatorOptions(servers=servers, shards=shards), pid=1)


def register(identity: str = "a", **changed: object) -> m.RegisterServer:
    base = m.RegisterServer(
        identity=identity, pid=10, host="127.0.0.1", port=4000, unix_path="/tmp/x.sock", shards=8
    )
    return msgspec.structs.replace(base, **changed)


def join(name: str | None = None, wait_s: float = 5.0) -> m.JoinCluster:
    return m.JoinCluster(name=name, wait_s=wait_s)


def reply(outcome: Outcome) -> m.Reply:
    ((_, message),) = outcome.replies
    return message


def ready(servers: int = 2) -> Coordinator:
    coordinator = make(servers)
    for index in range(servers):
        coordinator.handle(index, register(f"server-{index}", port=4000 + index), 0.0)
    assert coordinator.ready
    return coordinator


def table(name: str = "items", **changed: object) -> m.OpenTable:
    return m.OpenTable(request=TableRequest(**{"name": name, "dim": 4, "optimizer": SGD, **changed}))


def test_servers_get_the_first_free_index_and_keep_it() -> None:
    coordinator = make()
    assert reply(coordinator.handle(1, register("a"), 0)) == m.ServerAdmitted(index=0)
    assert reply(coordinator.handle(2, register("a"), 1)) == m.ServerAdmitted(index=0)
    assert reply(coordinator.handle(3, register("b"), 2)) == m.ServerAdmitted(index=1)


def test_registering_again_decides_nothing() -> None:
    coordinator = make()
    assert len(coordinator.handle(1, register("a"), 0).decisions) == 1
    assert coordinator.handle(1, register("a"), 0).decisions == []


def test_a_server_may_ask_for_its_index() -> None:
    coordinator = make()
    assert reply(coordinator.handle(1, register("a", index=1), 0)) == m.ServerAdmitted(index=1)
    assert reply(coordinator.handle(2, register("b"), 0)) == m.ServerAdmitted(index=0)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (register("b", index=0), "index 0 belongs to the server of pid 10 at 127.0.0.1:4000"),
        (register("b", shards=16), "this cluster has 8 shards, the server 16"),
        (register("b", port=0), "port above 0"),
        (register("b", host="x" * 513), "512 bytes"),
    ],
)
def test_a_server_without_a_place_is_refused(request_: m.RegisterServer, said: str) -> None:
    coordinator = make(servers=1)
    coordinator.handle(1, register("a"), 0)
    outcome = coordinator.handle(2, request_, 0)
    assert said in reply(outcome).message
    assert outcome.decisions == []


def test_a_client_waits_until_all_servers_are_there() -> None:
    coordinator = make()
    coordinator.handle(1, register("a"), 0)
    assert coordinator.handle(9, join(), 0) == Outcome()
    outcome = coordinator.handle(2, register("b", port=4001), 1)
    assert [peer for peer, _ in outcome.replies] == [2, 9]
    grant = outcome.replies[1][1]
    assert (grant.client_id, grant.incarnation) == (1, 1)
    placement = grant.placement
    assert placement.chains == ((0,), (0,), (0,), (0,), (1,), (1,), (1,), (1,))
    assert placement.terms == (1,) * 8
    assert [server.port for server in placement.servers] == [4000, 4001]


def test_waiting_ends_with_a_deadline_that_says_for_whom() -> None:
    coordinator = make()
    coordinator.handle(1, register("a"), 0)
    coordinator.handle(9, join(wait_s=5), 10)
    assert coordinator.next_deadline() == 15
    assert coordinator.tick(14.9) == Outcome()
    message = reply(coordinator.tick(15)).message
    assert "servers [1] of 2 have not registered; waited 5.0 s" in message
    assert coordinator.next_deadline() is None


def test_a_client_that_leaves_while_waiting_is_forgotten() -> None:
    coordinator = make(servers=1)
    coordinator.handle(9, join(), 0)
    coordinator.closed(9, 0.0)
    assert [peer for peer, _ in coordinator.handle(1, register("a"), 1).replies] == [1]


def test_a_name_keeps_its_id_and_counts_its_lives() -> None:
    coordinator = ready()
    names = ["w0", "w1", "w0", None, None, "w0"]
    grants = [reply(coordinator.handle(9, join(name), 0)) for name in names]
    assert [(g.client_id, g.incarnation) for g in grants] == [(1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (1, 3)]


@pytest.mark.parametrize("name", ["", "x" * 513, "a\nb"])
def test_a_bad_client_name_is_refused(name: str) -> None:
    assert "1 to 512 bytes" in reply(ready().handle(9, join(name), 0)).message


def test_a_closed_connection_shows_the_server_as_gone_and_decides_nothing() -> None:
    coordinator = ready()
    coordinator.closed(1, 0.0)
    status = reply(coordinator.handle(9, m.GetStatus(), 0))
    assert [server.state for server in status.servers] == ["up", "gone"]
    assert reply(coordinator.handle(9, join(), 0)).client_id == 1
    coordinator.handle(5, register("server-1", port=4001), 0)
    status = reply(coordinator.handle(9, m.GetStatus(), 0))
    assert [server.state for server in status.servers] == ["up", "up"]


def test_tables_are_created_once_and_updated_by_generation() -> None:
    coordinator = ready()
    first = coordinator.handle(9, table(), 0)
    again = coordinator.handle(9, table(), 0)
    faster = coordinator.handle(9, table(optimizer=optim.SGD(lr=0.5)), 0)
    assert [len(outcome.decisions) for outcome in (first, again, faster)] == [1, 0, 1]
    entries = [reply(outcome).opened.entry for outcome in (first, again, faster)]
    assert [(entry.id, entry.generation) for entry in entries] == [(1, 1), (1, 1), (1, 2)]


def test_a_refused_table_leaves_no_trace() -> None:
    coordinator = ready()
    coordinator.handle(9, table(), 0)
    for bad in (table(dim=5), table("new", dim=0), table("new", optimizer=None)):
        outcome = coordinator.handle(9, bad, 0)
        assert isinstance(reply(outcome), m.Failure)
        assert outcome.decisions == []
    assert reply(coordinator.handle(9, m.GetStatus(), 0)).tables == 1


def test_tables_are_listed_in_pages() -> None:
    coordinator = ready()
    for number in range(250):
        coordinator.handle(9, table(f"t{number}"), 0)
    first = reply(coordinator.handle(9, m.ListTables(), 0))
    second = reply(coordinator.handle(9, m.ListTables(after=first.entries[-1].id), 0))
    assert (len(first.entries), first.more) == (200, True)
    assert (len(second.entries), second.more) == (50, False)


def tensor(brings_value: bool = True) -> m.OpenTable:
    shape = (2, 3) if brings_value else None
    return table("w", dim=None, dense=True, shape=shape, brings_value=brings_value)


def writes(coordinator: Coordinator, peer: int, request: m.OpenTable) -> str:
    return reply(coordinator.handle(peer, request, 0)).opened.write


def test_one_client_writes_a_tensors_first_value_and_others_wait() -> None:
    coordinator = ready()
    assert writes(coordinator, 8, tensor()) == "first"
    assert writes(coordinator, 9, tensor()) == "wait"
    assert writes(coordinator, 9, tensor(brings_value=False)) == "wait"
    coordinator.handle(8, m.TensorWritten(name="w"), 0)
    assert writes(coordinator, 9, tensor()) == "none"
    assert coordinator.handle(8, m.TensorWritten(name="w"), 0).decisions == []


def test_a_half_written_tensor_falls_to_the_next_one_who_overwrites_it() -> None:
    coordinator = ready()
    assert writes(coordinator, 8, tensor()) == "first"
    coordinator.closed(8, 0.0)
    assert writes(coordinator, 9, tensor(brings_value=False)) == "wait"
    assert writes(coordinator, 9, tensor()) == "again"


def test_after_a_restart_an_unwritten_tensor_is_written_again() -> None:
    decisions: list[Decision] = list(make().begin().decisions)
    coordinator = make()
    decisions += coordinator.handle(8, tensor(), 0).decisions
    assert writes(restored(decisions), 9, tensor()) == "again"


def restored(decisions: list[Decision]) -> Coordinator:
    coordinator = make()
    for decision in decisions:
        coordinator.restore(decode(encode(decision)))
    return coordinator


def random_request(random_: random.Random) -> m.Request:
    number = random_.randrange(4)
    return random_.choice(
        [
            register(f"s{number}", port=4000 + number),
            join(random_.choice([None, f"w{number}"])),
            table(f"t{number}", optimizer=optim.SGD(lr=random_.choice([0.1, 0.2]))),
            table("w", dim=None, dense=True, shape=(number + 1,), brings_value=True),
            m.TensorWritten(name="w"),
        ]
    )


def observed(coordinator: Coordinator) -> list[object]:
    """What clients can see, besides who is connected."""
    status = reply(coordinator.handle(0, m.GetStatus(), 0))
    servers = [msgspec.structs.replace(server, state="") for server in status.servers]
    return [servers, status.tables, status.clients, reply(coordinator.handle(0, m.ListTables(), 0))]


@pytest.mark.parametrize("seed", range(30))
def test_the_journal_gives_back_the_same_state(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    coordinator = make()
    journal = SqliteJournal(tmp_path / "j.db")
    journal.append(coordinator.begin().decisions)
    for _ in range(40):
        journal.append(coordinator.handle(random_.randrange(9), random_request(random_), 0).decisions)
    journal.close()
    journal = SqliteJournal(tmp_path / "j.db")
    twin = restored(list(journal))
    journal.close()
    assert observed(twin) == observed(coordinator)
    if coordinator.ready:
        assert (
            reply(twin.handle(1, join("w1"), 0)).client_id
            == reply(coordinator.handle(1, join("w1"), 0)).client_id
        )


def test_the_journal_is_as_large_as_the_state(tmp_path: Path) -> None:
    coordinator = ready()
    journal = SqliteJournal(tmp_path / "j.db")
    for _ in range(50):
        journal.append(coordinator.handle(9, join(), 0).decisions)
    assert [decision.client_id for decision in journal] == [50]
    journal.close()


def test_a_journal_of_another_cluster_is_refused() -> None:
    formed, _ = make().begin().decisions
    with pytest.raises(
        BadInput, match="8 shards, 2 servers, 0 replicas; this coordinator is for 8 shards, 3"
    ):
        make(servers=3).restore(formed)


def test_a_second_coordinator_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fleet.sqlite_journal._LOCK_WAIT_S", 0.05)
    journal = SqliteJournal(tmp_path / "j.db")
    with pytest.raises(Unavailable, match="held by another coordinator"):
        SqliteJournal(tmp_path / "j.db")
    journal.close()


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, and long enough to be one" * 100)
    with pytest.raises(BadInput, match="not a journal"):
        SqliteJournal(tmp_path / "text")
    with pytest.raises(BadInput, match="cannot open"):
        SqliteJournal(tmp_path / "missing" / "j.db")


def test_a_damaged_or_newer_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    SqliteJournal(path).close()
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO decisions VALUES ('x', 1, x'00')")
    database.close()
    journal = SqliteJournal(path)
    with pytest.raises(BadInput, match="damaged"):
        list(journal)
    journal.close()


def replicated(now: float = 0.0) -> Coordinator:
    options = CoordinatorOptions(servers=3, shards=8, replicas=1)
    coordinator = Coordinator(options, pid=1, now=now)
    for index in range(3):
        coordinator.handle(index, register(f"server-{index}", port=4000 + index), now)
    return coordinator


def watch(coordinator: Coordinator, server: int, now: float, after: int = 1) -> Outcome:
    request = m.WatchPlacement(after=after, wait_s=1.0, server=server, identity=f"server-{server}")
    return coordinator.handle(100 + server, request, now)


def evicted(coordinator: Coordinator) -> list[int]:
    status = reply(coordinator.handle(9, m.GetStatus(), 0))
    return [server.index for server in status.servers if server.state == "evicted"]


def test_a_server_that_is_not_heard_of_for_a_lease_is_given_up() -> None:
    coordinator = replicated()
    for now in (1.0, 2.0):
        for server in (0, 2):
            watch(coordinator, server, now)
        coordinator.tick(now)
    assert evicted(coordinator) == []
    outcome = coordinator.tick(2.6)
    assert evicted(coordinator) == [1]
    told = [message.placement for _, message in outcome.replies if isinstance(message, m.PlacementNews)]
    assert any(placement and all(1 not in chain for chain in placement.chains) for placement in told)
    assert "given up" in reply(watch(coordinator, 1, 3.0)).message


def test_a_closed_connection_is_suspicion_and_one_that_registers_again_stays() -> None:
    coordinator = replicated()
    coordinator.closed(1, 1.0)
    coordinator.handle(7, register("server-1", port=4001), 1.2)
    for server in (0, 2):
        watch(coordinator, server, 1.4)
    coordinator.tick(1.6)
    assert evicted(coordinator) == []
    coordinator.closed(7, 2.0)
    coordinator.tick(2.6)
    assert evicted(coordinator) == [1]


def test_leases_grow_by_what_the_coordinator_slept() -> None:
    coordinator = replicated()
    coordinator.late(10.0)
    coordinator.tick(11.0)
    assert evicted(coordinator) == []


def test_a_server_that_died_while_the_coordinator_was_away_is_missed_after_it_is_back() -> None:
    options = CoordinatorOptions(servers=3, shards=8, replicas=1)
    first = Coordinator(options, pid=1)
    decisions: list[Decision] = list(first.begin().decisions)
    for index in range(3):
        decisions += first.handle(index, register(f"server-{index}", port=4000 + index), 0).decisions
    second = Coordinator(options, pid=1, now=100.0)
    for decision in decisions:
        second.restore(decode(encode(decision)))
    for server in (0, 2):
        watch(second, server, 101.0)
    second.tick(102.0)
    assert evicted(second) == []
    second.tick(102.6)
    assert evicted(second) == [1]


def test_a_server_with_the_only_copy_is_never_given_up() -> None:
    coordinator = ready()
    coordinator.closed(1, 0.0)
    coordinator.tick(100.0)
    assert evicted(coordinator) == []
    outcome = coordinator.handle(9, m.EvictServer(index=1, why="it ended"), 100.0)
    assert "server 1 has the only copy of 4 shards" in reply(outcome).message
    assert outcome.decisions == []


def test_a_server_without_shards_that_is_given_up_is_out_of_the_next_placement() -> None:
    coordinator = Coordinator(CoordinatorOptions(servers=2, shards=2), pid=1)
    for index in range(3):
        coordinator.handle(index, register(f"server-{index}", port=4000 + index, shards=2), 0)
    assert not coordinator._placer.fills  # two shards, and they have their servers
    before = reply(watch(coordinator, 0, 0.0, after=0)).placement
    coordinator.handle(9, m.EvictServer(index=2, why="it ended"), 1.0)
    after = reply(watch(coordinator, 0, 1.0, after=before.version)).placement
    assert [server.state for server in before.servers] == ["up", "up", "up"]
    assert [server.state for server in after.servers] == ["up", "up", "evicted"]
    assert after.chains == before.chains


def test_a_server_that_was_to_leave_still_is_after_a_restart() -> None:
    options = CoordinatorOptions(servers=3, shards=8, replicas=1)
    first = Coordinator(options)
    decisions: list[Decision] = list(first.begin().decisions)
    for index in range(3):
        decisions += first.handle(index, register(f"server-{index}", port=4000 + index), 0).decisions
    decisions += first.handle(9, m.RemoveServer(index=2), 0).decisions
    second = Coordinator(options)
    for decision in decisions:
        second.restore(decode(encode(decision)))
    second.begin()
    for index in range(3):
        second.handle(index, register(f"server-{index}", port=4000 + index), 0)
    assert [s.state for s in reply(second.handle(9, m.GetStatus(), 0)).servers] == ["up", "up", "leaving"]
    numbers = [{fill.number for fill in one._placer.fills.values()} for one in (first, second)]
    assert numbers[0]
    assert numbers[1]
    assert not numbers[0] & numbers[1]  # orders of an earlier life are not taken for those of this one
    before = second._placer.placed
    old = next(iter(first._placer.fills.values()))
    late = m.Filled(number=old.number, shard=old.shard, term=old.term, target=old.target)
    assert second.handle(8, late, 0).decisions == []  # its source has begun that fill anew
    assert second._placer.placed == before


def orders(outcome: Outcome) -> dict[int, m.PartOrder]:
    return {peer: message for peer, message in outcome.replies if isinstance(message, m.PartOrder)}


def reload_from(coordinator: Coordinator, together: bool, lost: tuple[int, ...] = (1,)) -> Outcome:
    request = m.ReloadStore(lost=lost, url="file:///x", name="000001-0", together=together, wait_s=9.0)
    return coordinator.handle(99, request, 1.0)


def carry_out(coordinator: Coordinator, given: dict[int, m.PartOrder]) -> Outcome:
    """All servers that were asked do as they are told; what the last of them leads to."""
    for peer, order in given.items():
        did = "checked" if order.do == "check" else "loaded"
        outcome = coordinator.handle(peer, m.PartReport(number=order.number, did=did), 2.0)
    return outcome


@pytest.mark.parametrize("together", [False, True])
def test_what_a_lost_server_had_is_read_by_others_and_then_placed_there(together: bool) -> None:
    coordinator = ready(2)
    coordinator.closed(1, 0.5)
    coordinator.handle(2, register("server-2", port=4002), 0.6)
    watch = m.WatchPlacement(after=0, wait_s=0.0)
    (_, before), *_ = coordinator.handle(50, watch, 0.7).replies
    assert before.placement.chains == ((0,),) * 4 + ((1,),) * 4
    given = orders(reload_from(coordinator, together))
    wanted = {0: (0, 1, 2, 3), 2: (4, 5, 6, 7)} if together else {2: (4, 5, 6, 7)}
    assert {peer: order.shards for peer, order in given.items()} == wanted
    assert {order.do for order in given.values()} == {"check"}
    given = orders(carry_out(coordinator, given))
    assert {(o.do, o.resume, o.reload) for o in given.values()} == {
        ("load", True, "together" if together else "alone")
    }
    done = carry_out(coordinator, given)
    assert (99, m.Done()) in done.replies
    (_, after), *_ = coordinator.handle(50, watch, 3.0).replies
    assert after.placement.chains == ((0,),) * 4 + ((2,),) * 4
    assert after.placement.terms == ((2,) if together else (1,)) * 4 + (2,) * 4
    assert [server.state for server in after.placement.servers] == ["up", "evicted", "up"]
    assert reply(reload_from(coordinator, together)) == m.Done()  # asked again, it is done


def test_a_reload_is_refused_or_given_up_with_its_reason() -> None:
    coordinator = ready(2)
    coordinator.closed(0, 0.5)
    found = reply(reload_from(coordinator, together=False, lost=(0,)))
    assert "the sync shard is among the lost" in found.message
    coordinator.closed(1, 0.6)
    found = reply(reload_from(coordinator, together=True, lost=(0, 1)))
    assert "no server is up" in found.message
    coordinator.handle(2, register("server-2", port=4002), 0.7)
    given = orders(reload_from(coordinator, together=True, lost=(0, 1)))
    assert given[2].shards == tuple(range(8))
    given = orders(carry_out(coordinator, given))
    ended = coordinator.closed(2, 1.5)  # while it reads
    assert any(peer == 99 and isinstance(said, m.Failure) for peer, said in ended.replies)


def test_clients_hear_who_took_over_and_say_what_they_lost() -> None:
    coordinator = ready(1)
    asked = m.WatchPlacement(after=1, wait_s=60.0)
    assert coordinator.handle(50, asked, 1.0).replies == []
    took = m.Takeover(shard=3, term=2, version=120, entry=130)
    server = msgspec.structs.replace(asked, server=0, identity="server-0", takeovers=(took,))
    ((peer, news),) = coordinator.handle(0, server, 2.0).replies
    assert (peer, news.takeovers, news.heard) == (50, (took,), 1)
    lost = m.Lost(client=7, shard=3, term=2, version=120, last=180, pushes=4)
    other = msgspec.structs.replace(lost, client=8, last=170, pushes=1)
    again = msgspec.structs.replace(asked, heard=1, lost=(lost, lost, other))
    assert coordinator.handle(50, again, 3.0).replies == []
    found = reply(coordinator.handle(51, m.GetStatus(), 3.0))
    assert found.lost == (m.Lost(shard=3, term=2, version=120, last=180, pushes=5),)


def test_what_the_job_went_on_from_and_who_has_come_since_outlive_a_coordinator() -> None:
    coordinator, kept = ready(), ClocksRestored(checkpoint="file:///x/000001-a", came=(1,))
    assert coordinator.handle(7, m.AttendCut(rank=1), 0.0).decisions == []
    coordinator.restore(decode(encode(kept)))
    asked = coordinator.handle(8, m.AttendCut(rank=0, here=False), 0.0)
    assert (reply(asked).restored, asked.decisions) == (kept.checkpoint, [])
    came = coordinator.handle(8, m.AttendCut(rank=0), 0.0)
    assert came.decisions == [msgspec.structs.replace(kept, came=(0, 1))]
    assert coordinator.handle(8, m.AttendCut(rank=0), 0.0).decisions == []
