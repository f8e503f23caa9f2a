"""`replication="weak"`: pushes are acknowledged before copies have them, and what a kill costs is counted.

Gradients of -1 under SGD(lr=1) make counters: a key's row is the number of pushes to it that took effect.
"""

import os
import signal
import threading

import numpy as np
import pytest
from run_jobs import DEADLINE_S, wait_until

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
