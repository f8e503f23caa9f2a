"""Servers that die, stop, come and go, as real processes: nothing that was acknowledged is lost (G3, G8).

Gradients of -1 under SGD(lr=1) make counters: a key's row is the number of pushes to it that took effect.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.process.stopping import stop

import shoal
from shoal.store.control import Address, ControlClient
from shoal.store.messages import Done, GetStatus, RemoveServer, StatusInfo
from shoal.types import Reads

pytestmark = pytest.mark.process
KEYS = np.arange(400)
SGD = shoal.optim.SGD(lr=1.0)
DEADLINE_S = 30.0
LONGEST_S = 5.0  # a lease of 2.5 s, and what a busy machine adds


class Pusher(threading.Thread):
    """Pushes ones until told to stop; `acked` counts what was acknowledged, and `error` what was not."""

    def __init__(self, cluster: shoal.LocalCluster, column: int, reads: Reads) -> None:
        super().__init__()
        self.client = cluster.connect(options=shoal.ClientOptions(timeout_s=DEADLINE_S, reads=reads))
        self.table = self.client.table("counters", dim=4, optimizer=SGD)
        self.column = column
        self.acked = 0
        self.longest_s = 0.0
        self.error: Exception | None = None
        self.enough = threading.Event()

    def run(self) -> None:
        grads = np.zeros((len(KEYS), 4), np.float32)
        grads[:, self.column] = -1.0
        try:
            while not self.enough.is_set():
                began = time.monotonic()
                self.table.push(KEYS, grads)
                self.acked += 1
                assert self.table.pull(KEYS[:3])[0, self.column] >= self.acked, "one's own push is not seen"
                self.longest_s = max(self.longest_s, time.monotonic() - began)
        except (shoal.errors.ShoalError, AssertionError) as error:
            self.error = error


@contextmanager
def pushing(
    cluster: shoal.LocalCluster, count: int = 2, reads: Reads = "strong", longest_s: float = LONGEST_S
) -> Iterator[list[Pusher]]:
    """Clients that push while the block runs; after it all must be as they were told."""
    pushers = [Pusher(cluster, column, reads) for column in range(count)]
    for pusher in pushers:
        pusher.start()
    try:
        yield pushers
    finally:
        for pusher in pushers:
            pusher.enough.set()
        for pusher in pushers:
            pusher.join(2 * DEADLINE_S)
    for pusher in pushers:
        assert pusher.error is None, pusher.error
        assert pusher.longest_s < longest_s, "a death or a move holds pushes up for too long"
    rows = pushers[0].table.pull(KEYS)
    for pusher in pushers:
        assert (rows[:, pusher.column] == pusher.acked).all(), (pusher.acked, rows[:, pusher.column])
        pusher.client.close()


def status(cluster: shoal.LocalCluster) -> StatusInfo:
    with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
        return control.ask(GetStatus(), StatusInfo, 5.0)


def wait_until(condition: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < DEADLINE_S, what
        time.sleep(0.02)
    return time.monotonic() - began


def wait_for_pushes(pushers: list[Pusher], more: int = 5) -> None:
    goals = [pusher.acked + more for pusher in pushers]
    wait_until(
        lambda: all(p.acked >= g or p.error for p, g in zip(pushers, goals, strict=True)), "no progress"
    )


def whole(cluster: shoal.LocalCluster, gone: int) -> bool:
    """Every shard has all of its copies again, after `gone` servers were given up."""
    now = status(cluster)
    evicted = sum(server.state == "evicted" for server in now.servers)
    return evicted == gone and now.degraded == 0 and now.filling == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_any_server_may_be_killed_and_nothing_acknowledged_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with shoal.LocalCluster(servers=4, replicas=1) as cluster, pushing(cluster) as pushers:
        for killed, index in enumerate(rng.permutation(4)[:2], 1):
            wait_for_pushes(pushers, int(rng.integers(1, 40)))
            os.kill(cluster.servers[index].pid, signal.SIGKILL)
            wait_for_pushes(pushers)
            wait_until(lambda gone=killed: whole(cluster, gone), "the copies were not made again")


def test_with_two_copies_two_servers_may_be_killed_at_once() -> None:
    with shoal.LocalCluster(servers=4, replicas=2) as cluster, pushing(cluster) as pushers:
        wait_for_pushes(pushers, 20)
        for index in (1, 2):
            os.kill(cluster.servers[index].pid, signal.SIGKILL)
        wait_for_pushes(pushers, 20)


def test_every_copy_has_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    keys = np.arange(20_000)
    with shoal.LocalCluster(servers=3, replicas=2) as cluster, cluster.connect(timeout=DEADLINE_S) as client:
        rows = client.table("rows", dim=16, optimizer=shoal.optim.Adagrad(lr=0.1))
        tensor = client.tensor("tensor", np.ones(300_000, np.float32), optimizer=SGD)
        pulled = tensor.pull()
        for _ in range(5):
            rows.push(keys, rng.standard_normal((len(keys), 16), dtype=np.float32))
            grad = rng.standard_normal(tensor.shape, dtype=np.float32)
            tensor.push(grad)
            tensor._push(grad, None, 0, DEADLINE_S, pulled, 0.1).wait()  # of the first values: dcasgd
        last = rows.pull(keys).tobytes(), tensor.pull().tobytes()
        for index in (2, 1):  # what was the middle of chains, and then what was the head, is read
            os.kill(cluster.servers[index].pid, signal.SIGKILL)
            assert (rows.pull(keys).tobytes(), tensor.pull().tobytes()) == last


def test_copies_step_with_the_settings_of_their_head() -> None:
    """Two clients change a table's momentum while both push; what a killed head had is what its copy has."""
    keys, ends = np.arange(5_000), threading.Event()
    with shoal.LocalCluster(servers=2, replicas=1) as cluster:

        def push(client: shoal.Client, cycle: int) -> None:
            rng = np.random.default_rng(cycle)
            while not ends.is_set():
                for step in range(cycle):
                    momentum = shoal.optim.SGD(lr=1e-3, momentum=0.5 + 0.1 * step)
                    rows = client.table("rows", dim=16, optimizer=momentum)
                    rows.push(keys, rng.standard_normal((len(keys), 16), dtype=np.float32))

        with cluster.connect(timeout=DEADLINE_S) as one, cluster.connect(timeout=DEADLINE_S) as two:
            rows = one.table("rows", dim=16, optimizer=shoal.optim.SGD(lr=1e-3, momentum=0.5))
            threads = [threading.Thread(target=push, args=each) for each in ((one, 2), (two, 3))]
            for thread in threads:
                thread.start()
            try:
                wait_until(lambda: rows.stats()["pushes"] > 40 * 64, "nobody pushes")
            finally:
                ends.set()
                for thread in threads:
                    thread.join()
            before = rows.pull(keys)
            os.kill(cluster.servers[0].pid, signal.SIGKILL)
            assert rows.pull(keys).tobytes() == before.tobytes()


