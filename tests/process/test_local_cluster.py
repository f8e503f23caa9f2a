"""Clusters of real processes: start, refuse, stop, and leave nothing behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.errors import BadInput, Closed, Refused, ShoalError, Unavailable
from shoal.fleet.child import Child
from shoal.store.control import Address, ControlClient
from shoal.store.messages import GetStatus, StatusInfo

pytestmark = pytest.mark.process
SGD = shoal.optim.SGD(lr=1.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=2) as cluster:
        yield cluster


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def status(cluster: shoal.LocalCluster) -> StatusInfo:
    control = ControlClient(Address.parse(cluster.address), cluster.token)
    try:
        return control.ask(GetStatus(), StatusInfo, 10)
    finally:
        control.close()


def test_it_is_up_when_made(cluster: shoal.LocalCluster) -> None:
    assert [server.index for server in cluster.servers] == [0, 1]
    assert all(is_running(server.pid) and server.alive for server in cluster.servers)
    assert cluster.token_file.stat().st_mode & 0o777 == 0o600
    assert cluster.directory.stat().st_mode & 0o777 == 0o700
    assert "2 of 2 servers up" in repr(cluster)


def test_its_docstring_lists_its_attributes(cluster: shoal.LocalCluster) -> None:
    public = {name for name in vars(cluster) if not name.startswith("_")} | {"token_file"}
    listed = set(re.findall(r"`\.?(\w+)(?:\[i\])?`", shoal.LocalCluster.__doc__ or ""))
    assert public <= listed
    assert {"index", "pid", "address", "alive"} <= listed


def test_clients_train_and_see_each_other(cluster: shoal.LocalCluster) -> None:
    with cluster.connect() as one, cluster.connect() as other:
        table = one.table("shared", dim=3, optimizer=SGD)
        table.push(np.arange(1000), np.ones((1000, 3), np.float32))
        assert other.table("shared").pull([0, 999]).tolist() == [[-1] * 3] * 2
        assert len(other.table("shared")) == 1000


def test_a_mismatch_is_told_by_the_coordinator(cluster: shoal.LocalCluster) -> None:
    with cluster.connect() as client:
        client.table("fixed", dim=3, optimizer=SGD)
        with pytest.raises(shoal.Mismatch, match="dim is 3, asked for 4"):
            client.table("fixed", dim=4)
        with pytest.raises(shoal.UnknownTable, match="'fixed'"):
            client.table("fixt")


def test_the_first_value_of_a_tensor_stays(cluster: shoal.LocalCluster) -> None:
    value = np.arange(100_000, dtype=np.float32)
    with cluster.connect() as one, cluster.connect() as other:
        one.tensor("w", value, optimizer=SGD)
        assert np.array_equal(other.tensor("w", -value).pull(), value)


def test_a_name_that_is_used_again_fences_the_older_client(cluster: shoal.LocalCluster) -> None:
    with cluster.connect(name="worker-0") as old:
        table = old.table("fenced", dim=1, optimizer=SGD)
        said = r"^table 'fenced': client 'worker-0' was fenced: .* call shoal\.connect\(\) again"
        with cluster.connect(name="worker-0"):
            for call in (
                lambda: table.push([1], np.ones((1, 1), np.float32)),
                lambda: len(table),
                lambda: list(table.scan()),
                lambda: old.table("fenced"),
            ):
                with pytest.raises(shoal.Fenced, match=said):
                    call()
            with pytest.raises(shoal.Fenced, match="another process has its place"):
                old.rejoin()
        old.rejoin()  # its name is free again
        assert old.incarnation == 3
        table.push([1], np.ones((1, 1), np.float32))


def test_a_wrong_token_is_refused(cluster: shoal.LocalCluster) -> None:
    with pytest.raises(
        Refused, match=r"wrong token\. It is looked for in token=.*SHOAL_TOKEN.*SHOAL_TOKEN_FILE"
    ):
        shoal.connect(cluster.address, token="wrong")


def test_servers_and_coordinator_do_not_import_torch(cluster: shoal.LocalCluster) -> None:
    for pid in (cluster.pid, *(server.pid for server in cluster.servers)):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_two_listen_on_loopback_only(cluster: shoal.LocalCluster) -> None:
    assert all(server.address.startswith("127.0.0.1:") for server in cluster.servers)
    assert cluster.address.startswith("shoal://127.0.0.1:")


def test_closing_leaves_nothing_behind() -> None:
    cluster = shoal.LocalCluster(servers=2)
    pids = [cluster.pid, *(server.pid for server in cluster.servers)]
    cluster.close()
    cluster.close()
    assert not any(is_running(pid) for pid in pids)
    assert not cluster.directory.exists()
    assert "closed" in repr(cluster)
    with pytest.raises(Closed):
        cluster.connect()


def test_an_error_in_the_block_stops_all() -> None:
    with pytest.raises(KeyboardInterrupt), shoal.LocalCluster() as cluster:
        raise KeyboardInterrupt
    assert not is_running(cluster.pid)
    assert not is_running(cluster.servers[0].pid)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port} on 127.0.0.1 is in use"):
            shoal.LocalCluster(port=port)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 1}, "replicas is 1; allowed: a whole number from 0 to 0, one less than"),
        ({"servers": 2, "replicas": -1}, "replicas is -1"),
        ({"replication": "maybe"}, "replication is 'maybe'; allowed: 'strong', 'weak'"),
        ({"servers": 0}, "servers is 0"),
        ({"servers": "2"}, "servers is '2'; allowed: a whole number from 1 to 64"),
        ({"servers": None}, "servers is None"),
        ({"servers": 65}, "servers is 65; allowed: a whole number from 1 to 64"),
        ({"shards": 0}, "shards is 0"),
        ({"threads": -1}, "threads is -1"),
        ({"port": 70000}, "port is 70000"),
        ({"bind": None}, "address to listen on is None"),
        ({"directory": 5}, "cannot make a directory in 5"),
        ({"token": " "}, "token"),
        ({"bind": "0.0.0.0"}, "refusing to listen"),
        ({"bind": "0.0.0.0", "token": "short"}, "refusing to listen"),
        ({"bind": "192.0.2.77", "token": "x" * 40}, "cannot listen"),
    ],
)
def test_what_cannot_be_started_is_refused(options: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        shoal.LocalCluster(**options)


def test_a_process_that_cannot_start_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LOG", "nonsense")
    with pytest.raises(Unavailable, match=r"^the \w+ ?\d* ended with code 1 while starting: SHOAL_LOG is"):
        shoal.LocalCluster()


def test_a_process_that_breaks_is_shown_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\n  error: of another kind\n")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait()
        with pytest.raises(Unavailable, match="ended with code 3 while starting: Traceback"):
            Child("server 0", process, log, 0.0).check()


def test_a_killed_server_keeps_its_index_and_is_named() -> None:
    with shoal.LocalCluster(servers=2) as cluster:
        victim = cluster.servers[1]
        os.kill(victim.pid, signal.SIGKILL)
        assert wait_until(lambda: not victim.alive)
        assert wait_until(lambda: [s.state for s in status(cluster).servers] == ["up", "gone"])
        with pytest.raises(ShoalError, match=victim.address.split(":")[1]):
            cluster.connect(timeout=2)


@pytest.mark.soak
def test_ten_clusters_live_in_one_process() -> None:
    clusters = [shoal.LocalCluster() for _ in range(10)]
    try:
        assert len({cluster.address for cluster in clusters}) == 10
        for cluster in clusters:
            with cluster.connect() as client:
                assert client.table("t", dim=1, optimizer=SGD).pull([1]).shape == (1, 1)
    finally:
        for cluster in clusters:
            cluster.close()


def test_a_directory_of_ones_own_is_kept(tmp_path: Path) -> None:
    with shoal.LocalCluster(directory=tmp_path / "runs") as cluster:
        assert cluster.directory.parent == tmp_path / "runs"
    assert (cluster.directory / "journal.db").exists()


PARENT = """
import os, sys, time, shoal
cluster = shoal.LocalCluster(servers=2)
print(cluster.pid, *(server.pid for server in cluster.servers), cluster.directory, flush=True)
time.sleep(60)
"""


def test_processes_end_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        *pids, directory = parent.stdout.readline().split()
        parent.kill()
    try:
        assert wait_until(lambda: not any(is_running(int(pid)) for pid in pids))
    finally:
        shutil.rmtree(directory)


def test_servers_go_on_and_register_again_after_the_coordinator_was_killed(tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect(name="w") as client:
        table = client.table("t", dim=1, optimizer=SGD)
        first = cluster.pid
        os.kill(first, signal.SIGKILL)
        table.push([1], np.ones((1, 1), np.float32))
        assert wait_until(lambda: cluster.pid != first)
        assert wait_until(lambda: [s.state for s in status(cluster).servers] == ["up", "up"])
        assert client.table("t").pull([1]).tolist() == [[-1]]
        with cluster.connect() as other:
            assert other.table("t").pull([1]).tolist() == [[-1]]
            # A cut holds for the clients of its earlier life, too: they have found it by then.
            other.save(str(tmp_path), timeout=60)
            other.table("t").push([1], np.ones((1, 1), np.float32))
        client.load(str(tmp_path))
        assert client.table("t").pull([1]).tolist() == [[-1]]


def test_starting_takes_a_moment_only() -> None:
    began = time.monotonic()
    with shoal.LocalCluster():
        pass
    assert time.monotonic() - began < 15
