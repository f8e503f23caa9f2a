"""Exactly once when processes die: killed clients, killed servers, forks, many processes at once."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from exactness_world import LANES, SGD, join, stopped, within

import shoal
from shoal import _core

pytestmark = pytest.mark.process

SERVERS = 2
CLIENTS, LIVES, PUSHES = 2, 4, 30  # pushes of a life
KEYS = 40
SCRIPT = Path(__file__).with_name("pushing_client.py")
DEADLINE_S = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=SERVERS) as cluster:
        yield cluster


@dataclass
class Told:
    """What a client said before it died, over all its lives."""

    begun: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)

    def hear(self, line: str) -> None:
        word, number = line.split()
        {"begun": self.begun, "acked": self.acked}[word].add(int(number))


def live(cluster: shoal.LocalCluster, name: str, lane: str, first: int, kill_at: int | None) -> list[str]:
    """One life of a client: what it said until it was killed at its push `kill_at`, or came to its end."""
    options = ["--address", cluster.address, "--name", name, "--lane", lane, "--keys", str(KEYS)]
    options += ["--first", str(first), "--end", str(first + PUSHES)]
    options += [] if kill_at is None else ["--linger"]
    said = []
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "SHOAL_TOKEN": cluster.token, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line == f"begun {kill_at}\n":
                process.kill()
        assert process.wait(DEADLINE_S) == (0 if kill_at is None else -signal.SIGKILL)
    return said


def all_lives(cluster: shoal.LocalCluster, name: str, lane: str, seed: int) -> Told:
    """A client that is killed again and again in the middle of its pushes; the last life is a long one."""
    rng = random.Random(f"{name} {seed}")
    told = Told()
    for number in range(LIVES):
        first = number * PUSHES
        kill_at = None if number == LIVES - 1 else rng.randrange(first, first + PUSHES)
        for line in live(cluster, name, lane, first, kill_at):
            told.hear(line)
    return told


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_clients_leave_whole_pushes_or_none(cluster: shoal.LocalCluster, lane: str, seed: int) -> None:
    names = [f"killed-{lane}-{seed}-{number}" for number in range(CLIENTS)]
    shards = len(join(cluster, "reader").placement.terms)
    with cluster.connect() as client, ThreadPoolExecutor(CLIENTS) as threads:
        tables = [client.table(name, dim=LIVES * PUSHES, optimizer=SGD) for name in names]
        jobs = [threads.submit(all_lives, cluster, name, lane, seed) for name in names]
        for table, job in zip(tables, jobs, strict=True):
            told = job.result(DEADLINE_S)
            judge(table.pull(np.arange(KEYS)), told, shards)


def judge(rows: np.ndarray, told: Told, shards: int) -> None:
    """Acknowledged: once on every key. Begun: whole or not at all in each shard. Else: nothing."""
    assert told.acked < told.begun, "nobody was killed in the middle"
    shard_of_key = _core.protocol.key_shards(np.arange(KEYS), shards)
    for number in range(rows.shape[1]):
        column = rows[:, number]
        if number in told.acked:
            assert (column == 1).all(), f"acknowledged push {number}"
        elif number in told.begun:
            assert set(column.tolist()) <= {0.0, 1.0}
            halves = [s for s in set(shard_of_key.tolist()) if len(set(column[shard_of_key == s])) > 1]
            assert halves == [], f"push {number} is torn"
        else:
            assert not column.any(), f"push {number} was never begun"


@pytest.mark.parametrize("lane", LANES)
def test_processes_lose_nothing_on_the_same_rows(cluster: shoal.LocalCluster, lane: str) -> None:
    code = (
        "import sys, numpy as np, shoal\n"
        "with shoal.connect(sys.argv[1], lane=sys.argv[2]) as client:\n"
        "    table = client.table(sys.argv[3])\n"
        "    for _ in range(100): table.push(np.arange(40), -np.ones((40, 3), np.float32))\n"
    )
    name = f"together-{lane}"
    with cluster.connect() as client:
        table = client.table(name, dim=3, optimizer=SGD)
        command = [sys.executable, "-c", code, cluster.address, lane, name]
        environment = {**os.environ, "SHOAL_TOKEN": cluster.token, "OPENBLAS_NUM_THREADS": "1"}
        processes = [subprocess.Popen(command, env=environment) for _ in range(3)]
        assert [process.wait(DEADLINE_S) for process in processes] == [0, 0, 0]
        assert (table.pull(np.arange(40)) == 300).all()


@pytest.mark.parametrize("lane", LANES)
def test_a_push_that_timed_out_counts_once_when_the_server_goes_on(
    cluster: shoal.LocalCluster, lane: str
) -> None:
    server = cluster.servers[0]
    with cluster.connect(lane=lane) as client:
        table = client.table(f"late-{lane}", dim=2, optimizer=SGD)
        with stopped([server.pid]):
            with pytest.raises(shoal.Timeout, match=server.address) as caught, within(5):
                table.push(np.arange(KEYS), -np.ones((KEYS, 2), np.float32), timeout=0.2)
            assert caught.value.ticket is not None
            assert not caught.value.ticket.done()
        caught.value.ticket.wait(timeout=DEADLINE_S)
        assert (table.pull(np.arange(KEYS)) == 1).all()


@pytest.mark.parametrize("lane", LANES)
def test_answers_to_questions_that_timed_out_harm_nothing(cluster: shoal.LocalCluster, lane: str) -> None:
    with cluster.connect(lane=lane) as client:
        table = client.table(f"asked-{lane}", dim=2, optimizer=SGD)
        table.push(np.arange(KEYS), -np.ones((KEYS, 2), np.float32))
        with stopped([server.pid for server in cluster.servers]):
            for ask in (lambda: table.stats(timeout=0.05), lambda: list(table.scan(timeout=0.05))):
                with pytest.raises(shoal.Timeout, match="server 0"):
                    ask()
        assert len(table) == KEYS
        assert sum(len(keys) for keys, _ in table.scan()) == KEYS


@pytest.mark.parametrize("lane", LANES)
def test_a_killed_server_is_named_within_the_deadline(lane: str) -> None:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect(lane=lane) as client:
        table = client.table("t", dim=1, optimizer=SGD)
        table.push(np.arange(KEYS), np.ones((KEYS, 1), np.float32))
        victim = cluster.servers[1]
        os.kill(victim.pid, signal.SIGKILL)
        for call in (
            lambda: table.push(np.arange(KEYS), np.ones((KEYS, 1), np.float32), timeout=0.5),
            lambda: table.pull(np.arange(KEYS), timeout=0.5),
            lambda: table.stats(timeout=0.5),
        ):
            with pytest.raises((shoal.Timeout, shoal.Unavailable), match=victim.address), within(5):
                call()


def test_a_client_raises_in_a_forked_child(cluster: shoal.LocalCluster) -> None:
    with cluster.connect() as client:
        table = client.table("forked", dim=1, optimizer=SGD)
        child = os.fork()
        if child == 0:
            os._exit(uses_that_raise(client, table))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        table.push([1], -np.ones((1, 1), np.float32))
        assert table.pull([1]).tolist() == [[1.0]]


def uses_that_raise(client: shoal.Client, table: shoal.Table) -> int:
    """How many uses of a forked client did not raise WrongProcess."""
    uses = [
        lambda: table.pull([1]),
        lambda: table.push([1], np.ones((1, 1), np.float32)),
        lambda: table.assign([1], np.ones((1, 1), np.float32)),
        lambda: len(table),
        lambda: list(table.scan()),
        lambda: client.table("other", dim=1, optimizer=SGD),
    ]
    wrong = len(uses)
    for use in uses:
        try:
            use()
        except shoal.errors.WrongProcess:
            wrong -= 1
        except BaseException:  # noqa: BLE001 - a forked child must not unwind into pytest
            return 100
    return wrong