def test_a_stopped_server_is_given_up_and_ends_when_it_wakes() -> None:
    with shoal.LocalCluster(servers=3, replicas=1) as cluster, pushing(cluster) as pushers:
        wait_for_pushes(pushers)
        stopped = cluster.servers[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            wait_for_pushes(pushers)
            wait_until(lambda: whole(cluster, 1), "it was not replaced")
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        wait_until(lambda: not stopped.alive, "it was given up and goes on")


@contextmanager
def joined_by_hand(cluster: shoal.LocalCluster) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "shoal.cli", "server", "--join", cluster.address]
    environment = {**os.environ, "SHOAL_TOKEN": cluster.token}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: of_process(cluster, process) == ["up"], "it does not join")
            yield process
        finally:
            process.kill()


def of_process(cluster: shoal.LocalCluster, process: subprocess.Popen[bytes]) -> list[str]:
    """The states of the servers that it has been."""
    return [server.state for server in status(cluster).servers if server.pid == process.pid]


def held(process: subprocess.Popen[bytes]) -> list[int]:
    """How many descriptors and threads."""
    return [len(list(Path(f"/proc/{process.pid}/{what}").iterdir())) for what in ("fd", "task")]


def test_a_server_that_joined_by_hand_joins_again_when_it_wakes() -> None:
    with (
        shoal.LocalCluster(servers=2, replicas=1) as cluster,
        pushing(cluster) as pushers,
        joined_by_hand(cluster) as process,
    ):
        wait_until(lambda: whole(cluster, 0), "it got no copies")
        before = held(process)
        stop(process.pid)
        wait_until(lambda: of_process(cluster, process) == ["evicted"], "it is not given up")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: of_process(cluster, process) == ["evicted", "up"], "it does not come back")
        wait_until(lambda: whole(cluster, 1), "it got no copies")
        wait_for_pushes(pushers)
        # Of the server that it was nothing is left, whatever held its memory.
        assert all(now < 2 * then for now, then in zip(held(process), before, strict=True))
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_a_server_that_is_told_to_stop_before_it_joins_again_stays_away() -> None:
    with shoal.LocalCluster(servers=2, replicas=1) as cluster, joined_by_hand(cluster) as process:
        stop(process.pid)
        wait_until(lambda: of_process(cluster, process) == ["evicted"], "it is not given up")
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)  # whenever it comes: before it ends, while it waits, or when it has joined again
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) in (0, -signal.SIGTERM)


