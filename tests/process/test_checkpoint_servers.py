"""Checkpoints of real servers: other numbers of servers, one instant while clients push, kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.checkpoint.manifest import find
from shoal.checkpoint.place import Place
from shoal.collective.group import Lone
from shoal.errors import BadInput, Mismatch, Refused, Unavailable
from shoal.sync.words import as_policy
from shoal.train.worker import Worker

pytestmark = pytest.mark.process

ADAGRAD = shoal.optim.Adagrad(lr=0.1)


def rows_of(client: shoal.Client, name: str = "items") -> dict[int, bytes]:
    return {
        int(key): value.tobytes()
        for keys, values in client.table(name).scan()
        for key, value in zip(keys, values, strict=True)
    }


def test_saved_by_two_servers_loaded_by_three_and_by_none(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        items = client.table("items", dim=8, optimizer=ADAGRAD, init=shoal.init.Uniform(0.1))
        items.push(np.arange(5000), np.ones((5000, 8), np.float32))
        client.tensor("w", np.ones(200_000, np.float32), optimizer=ADAGRAD).push(np.ones(200_000, np.float32))
        name = client.save(url)
        saved, tensor = rows_of(client), client.tensor("w").pull()
        assert len(list((tmp_path / name).glob("part-*.safetensors"))) == 2
        with pytest.raises(BadInput, match="servers are other processes"):
            client.save("memory://x")
        # The store goes on as before, and can be brought back.
        items.push(np.arange(10), np.ones((10, 8), np.float32))
        assert client.load(url) == name
        assert rows_of(client) == saved
    with shoal.LocalCluster(servers=3) as cluster, cluster.connect() as client:
        assert client.load(url) == name
        assert rows_of(client) == saved
        np.testing.assert_array_equal(client.tensor("w").pull(), tensor)
        client.table("items").push(np.arange(10), np.ones((10, 8), np.float32))  # heard, not taken for old
        assert rows_of(client) != saved
        client.table("more", dim=1, optimizer=ADAGRAD)
        with pytest.raises(Mismatch, match="table 'more' is not in the checkpoint"):
            client.load(url)
    with shoal.connect("memory://") as client:
        client.load(url)
        assert rows_of(client) == saved


def test_a_damaged_part_is_refused_before_any_row_changes(tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        items = client.table("items", dim=8, optimizer=ADAGRAD)
        items.push(np.arange(500), np.ones((500, 8), np.float32))
        name = client.save(str(tmp_path))
        items.push(np.arange(500), np.ones((500, 8), np.float32))
        before = rows_of(client)
        path = tmp_path / name / "part-1-0.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(Refused, match=r"server 1: checkpoint file .*part-1-0.* is damaged"):
            client.load(str(tmp_path / name))
        assert rows_of(client) == before


def test_what_a_server_cannot_read_now_is_not_taken_for_damage(tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        items = client.table("items", dim=8, optimizer=ADAGRAD)
        items.push(np.arange(500), np.ones((500, 8), np.float32))
        _, name = client.save(str(tmp_path)), client.save(str(tmp_path))
        path = tmp_path / name / "part-1-0.safetensors"
        path.unlink()
        path.symlink_to(tmp_path / "not mounted")
        with pytest.raises(Unavailable, match=r"server 1: cannot read .*part-1-0.safetensors: No such file"):
            client.load(str(tmp_path))


COUNTING = """
import sys, numpy as np, shoal
client = shoal.connect()
table = client.table("counts", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
keys = np.arange(200) + 1000 * int(sys.argv[1])
print("ready", flush=True)
while True:
    tickets = [table.push_async(keys, np.full((200, 1), -1.0, np.float32)) for _ in range(8)]
    for ticket in tickets:
        ticket.wait()
"""


def test_one_instant_over_all_shards_while_clients_push(tmp_path: Path) -> None:
    """Rows of one client are counters in many shards of two servers: a checkpoint has a prefix of its pushes,
    the same everywhere; and what comes later has no less."""
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        client.table("counts", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        environment = {**os.environ, "SHOAL_ADDRESS": cluster.address, "SHOAL_TOKEN": cluster.token}
        pushing = [
            subprocess.Popen(
                [sys.executable, "-c", COUNTING, str(i)],
                env=environment,
                stdout=subprocess.PIPE,
            )
            for i in range(2)
        ]
        try:
            for process in pushing:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            names = [client.save(str(tmp_path), timeout=60) for _ in range(6)]
            assert [process.poll() for process in pushing] == [None, None]
        finally:
            for process in pushing:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
    before = np.zeros(2)
    for name in names:
        with shoal.connect("memory://") as other:
            other.load(str(tmp_path / name))
            rows = np.stack([other.table("counts").pull(np.arange(200) + 1000 * i)[:, 0] for i in range(2)])
        assert (rows == rows[:, :1]).all(), name
        assert (rows[:, 0] >= before).all()
        before = rows[:, 0]
    assert (before > 0).all()


def test_a_stopped_client_delays_a_cut_until_its_lease_is_over(tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=1) as cluster, cluster.connect() as client:
        client.table("counts", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        environment = {**os.environ, "SHOAL_ADDRESS": cluster.address, "SHOAL_TOKEN": cluster.token}
        process = subprocess.Popen(
            [sys.executable, "-c", COUNTING, "0"], env=environment, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # or it may still hold its pushes
            began = time.monotonic()
            client.save(str(tmp_path), timeout=60)
            assert time.monotonic() - began > 1.0
            process.send_signal(signal.SIGCONT)
            client.save(str(tmp_path), timeout=60)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_server_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        items = client.table("items", dim=64, optimizer=ADAGRAD)
        keys = np.arange(200_000)
        items.push(keys, np.ones((len(keys), 64), np.float32))
        first = client.save(str(tmp_path))
        saver = subprocess.Popen(
            [sys.executable, "-c", f"import shoal; shoal.connect().save({str(tmp_path)!r})"],
            env={**os.environ, "SHOAL_ADDRESS": cluster.address, "SHOAL_TOKEN": cluster.token},
            stderr=subprocess.PIPE,
        )
        end = time.monotonic() + 30
        while len(list(tmp_path.glob("*/.part-*"))) == 0:  # a file is half written
            assert time.monotonic() < end
            assert saver.poll() is None
        os.kill(cluster.servers[1].pid, signal.SIGKILL)
        _, said = saver.communicate(timeout=60)
        assert b"server 1 has gone while a checkpoint was made of it" in said
    with shoal.connect("memory://") as other:
        assert other.load(str(tmp_path)) == first
        assert len(other.table("items")) == len(keys)


def test_a_cut_behind_a_pass_does_not_wait_for_the_next_step(tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        worker = Worker(client, as_policy("easgd:2"), rank=0, world_size=1, group=Lone())
        model = torch.nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=2)
        model, optimizer, batches = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for (x,) in batches:
            model(x).mean().backward()
            optimizer.step()
        name = worker.save(str(tmp_path))  # what is left of the pass was handed in, behind its last step
        worker.close()
    (state,) = find(Place(str(tmp_path)), name).workers
    assert (state.rank, state.clock, state.why) == (0, 4, "")


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    with shoal.connect("memory://") as client:
        client.table("items", dim=4, optimizer=ADAGRAD)
        name = client.save(str(tmp_path))
    text = (tmp_path / name / "manifest.json").read_text()
    assert json.loads(text.partition("\n")[2])["tables"][0]["optimizer"]["kind"] == "adagrad"
