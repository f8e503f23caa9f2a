"""Several coordinators and a real etcd: any of them may die, and nothing is lost (G11)."""

import json
import os
import random
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from etcd_members import EtcdMembers, free_ports
from run_jobs import DEADLINE_S, Jobs, wait_until

import shoal
from shoal.fleet.decisions import ClientGranted
from shoal.fleet.etcd_journal import Etcd, EtcdJournal, forget, revoke, take_over
from shoal.fleet.journal import JournalLost
from shoal.store.control import Address, ControlClient
from shoal.store.messages import GetStatus, StatusInfo

pytestmark = pytest.mark.process
DYING = str(Path(__file__).with_name("dying_script.py"))
SGD = shoal.optim.SGD(lr=1.0)
KEYS = np.arange(64)
ONES = -np.ones((64, 1), np.float32)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMembers]:
    with closing(EtcdMembers(tmp_path_factory.mktemp("etcd"))) as members:
        yield members


class Pusher(threading.Thread):
    """Pushes ones until told to stop."""

    def __init__(self, cluster: shoal.LocalCluster) -> None:
        super().__init__()
        self.client = cluster.connect(timeout=DEADLINE_S)
        self.control = ControlClient(Address.parse(cluster.address), cluster.token)
        self.table = self.client.table("counters", dim=1, optimizer=SGD)
        self.pushes = 0
        self.enough = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.enough.wait(0.005):
            self.table.push(KEYS, ONES)
            self.pushes += 1

    def status(self) -> StatusInfo:
        return self.control.ask(GetStatus(), StatusInfo, DEADLINE_S)

    def leader(self) -> int:
        return self.status().pid

    def all_up(self) -> bool:
        return all(server.state == "up" for server in self.status().servers)

    def check(self) -> None:
        self.enough.set()
        self.join()
        assert (self.table.pull(KEYS) == self.pushes).all()
        self.client.close()
        self.control.close()


def a_cut_is_one_instant(client: shoal.Client, pusher: Pusher, place: Path) -> None:
    client.save(str(place), timeout=DEADLINE_S)
    pusher.check()
    client.load(str(place))
    rows = client.table("counters").pull(KEYS)
    assert 0 < rows[0] <= pusher.pushes
    assert (rows == rows[0]).all()


def test_without_an_etcd_there_is_one_coordinator() -> None:
    with pytest.raises(shoal.errors.BadInput, match="coordinators is 3, and several need an etcd to agree"):
        shoal.LocalCluster(coordinators=3)
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(shoal.errors.BadInput, match=f"no etcd answers at {url}: .*Connection refused"):
        shoal.LocalCluster(coordinators=3, etcd=url)
    with pytest.raises(shoal.errors.BadInput, match="etcd is 'localhost:2379'; allowed: 'http://host:2379'"):
        shoal.LocalCluster(etcd="localhost:2379")


def client(name: str | None, number: int) -> ClientGranted:
    return ClientGranted(name=name, client_id=number, incarnation=1)


def test_one_coordinator_at_a_time_writes_the_journal_and_the_next_reads_it(etcd: EtcdMembers) -> None:
    members, name = Etcd(etcd.urls), secrets.token_hex(4)
    first = take_over(members, name, "shoal://a:1")
    assert isinstance(first, EtcdJournal)
    assert take_over(members, name, "shoal://b:2") == "shoal://a:1"
    many = [client(f"w{number}", number) for number in range(700)]
    first.append([client(None, 1), *many, client(None, 2)])
    first.append([client("w3", 9)])
    revoke(members, first.lease)  # as if it had ended
    second = take_over(members, name, "shoal://b:2")
    assert isinstance(second, EtcdJournal)
    assert first.holds  # by its own clock, and yet:
    with pytest.raises(JournalLost, match="another coordinator leads"):
        first.append([client("w4", 9)])
    expected = [*many[:3], *many[4:], client(None, 2), client("w3", 9)]
    assert list(second) == expected
    second.append([client("w5", 9)])
    assert list(second) == [*(one for one in expected if one.name != "w5"), client("w5", 9)]
    again = take_over(members, name, "shoal://b:2")  # an earlier life of oneself needs no waiting
    assert isinstance(again, EtcdJournal)
    forget(members, name)
    assert list(again) == []


def test_the_leaders_of_both_may_die_together_and_nothing_is_lost(etcd: EtcdMembers, tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2, coordinators=3, etcd=etcd.urls, watch=False) as cluster:
        pusher = Pusher(cluster)
        before = pusher.client.table("before", dim=1, optimizer=SGD)
        first, died = pusher.leader(), etcd.leader()
        assert died is not None
        os.kill(first, signal.SIGKILL)
        etcd.kill(died)
        after = pusher.client.table("after", dim=1, optimizer=SGD)  # waits for whoever leads next
        assert pusher.leader() != first
        etcd.start_again(died)
        wait_until(pusher.all_up)
        with shoal.connect(cluster.address, token=cluster.token) as other:
            for table in (before, after):
                assert other.table(table.name)._entry == table._entry
        pusher.check()


