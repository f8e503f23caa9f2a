"""The coordinator dies in the middle of training: it is started again, and nothing is forgotten (G11)."""

import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until
from stopping import stop

import shoal
from shoal.fleet.child import Child, stands_still
from shoal.fleet.coordinator_keeper import CoordinatorKeeper
from shoal.store.control import Address, ControlClient
from shoal.store.messages import GetStatus, StatusInfo

pytestmark = pytest.mark.process
DYING = str(Path(__file__).with_name("dying_script.py"))
SAMPLES, BATCH, PASSES = 64, 8, 4  # of that script, where it holds
SGD = shoal.optim.SGD(lr=1.0)
KILLS_MAX = 4
ONES = -np.ones((64, 1), np.float32)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def status(cluster: shoal.LocalCluster) -> StatusInfo:
    with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
        return control.ask(GetStatus(), StatusInfo, DEADLINE_S)


def up(cluster: shoal.LocalCluster) -> bool:
    return [server.state for server in status(cluster).servers] == ["up"] * len(cluster.servers)


@contextmanager
def killed_now_and_then(cluster: shoal.LocalCluster, seed: int) -> Iterator[list[int]]:
    """The coordinator, at random moments, while the block runs; the pids that it had.

    Also while it starts; but not for ever, or on a busy machine it would never be there.
    """
    rng, enough, pids = random.Random(seed), threading.Event(), [cluster.pid]

    def kill() -> None:
        while len(pids) <= KILLS_MAX and not enough.wait(rng.uniform(0.1, 0.8)):
            os.kill(cluster.pid, signal.SIGKILL)
            wait_until(lambda: cluster.pid != pids[-1])
            pids.append(cluster.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield pids
    finally:
        enough.set()
        thread.join()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_whatever_is_done_while_it_dies_is_done_and_is_not_forgotten(seed: int, tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect(name="first") as client:
        ids = {}
        with killed_now_and_then(cluster, seed) as pids:
            pushes = 0
            while len(pids) < 3:
                with cluster.connect(name="other", timeout=DEADLINE_S) as other:
                    name = f"t{len(ids)}"
                    ids[name] = other.table(name, dim=1, optimizer=SGD)._entry.id
                    client.table(name).push(range(64), ONES)
                    pushes += 1
        assert len(set(ids.values())) == pushes
        wait_until(lambda: up(cluster))
        assert status(cluster).tables == pushes
        client.save(str(tmp_path), timeout=DEADLINE_S)
        with cluster.connect(name="first") as successor:  # a known name: the next incarnation
            assert {n: successor.table(n)._entry.id for n in ids} == ids
            assert all((successor.table(name).pull(range(64)) == 1).all() for name in ids)
            with pytest.raises(shoal.errors.Fenced):
                client.table("t0").push(range(64), ONES)


def check(out: Path, word: str, workers: int) -> None:
    for rank in range(workers):
        found = json.loads((out / f"{rank}.json").read_text())
        assert all("0" not in used for used in found["used"])
        assert min(found["rows"]) >= PASSES / BATCH
        if word == "bsp":
            assert sum(found["rows"]) == pytest.approx(found["rounds"])  # of three workers: thirds


def test_training_goes_on_while_it_is_killed_at_any_moment(jobs: Jobs, tmp_path: Path) -> None:
    with jobs.started("--servers", "2", DYING, str(tmp_path), "epochs", "hold:1") as process:
        wait_until((tmp_path / "hold-1").exists)
        first = jobs.record()["coordinator"]
        (tmp_path / "go-1").touch()
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(first, signal.SIGKILL)
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    assert f"coordinator (pid {first}) has ended and was started again" in errors
    check(tmp_path, "bsp", 2)
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["rows"] == [PASSES / BATCH] * SAMPLES
    assert found["rounds"] == PASSES * SAMPLES / BATCH


@pytest.mark.soak
@pytest.mark.parametrize("word", ["bsp", "asp", "ssp:1"])
def test_training_goes_on_and_all_verbs_work(jobs: Jobs, tmp_path: Path, word: str) -> None:
    place = f"file://{tmp_path}/checkpoints"
    sizes = ["--workers", "2", "--servers", "2", "--sync", word, "--checkpoint", place, "--every", "1s"]
    with jobs.started(*sizes, DYING, str(tmp_path), "epochs", "hold:1", "hold:2") as process:
        wait_until((tmp_path / "hold-1").exists)
        first = jobs.record()["coordinator"]
        os.kill(first, signal.SIGKILL)
        (tmp_path / "go-1").touch()
        wait_until((tmp_path / "hold-2").exists)
        wait_until(lambda: jobs.record()["coordinator"] != first)
        assert jobs.shoal("scale", "--workers", "3", "job").returncode == 0
        wait_until(lambda: len(jobs.record()["workers"]) == 3)
        os.kill(jobs.record()["coordinator"], signal.SIGKILL)  # while a worker joins
        os.kill(jobs.record()["workers"][1]["pid"], signal.SIGKILL)  # and one must be replaced
        (tmp_path / "go-2").touch()
        found = json.loads(jobs.shoal("status", "job", "--json").stdout)
        assert [p["role"] for p in found["processes"]].count("worker") == 3
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    assert errors.count("was started again") == 2
    assert list((tmp_path / "checkpoints").iterdir())
    check(tmp_path, word, 3)


@pytest.mark.soak
@pytest.mark.parametrize("again", range(6))
def test_a_coordinator_that_slept_gives_nobody_up(again: int) -> None:
    with shoal.LocalCluster(servers=2, replicas=1) as cluster, cluster.connect() as client:
        table = client.table("t", dim=1, optimizer=SGD)
        table.push(range(64), ONES)  # when the servers know their places
        os.kill(cluster.pid, signal.SIGSTOP)
        end = time.monotonic() + 4.0  # longer than a lease
        pushes = 1
        while time.monotonic() < end:
            table.push(range(64), ONES)
            pushes += 1
        os.kill(cluster.pid, signal.SIGCONT)
        wait_until(lambda: up(cluster))
        assert (table.pull(range(64)) == pushes).all()


def refuses(control: ControlClient) -> bool:
    try:
        control.ask(GetStatus(), StatusInfo, 1.0, patience_s=0.0)
    except shoal.errors.Timeout:
        return False
    except shoal.errors.Unavailable as error:
        return "Connection refused" in str(error)
    return False


@pytest.mark.soak
def test_a_coordinator_that_cannot_start_again_is_given_up_and_its_address_refuses() -> None:
    with shoal.LocalCluster() as cluster, cluster.connect() as client:
        table = client.table("t", dim=1, optimizer=SGD)
        journal = cluster.directory / "journal.db"
        for path in cluster.directory.glob("journal.db*"):
            path.unlink()
        journal.write_bytes(b"no journal" * 100)
        os.kill(cluster.pid, signal.SIGKILL)
        with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
            wait_until(lambda: refuses(control))
        table.push(range(64), ONES)
        assert (table.pull(range(64)) == 1).all()


@pytest.mark.soak
def test_a_server_that_dies_while_it_is_away_is_missed_when_it_is_back() -> None:
    with (
        shoal.LocalCluster(servers=2, replicas=1, watch=False) as cluster,
        cluster.connect(lane="tcp") as client,
    ):
        table = client.table("t", dim=1, optimizer=SGD)
        table.push(range(64), ONES)
        for pid in (cluster.pid, cluster.servers[0].pid):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(shoal.errors.Timeout, match=f"{cluster.address} does not answer either") as late:
            table.push(range(64), ONES, timeout=1.5)
        cluster.look_after_coordinators()
        assert late.value.ticket is not None
        late.value.ticket.wait(timeout=DEADLINE_S)
        assert (table.pull(range(64)) == 2).all()
        assert [server.state for server in status(cluster).servers] == ["evicted", "up"]


@pytest.mark.soak
def test_who_comes_while_it_is_away_waits_for_it_until_the_deadline() -> None:
    with shoal.LocalCluster(watch=False) as cluster:
        os.kill(cluster.pid, signal.SIGKILL)
        said = f"the coordinator at {cluster.address} did not answer JoinCluster within 0.5 s"
        with pytest.raises(shoal.errors.Timeout, match=said):
            shoal.connect(cluster.address, token=cluster.token, timeout=0.5)
        cluster.look_after_coordinators()
        with shoal.connect(cluster.address, token=cluster.token) as client:
            client.table("t", dim=1, optimizer=SGD)


def killed_and_started_again(errors: str, pid: int) -> bool:
    """In that order, as the job says it."""
    said = [f"coordinator (pid {pid}) {how}" for how in ("stood still and was killed", "has ended and was")]
    return -1 < errors.find(said[0]) < errors.find(said[1])


def test_a_worker_that_dies_when_it_was_stopped_for_good_is_replaced(jobs: Jobs, tmp_path: Path) -> None:
    with jobs.started("--servers", "2", DYING, str(tmp_path), "epochs", "hold:1") as process:
        wait_until((tmp_path / "hold-1").exists)
        first = jobs.record()["coordinator"]
        stop(first)
        os.kill(jobs.record()["workers"][1]["pid"], signal.SIGKILL)
        (tmp_path / "go-1").touch()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    assert killed_and_started_again(errors, first)
    assert any("stood still and was killed" in event["text"] for event in jobs.record()["events"])
    check(tmp_path, "bsp", 2)


@pytest.mark.soak
def test_a_server_that_dies_when_it_was_stopped_for_good_is_replaced(jobs: Jobs, tmp_path: Path) -> None:
    sizes = ["--servers", "2", "--replicas", "1"]
    with jobs.started(*sizes, DYING, str(tmp_path), "epochs", "hold:1") as process:
        wait_until((tmp_path / "hold-1").exists)
        first = jobs.record()["coordinator"]
        stop(first)
        os.kill(jobs.record()["servers"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: "does not answer: it is told later" in str(jobs.record()["events"]))
        (tmp_path / "go-1").touch()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    assert killed_and_started_again(errors, first)
    assert "the copies of its rows go on, and server 2 takes its place" in errors
    check(tmp_path, "bsp", 2)


def test_who_comes_when_it_was_stopped_for_good_can_connect() -> None:
    with shoal.LocalCluster() as cluster:
        first = cluster.pid
        stop(first)
        with cluster.connect(timeout=DEADLINE_S) as client:
            client.table("t", dim=1, optimizer=SGD).push(range(64), ONES)
        assert cluster.pid != first


@contextmanager
def kept(directory: Path) -> Iterator[CoordinatorKeeper]:
    """A process that does nothing, as if it were a coordinator."""

    def start(index: int, descriptor: int) -> Child:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # until its parent lets go of it
        return Child("coordinator", process, directory / "log", time.monotonic())

    with socket.socket() as listener, closing(CoordinatorKeeper(start, [listener])) as keeper:
        yield keeper


def test_one_that_stands_still_is_killed_after_five_seconds(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        (first,) = keeper.pids
        stop(first)
        assert not any(keeper.kill_still(now / 10) for now in range(0, 50, 3))
        assert keeper.kill_still(5.0) == []
        assert keeper.kill_still(6.1) == [first]
        assert keeper.children[0].process.wait(DEADLINE_S) == -signal.SIGKILL
        assert keeper.look() == [0]
        assert not any(keeper.kill_still(now) for now in range(7, 30))


def test_one_that_goes_on_in_time_is_not_killed(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        (first,) = keeper.pids
        for now in range(0, 30, 5):
            stop(first)
            assert not any(keeper.kill_still(now + more) for more in range(4))
            os.kill(first, signal.SIGCONT)
            wait_until(lambda: not stands_still(first))
            assert keeper.kill_still(now + 4) == []


def test_who_slept_itself_kills_nobody_when_it_wakes(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        (first,) = keeper.pids
        stop(first)
        assert not any(keeper.kill_still(now) for now in range(5))
        assert not any(keeper.kill_still(now) for now in range(3600, 3605))
        assert keeper.kill_still(3605) == [first]
