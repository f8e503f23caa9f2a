"""`replication="weak"`: pushes are acknowledged before copies have them; what a kill costs is counted, and
how far reads at copies are behind.

Gradients of -1 under SGD(lr=1) make counters: a key's row is the number of pushes to it that took effect.
"""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from run_jobs import DEADLINE_S, wait_until
from tests.process.stopping import stop

import shoal
from shoal import _core

pytestmark = pytest.mark.process
DIM, CLIENTS = 256, 2
# All in one shard, which server 0 heads: a push is one update of it.
ALL = np.arange(100_000)
KEYS = ALL[_core.protocol.key_shards(ALL, 64) == 0][:64]


class Pusher(threading.Thread):
    def __init__(self, cluster: shoal.LocalCluster, column: int) -> None:
        super().__init__()
        self.client = cluster.connect(timeout=DEADLINE_S, lane="tcp")
        self.table = self.client.table("counters", dim=DIM, optimizer=shoal.optim.SGD(lr=1.0))
        self.grads = np.zeros((len(KEYS), DIM), np.float32)
        self.grads[:, column] = -1.0
        self.acked = 0
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.is_set():
            tickets = [self.table.push_async(KEYS, self.grads) for _ in range(8)]
            for ticket in tickets:
                ticket.wait(DEADLINE_S)
                self.acked += 1


@pytest.mark.parametrize("behind", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_what_a_killed_head_had_acknowledged_alone_is_counted(behind: bool) -> None:
    with shoal.LocalCluster(servers=2, replicas=1, replication="weak") as cluster:
        for path in cluster.directory.rglob("*.sock"):
            path.unlink()  # as on two hosts: on one, what a dead server had sent lies in shared memory
        pushers = [Pusher(cluster, column) for column in range(CLIENTS)]
        for pusher in pushers:
            pusher.start()

        def push_on(count: int) -> None:
            goals = [pusher.acked + count for pusher in pushers]
            wait_until(lambda: all(p.acked >= goal for p, goal in zip(pushers, goals, strict=True)))

        push_on(50)
        head, copy = (server.pid for server in cluster.servers)
        if behind:  # more than the sockets hold, in less than a lease
            os.kill(copy, signal.SIGSTOP)
            push_on(100)
        os.kill(head, signal.SIGKILL)
        os.kill(copy, signal.SIGCONT)
        push_on(50)
        for pusher in pushers:
            pusher.enough.set()
        for pusher in pushers:
            pusher.join(DEADLINE_S)
        rows = pushers[0].table.pull(KEYS)
        missing = [pusher.acked - int(rows[0, column]) for column, pusher in enumerate(pushers)]
        assert (rows == rows[0]).all()

        def counted() -> list[int]:
            return [pusher.client.stats()["pushes_lost"] for pusher in pushers]

        wait_until(lambda: counted() == missing)
        if behind:
            assert min(missing) > 0
        wait_until(lambda: sum(one.pushes for one in cluster.status().lost) == sum(missing))
        for pusher in pushers:
            pusher.client.close()


def read_behind(client: shoal.Client, column: int, copy: int, stopping: bool) -> list[int]:
    """How many of its acknowledged pushes each read of a client lacked; `copy` is stopped while it pushes."""
    table = client.table("counters", dim=DIM, optimizer=shoal.optim.SGD(lr=1.0))
    grads = np.zeros((len(KEYS), DIM), np.float32)
    grads[:, column] = -1.0
    acked, missing = 0, []
    for _ in range(5):
        if stopping:
            stop(copy)
        for _ in range(20):
            table.push(KEYS, grads)
            acked += 1
        asked = client.stats()["requests"]
        with ThreadPoolExecutor(1) as thread:
            read = thread.submit(table.pull, KEYS[:1])
            wait_until(lambda asked=asked: client.stats()["requests"] > asked)
            os.kill(copy, signal.SIGCONT)
            missing.append(acked - int(read.result(DEADLINE_S)[0, column]))
        while missing[-1] > 0:
            missing.append(acked - int(table.pull(KEYS[:1])[0, column]))
    return missing


@pytest.mark.parametrize("replication", ["strong", "weak"])
def test_how_far_reads_at_any_copy_are_behind_is_counted(replication: str) -> None:
    options = shoal.ClientOptions(timeout_s=DEADLINE_S, reads="any", lane="tcp")
    with shoal.LocalCluster(servers=2, replicas=1, replication=replication) as cluster:
        for path in cluster.directory.rglob("*.sock"):
            path.unlink()
        behind = []
        for column in range(CLIENTS):  # one of them reads the shard at its head, the other at its copy
            with cluster.connect(options=options) as client:
                missing = read_behind(client, column, cluster.servers[1].pid, replication == "weak")
                stats = client.stats()
                assert stats["versions_behind_max"] == max(missing)
                assert stats["reads_behind"] == sum(lacks > 0 for lacks in missing)
                behind.append(max(missing))
        assert (max(behind) > 0) == (replication == "weak"), behind