def test_a_server_that_joined_by_hand_and_is_removed_stays_away() -> None:
    with shoal.LocalCluster(servers=2) as cluster, joined_by_hand(cluster) as process:
        with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
            control.ask(RemoveServer(index=2), Done, DEADLINE_S)
        assert process.wait(DEADLINE_S) == 0
        assert of_process(cluster, process) == ["left"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_a_server_stops_while_it_is_filled_and_the_coordinator_dies(seed: int) -> None:
    """The next coordinator does not know of the fill; those that wait for its target go on all the same."""
    rng = np.random.default_rng(seed)
    with (
        shoal.LocalCluster(servers=2, replicas=1) as cluster,
        cluster.connect(timeout=DEADLINE_S) as client,
        pushing(cluster, longest_s=2 * LONGEST_S) as pushers,
    ):
        rows = client.table("rows", dim=64, optimizer=SGD)
        rows.push(np.arange(400_000), np.ones((400_000, 64), np.float32))  # so that a fill takes a while
        stopped = cluster.add_server()
        wait_until(lambda: status(cluster).filling > 0, "it is not filled")
        time.sleep(rng.uniform(0, 0.2))  # some moment of it
        os.kill(stopped.pid, signal.SIGSTOP)
        os.kill(cluster.pid, signal.SIGKILL)
        try:
            wait_for_pushes(pushers, 20)
            wait_until(lambda: whole(cluster, 1), "it was not given up")
            wait_for_pushes(pushers, 20)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        wait_until(lambda: not stopped.alive, "it was given up and goes on")


def test_with_too_few_servers_left_the_cluster_goes_on_degraded() -> None:
    with shoal.LocalCluster(servers=2, replicas=1) as cluster, pushing(cluster) as pushers:
        wait_for_pushes(pushers)
        os.kill(cluster.servers[0].pid, signal.SIGKILL)
        wait_for_pushes(pushers, 20)
        assert status(cluster).degraded == 64
        cluster.add_server()
        wait_until(lambda: whole(cluster, 1), "the new server got no copies")
        os.kill(cluster.servers[1].pid, signal.SIGKILL)
        wait_for_pushes(pushers, 20)


@pytest.mark.parametrize("replicas", [0, 1])
def test_servers_come_and_go_while_clients_push(replicas: int) -> None:
    with shoal.LocalCluster(servers=2, replicas=replicas) as cluster, pushing(cluster) as pushers:
        for _ in range(2):
            wait_for_pushes(pushers)
            cluster.add_server()
            wait_until(lambda: whole(cluster, 0), "the shards do not come to rest")
        wait_for_pushes(pushers)
        cluster.remove_server(0)
        assert not cluster.servers[0].alive
        wait_for_pushes(pushers)


@pytest.mark.parametrize("replicas", [0, 1])
def test_shards_move_between_shared_memory_and_tcp(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 25)  # too long for the path of a unix socket: then it lies in TMPDIR
    deep.mkdir()
    with (
        shoal.LocalCluster(servers=2, replicas=replicas, directory=deep) as cluster,
        pushing(cluster) as pushers,
        cluster.connect(timeout=DEADLINE_S) as client,
    ):
        start = np.arange(3e5, dtype=np.float32)
        tensor = client.tensor("tensor", start, optimizer=SGD)
        wait_for_pushes(pushers)
        monkeypatch.setenv("TMPDIR", str(deep))  # from now on there is none: by tcp alone
        for _ in range(3):
            new = cluster.add_server()
            wait_until(lambda: whole(cluster, 0), "the shards do not come to rest")
            tensor._push(np.ones_like(start), None, 0, DEADLINE_S, tensor.pull(), 0.0).wait()
            wait_for_pushes(pushers, 20)
            lanes = pushers[0].client.stats()["lanes"]
            assert [*lanes[:2], lanes[new.index]] == ["shm", "shm", "tcp"]
            cluster.remove_server(new.index)
            wait_for_pushes(pushers, 20)
        assert (tensor.pull() == start - 3).all()


def test_a_server_that_is_needed_is_not_let_go() -> None:
    with shoal.LocalCluster(servers=2, replicas=1) as cluster:
        with pytest.raises(
            shoal.errors.BadInput, match="without server 1 there are 1 servers, and 2 are needed"
        ):
            cluster.remove_server(1)
        with pytest.raises(shoal.errors.BadInput, match="server 7 is not one of those that are up"):
            cluster.remove_server(7)


def test_reads_see_what_was_acknowledged_before_the_kill_of_a_tail() -> None:
    with shoal.LocalCluster(servers=3, replicas=1) as cluster, cluster.connect(timeout=DEADLINE_S) as client:
        table = client.table("counters", dim=1, optimizer=SGD)
        for _ in range(10):
            table.push(KEYS, np.full((len(KEYS), 1), -1.0, np.float32))
        os.kill(cluster.servers[2].pid, signal.SIGKILL)
        assert (table.pull(KEYS) == 10).all()
        assert len(table) == len(KEYS)
        assert sum(len(keys) for keys, _ in table.scan()) == len(KEYS)


def test_any_copy_shows_what_was_acknowledged_also_after_a_kill() -> None:
    with (
        shoal.LocalCluster(servers=3, replicas=1) as cluster,
        pushing(cluster, count=3, reads="any") as pushers,
    ):
        wait_for_pushes(pushers, 20)
        os.kill(cluster.servers[1].pid, signal.SIGKILL)
        wait_for_pushes(pushers, 20)
        wait_until(lambda: whole(cluster, 1), "the copies were not made again")
        wait_for_pushes(pushers)


def test_reads_of_one_key_are_spread_over_its_copies() -> None:
    with shoal.LocalCluster(servers=2, replicas=1) as cluster:
        options = [
            shoal.ClientOptions(timeout_s=DEADLINE_S, reads=reads) for reads in ("strong", "any", "any")
        ]
        clients = [cluster.connect(options=each) for each in options]
        tables = [client.table("hot", dim=1, optimizer=SGD) for client in clients]
        tables[0].push([7], np.full((1, 1), -3.0, np.float32))
        answers = []
        for server in cluster.servers:
            stop(server.pid)
            try:
                answers.append([_answers(table) for table in tables])
            finally:
                os.kill(server.pid, signal.SIGCONT)
            wait_until(lambda: all(_answers(table) for table in tables), "it woke, and does not answer")
        # The strong one reads at one server, as one of the others does; the third reads at the other server.
        strong, *others = zip(*answers, strict=True)
        assert sorted(strong) == [False, True]
        assert sorted(others) == sorted({strong, strong[::-1]})
        for client in clients:
            client.close()


def _answers(table: shoal.Table) -> bool:
    try:
        return bool(table.pull([7], timeout=0.5) == 3.0)
    except shoal.errors.Timeout:
        return False


def test_weak_copies_lose_at_most_what_was_on_its_way() -> None:
    with (
        shoal.LocalCluster(servers=3, replicas=1, replication="weak") as cluster,
        cluster.connect(timeout=DEADLINE_S) as client,
    ):
        table = client.table("counters", dim=1, optimizer=SGD)
        for _ in range(100):
            table.push(KEYS, np.full((len(KEYS), 1), -1.0, np.float32))
        before = table.pull(KEYS)
        assert (before == 100).all()
        os.kill(cluster.servers[0].pid, signal.SIGKILL)
        after = table.pull(KEYS)
        assert ((after <= 100) & (after > 50)).all()


def test_a_fence_outlives_who_fenced_also_on_a_server_that_joins_later() -> None:
    keys = np.arange(8)
    with shoal.LocalCluster(servers=1) as cluster, closing(cluster.connect()) as judge:
        seen = judge.table("counters", dim=4, optimizer=SGD)
        with closing(cluster.connect(name="w")) as fenced:
            table = fenced.table("counters", dim=4, optimizer=SGD)
            table.push(keys, np.full((len(keys), 4), -1.0, np.float32))
            cluster.connect(name="w").close()
            cluster.add_server()
            wait_until(lambda: whole(cluster, 0), "the shards do not come to rest")
            for key in keys:  # one by one: some lie where it is cut, some where it never was
                with pytest.raises(shoal.errors.Fenced):
                    table.push(keys[key : key + 1], np.full((1, 4), -1.0, np.float32))
        assert (seen.pull(keys) == 1.0).all()
