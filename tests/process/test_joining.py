"""A server that stands still while it gets its first shards, without replicas: the others go on."""

import os
import signal

import numpy as np
import pytest
from run_jobs import wait_until

import shoal

pytestmark = pytest.mark.process
KEYS = np.arange(1000)
# A lease, and what the rest takes on a busy machine; a fill of its own accord ends after 600 s.
GIVEN_UP_S = 20.0


def test_a_server_that_stands_still_in_its_first_fill_is_given_up() -> None:
    with shoal.LocalCluster(servers=1) as cluster, cluster.connect(timeout=GIVEN_UP_S) as client:
        table = client.table("counters", dim=4, optimizer=shoal.optim.SGD(lr=1.0))
        table.push(KEYS, np.ones((len(KEYS), 4), np.float32))
        os.kill(cluster.servers[0].pid, signal.SIGSTOP)
        new = cluster.add_server()
        os.kill(new.pid, signal.SIGSTOP)
        os.kill(cluster.servers[0].pid, signal.SIGCONT)
        table.push(KEYS, np.ones((len(KEYS), 4), np.float32))
        wait_until(lambda: cluster.status().servers[new.index].state == "evicted")
        table.push(KEYS, np.ones((len(KEYS), 4), np.float32))
        assert (table.pull(KEYS) == -3).all()
        os.kill(new.pid, signal.SIGCONT)
        wait_until(lambda: not new.alive)  # it was told when it woke