@pytest.mark.soak
def test_a_leader_that_sleeps_is_deposed_and_decides_nothing_when_it_wakes(
    etcd: EtcdMembers, tmp_path: Path
) -> None:
    # Nobody kills it for standing still.
    with shoal.LocalCluster(servers=2, coordinators=3, etcd=etcd.urls, watch=False) as cluster:
        pusher = Pusher(cluster)
        first = pusher.leader()
        asleep = ControlClient(Address.parse(cluster.address), cluster.token)
        assert asleep.ask(GetStatus(), StatusInfo, DEADLINE_S).pid == first
        os.kill(first, signal.SIGSTOP)
        try:
            wait_until(lambda: pusher.leader() != first)
            wait_until(pusher.all_up)
        finally:
            os.kill(first, signal.SIGCONT)
        second = pusher.leader()
        assert asleep.ask(GetStatus(), StatusInfo, DEADLINE_S).pid == second != first
        asleep.close()
        # The pulses have moved, too: a cut holds for who pushes.
        with cluster.connect(timeout=DEADLINE_S) as other:
            a_cut_is_one_instant(other, pusher, tmp_path)


@pytest.mark.soak
def test_without_most_of_etcd_nobody_leads_and_training_goes_on(etcd: EtcdMembers) -> None:
    with shoal.LocalCluster(servers=2, coordinators=3, etcd=etcd.urls) as cluster:
        pusher = Pusher(cluster)
        for member in (0, 1):
            etcd.kill(member)
        with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
            wait_until(lambda: nobody_leads(control))
        before = pusher.pushes
        wait_until(lambda: pusher.pushes > before + 20)
        for member in (0, 1):
            etcd.start_again(member)
        pusher.client.table("later", dim=1, optimizer=SGD)
        wait_until(pusher.all_up)
        pusher.check()


def nobody_leads(control: ControlClient) -> bool:
    try:
        control.ask(GetStatus(), StatusInfo, 1.0)
    except shoal.errors.Unavailable as error:
        return "nobody leads" in str(error)
    except shoal.errors.Timeout:
        return False
    return False


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_coordinators_and_members_of_etcd_die_at_any_moment(
    etcd: EtcdMembers, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    with shoal.LocalCluster(servers=2, coordinators=3, etcd=etcd.urls) as cluster:
        pusher = Pusher(cluster)
        tables = []
        for number in range(6):
            died = rng.randrange(3)
            etcd.kill(died)
            os.kill(rng.choice([pusher.leader(), *cluster.coordinator_pids]), signal.SIGKILL)
            tables.append(pusher.client.table(f"t{number}", dim=1, optimizer=SGD))
            pusher.enough.wait(rng.random())
            etcd.start_again(died)
            etcd.wait_until_healthy()
        wait_until(pusher.all_up)
        with cluster.connect(timeout=DEADLINE_S) as other:
            assert [other.table(table.name)._entry for table in tables] == [t._entry for t in tables]
            assert len({table._entry.id for table in tables}) == len(tables)
            a_cut_is_one_instant(other, pusher, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("word", ["bsp", "asp"])
def test_a_job_goes_on_with_another_leader(etcd: EtcdMembers, tmp_path: Path, word: str) -> None:
    jobs = Jobs(tmp_path / "state")
    sizes = ["--servers", "2", "--sync", word, "--coordinators", "3", "--etcd", etcd.urls]
    with jobs.started(*sizes, DYING, str(tmp_path), "epochs", "hold:1", "hold:2") as process:
        wait_until((tmp_path / "hold-1").exists)
        shown = json.loads(jobs.shoal("status", "job", "--json").stdout)
        states = {p["pid"]: p["state"] for p in shown["processes"] if p["role"] == "coordinator"}
        assert sorted(states.values()) == ["standby", "standby", "up"]
        died = etcd.leader()
        assert died is not None
        etcd.kill(died)
        os.kill(next(pid for pid, state in states.items() if state == "up"), signal.SIGKILL)
        (tmp_path / "go-1").touch()
        wait_until((tmp_path / "hold-2").exists)
        assert jobs.shoal("scale", "--workers", "3", "job").returncode == 0
        (tmp_path / "go-2").touch()
        wait_until(lambda: len(jobs.record()["workers"]) == 3)
        output, errors = process.communicate(timeout=DEADLINE_S)
    etcd.start_again(died)
    assert process.returncode == 0, output + errors
    found = json.loads((tmp_path / "0.json").read_text())
    assert all("0" not in used for used in found["used"])
    if word == "bsp":
        assert sum(found["rows"]) == pytest.approx(found["rounds"])  # thirds, since the scaling


@pytest.mark.soak
def test_a_server_of_a_job_dies_while_nobody_leads(etcd: EtcdMembers, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "state")
    sizes = ["--servers", "2", "--replicas", "1", "--coordinators", "3", "--etcd", etcd.urls]
    with jobs.started(*sizes, DYING, str(tmp_path), "epochs", "hold:1") as process:
        wait_until((tmp_path / "hold-1").exists)
        shown = json.loads(jobs.shoal("status", "job", "--json").stdout)
        (leader,) = [p["pid"] for p in shown["processes"] if (p["role"], p["state"]) == ("coordinator", "up")]
        os.kill(leader, signal.SIGSTOP)
        try:
            os.kill(jobs.record()["servers"][1]["pid"], signal.SIGKILL)
            (tmp_path / "go-1").touch()
            output, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):  # it ends with the job
                os.kill(leader, signal.SIGCONT)
    assert process.returncode == 0, output + errors
    assert "the coordinator does not answer: it is told later" in errors
    assert "the copies of its rows go on, and server 2 takes its place" in errors
    assert all("0" not in used for used in json.loads((tmp_path / "0.json").read_text())["used"])
