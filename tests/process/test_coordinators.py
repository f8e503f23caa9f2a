"""Several coordinators and a real etcd: any of them may die, and nothing is lost (G11)."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from etcd_members import EtcdMembers
from run_jobs import DEADLINE_S, wait_until

import shoal
from shoal.store.control import Address, ControlClient
from shoal.store.messages import GetStatus, StatusInfo

pytestmark = pytest.mark.process
SGD = shoal.optim.SGD(lr=1.0)
KEYS = np.arange(64)
ONES = -np.ones((64, 1), np.float32)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMembers]:
    with closing(EtcdMembers(tmp_path_factory.mktemp("etcd"))) as members:
        yield members


def status(cluster: shoal.LocalCluster) -> StatusInfo:
    with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
        return control.ask(GetStatus(), StatusInfo, DEADLINE_S)


def up(cluster: shoal.LocalCluster) -> bool:
    return [server.state for server in status(cluster).servers] == ["up"] * len(cluster.servers)


def leader(cluster: shoal.LocalCluster) -> int:
    return status(cluster).pid


class Pusher(threading.Thread):
    """Pushes ones until told to stop."""

    def __init__(self, cluster: shoal.LocalCluster) -> None:
        super().__init__()
        self.client = cluster.connect(timeout=DEADLINE_S)
        self.table = self.client.table("counters", dim=1, optimizer=SGD)
        self.pushes = 0
        self.enough = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.enough.wait(0.005):
            self.table.push(KEYS, ONES)
            self.pushes += 1

    def check(self) -> None:
        self.enough.set()
        self.join()
        assert (self.table.pull(KEYS) == self.pushes).all()
        self.client.close()


def test_the_leaders_of_both_may_die_together_and_nothing_is_lost(etcd: EtcdMembers, tmp_path: Path) -> None:
    with shoal.LocalCluster(servers=2, coordinators=3, etcd=etcd.urls) as cluster:
        pusher = Pusher(cluster)
        before = pusher.client.table("before", dim=1, optimizer=SGD)
        first, died = leader(cluster), etcd.leader()
        assert died is not None
        os.kill(first, signal.SIGKILL)
        etcd.kill(died)
        after = pusher.client.table("after", dim=1, optimizer=SGD)  # waits for whoever leads next
        assert leader(cluster) != first
        etcd.start_again(died)
        wait_until(lambda: up(cluster))
        with cluster.connect(timeout=DEADLINE_S) as other:
            for table in (before, after):
                assert other.table(table.name)._entry == table._entry
            other.save(str(tmp_path), timeout=DEADLINE_S)
        pusher.check()
