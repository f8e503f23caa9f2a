"""How things end: clients that close, are killed or are too many, and memory that does.

A server must go on whatever a client does last, and keep nothing of one that said goodbye.
"""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import _core

pytestmark = pytest.mark.process
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "") or "tsan" in os.environ.get("LD_PRELOAD", "")
SGD = shoal.optim.SGD(lr=1.0)
TOKEN = b"the token of these tests"
MIB = 1 << 20


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def segments(pid: int) -> int:
    """How many shared segments a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:shoal")


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster() as cluster:
        yield cluster


@pytest.fixture
def server(tmp_path) -> Iterator[_core.Server]:
    """One in this process, which takes two connections at most."""
    server = _core.Server(
        host="127.0.0.1",
        port=0,
        unix_path=str(tmp_path / "socket"),
        token=TOKEN,
        shards=4,
        threads=2,
        frame_bytes_max=1 << 30,
        connections_max=2,
    )
    yield server
    server.stop()


def connect(server: _core.Server, tmp_path, client_id: int, shm_bytes_max: int = 1 << 30) -> _core.Client:
    address = _core.ServerAddress(0, "127.0.0.1", server.port, str(tmp_path / "socket"))
    return _core.Client.connect(
        client_id=client_id,
        incarnation=1,
        token=TOKEN,
        placement=_core.Placement(version=0, weak=False, servers=[address], terms=[1] * 4, chains=[[0]] * 4),
        lane="shm",
        timeout_s=5,
        shm_bytes_max=shm_bytes_max,
    )


def table_spec(dim: int) -> _core.TableSpec:
    spec = _core.TableSpec()
    spec.id, spec.name, spec.dim = 1, "table", dim
    spec.optimizer = _core.OptimizerSpec("sgd")
    spec.init = _core.InitSpec("zeros")
    return spec


def test_a_client_that_closes_leaves_nothing_mapped(cluster: shoal.LocalCluster) -> None:
    with cluster.connect(lane="shm") as client:
        table = client.table("closes", dim=4, optimizer=SGD)
        table.push([1], np.ones((1, 4), np.float32))
        assert segments(cluster.servers[0].pid) > 0
    assert wait_until(lambda: segments(cluster.servers[0].pid) == 0)


def test_a_closed_client_is_no_open_connection(server: _core.Server, tmp_path) -> None:
    client = connect(server, tmp_path, 1)
    assert server.counters()["connections_open"] == 1
    client.close()
    assert wait_until(lambda: server.counters()["connections_open"] == 0)


@pytest.mark.parametrize("lane", ["shm", "unix", "tcp"])
def test_a_killed_client_harms_nobody(cluster: shoal.LocalCluster, lane: str) -> None:
    script = (
        "import numpy, shoal, sys\n"
        "client = shoal.connect(sys.argv[1], token=sys.argv[2], lane=sys.argv[3])\n"
        "table = client.table('killed' + sys.argv[3], dim=64, optimizer=shoal.optim.SGD(lr=1.0))\n"
        "keys = numpy.arange(50_000)\n"
        "while True:\n"
        "    table.push(keys, numpy.ones((50_000, 64), numpy.float32)); print('pushed', flush=True)\n"
    )
    command = [sys.executable, "-c", script, cluster.address, cluster.token, lane]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"pushed\n"
        process.send_signal(signal.SIGKILL)
    assert wait_until(lambda: segments(cluster.servers[0].pid) == 0)
    with cluster.connect() as client:
        rows = client.table("killed" + lane).pull(np.arange(50_000))
        assert rows.max() <= -1.0  # the push that was acknowledged
        assert (rows == rows[:, :1]).all()  # and of no push half a row


def test_a_server_takes_so_many_connections_and_no_more(server: _core.Server, tmp_path, capfd) -> None:
    clients = [connect(server, tmp_path, 1), connect(server, tmp_path, 2)]
    refused = server.counters()["refused"]
    with pytest.raises(_core.CoreError, match=r"server 0.*it takes 2 connections"):
        connect(server, tmp_path, 3)
    assert server.counters()["refused"] == refused + 1
    assert "connection refused: 2 are open" in capfd.readouterr().err
    clients.pop().close()
    assert wait_until(lambda: server.counters()["connections_open"] == 1)
    connect(server, tmp_path, 3).close()
    clients.pop().close()


def test_segments_that_a_client_let_go_of_are_unmapped_at_the_server(server: _core.Server, tmp_path) -> None:
    gc.collect()  # of clients that earlier tests left open
    before = segments(os.getpid())
    client = connect(server, tmp_path, 1, shm_bytes_max=200 * MIB)
    client.declare(table_spec(1024), 5)
    held = [client.pull(1, np.arange(15 * 1024), timeout_s=20).wait(20) for _ in range(3)]  # 60 MiB each
    assert segments(os.getpid()) == before + 3 * 2  # the server is in this process: each is mapped twice
    del held
    client.pull(1, np.arange(45 * 1024), timeout_s=20).wait(20)  # 180 MiB fit only without the others
    assert wait_until(
        lambda: segments(os.getpid()) == before + 2 * 2
    )  # the rows' and, for want of room, the keys'
    client.close()


@pytest.mark.skipif(SANITIZED, reason="a sanitizer needs more address space than any limit leaves")
@pytest.mark.parametrize("shards", [1, 8])
def test_a_push_that_runs_out_of_memory_is_whole_on_each_shard(shards: int) -> None:
    script = (
        f"shards = {shards}\n"
        "import numpy as np, re, resource\n"
        "from shoal import _core\n"
        "client = _core.Client.embedded(shards=shards, threads=2)\n"
        "for number in (1, 2):\n"
        "    spec = _core.TableSpec(); spec.id = number; spec.name = str(number); spec.dim = 64\n"
        "    spec.optimizer = _core.OptimizerSpec('sgd'); spec.init = _core.InitSpec('zeros')\n"
        "    client.declare(spec, 5)\n"
        "many, few = np.arange(100_000), np.arange(1000)\n"
        "ones = np.ones((100_000, 64), np.float32)\n"
        "client.push(1, many, ones, lr=1.0, timeout_s=20).wait(20)\n"  # the client's own memory is warm now
        "client.push(2, few, ones[:1000], lr=1.0, timeout_s=20).wait(20)\n"
        "before = client.pull(2, few, timeout_s=20).wait(20).copy()\n"
        "size = int(re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "limits = resource.getrlimit(resource.RLIMIT_AS)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), limits[1]))\n"
        "try:\n"
        "    client.push(2, many, ones, lr=1.0, timeout_s=20).wait(20); failed = ''\n"
        "except (_core.CoreError, MemoryError) as error:\n"
        "    failed = str(error)\n"
        "resource.setrlimit(resource.RLIMIT_AS, limits)\n"
        "assert 'shard 0 is out of memory' in failed if shards == 1 else failed, failed\n"
        "after = client.pull(2, few, timeout_s=20).wait(20).copy()\n"
        "of = _core.protocol.key_shards(few, shards)\n"
        "for shard in range(shards):\n"
        "    stepped = before[of == shard] - after[of == shard]\n"
        "    assert (stepped == 0).all() or (stepped == 1).all(), shard\n"
        "    assert shards > 1 or (stepped == 0).all()\n"
        "client.push(2, many, ones, lr=1.0, timeout_s=20).wait(20)\n"  # and it goes on
        "assert (client.pull(2, few, timeout_s=20).wait(20) == after - 1).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lane", ["unix", "tcp"])
@pytest.mark.parametrize(("wire", "value"), [("fp16", 1e5), ("bf16", 3.4e38)])
def test_a_stored_value_that_a_wire_cannot_carry_is_not_read_as_infinity(
    cluster: shoal.LocalCluster, lane: str, wire: str, value: float
) -> None:
    name = f"large {lane} {wire}"
    with cluster.connect(lane=lane) as client:
        client.table(name, dim=2, optimizer=SGD).assign([7, 8], np.array([[1, 2], [value, 3]], np.float32))
        client.tensor("tensor " + name, np.full(3, value, np.float32), optimizer=SGD)
        narrow = client.table(name, wire=wire)
        with pytest.raises(shoal.errors.BadInput, match=r"key 8 .*cannot carry; pull it with wire='fp32'"):
            narrow.pull([7, 8])
        assert narrow.pull([7]).tolist() == [[1, 2]]
        with pytest.raises(shoal.errors.BadInput, match=r"piece 0 .*cannot carry"):
            client.tensor("tensor " + name, wire=wire).pull()
        assert client.table(name, wire="fp32").pull([8])[0, 0] == np.float32(value)
