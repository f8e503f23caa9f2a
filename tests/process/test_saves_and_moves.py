"""Checkpoints while servers come and go: a shard has one image, which both would read."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from run_jobs import DEADLINE_S, wait_until

import shoal
from shoal.errors import Unavailable

pytestmark = pytest.mark.process
ROWS, DIM = 50_000, 64


class Saves:
    """A client that saves all the time, and says how often it could not."""

    def __init__(self, client: shoal.Client, url: str) -> None:
        self.names: list[str] = []
        self.failures: list[str] = []
        self._client, self._url = client, url
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._run)

    def _run(self) -> None:
        while not self._enough.is_set():
            try:
                self.names.append(self._client.save(self._url, timeout=DEADLINE_S))
            except Unavailable as error:
                self.failures.append(str(error))

    def go_on(self) -> None:
        """Wait for two more."""
        goal = len(self.names) + 2
        wait_until(lambda: len(self.names) >= goal or self._done.done())

    def end(self) -> None:
        self._enough.set()
        self._pool.shutdown()
        self._done.result()


def settled(cluster: shoal.LocalCluster) -> bool:
    status = cluster.status()
    return status.filling == status.degraded == 0


@pytest.mark.parametrize("replicas", [0, 1])
def test_saves_go_on_while_servers_come_and_go(tmp_path: Path, replicas: int) -> None:
    with shoal.LocalCluster(servers=2, replicas=replicas) as cluster, cluster.connect() as client:
        items = client.table("items", dim=DIM, optimizer=shoal.optim.SGD(lr=1.0))
        items.push(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        saves = Saves(client, str(tmp_path))
        try:
            new = cluster.add_server()
            saves.go_on()
            cluster.remove_server(new.index)
            saves.go_on()
            assert saves.failures == []
            if replicas:
                os.kill(cluster.add_server().pid, signal.SIGKILL)
                wait_until(lambda: settled(cluster))
                saves.go_on()
                assert all("has gone" in why or "not connected" in why for why in saves.failures)
        finally:
            saves.end()
        wait_until(lambda: settled(cluster))
        items.push(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        client.load(str(tmp_path))
        assert (items.pull(np.arange(ROWS)) == -1).all()
