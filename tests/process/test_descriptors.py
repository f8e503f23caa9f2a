"""Descriptors of Shoal are its own: a program that a client or a server starts gets none of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shoal

pytestmark = pytest.mark.process
CLOSE_ON_EXEC = 0o2000000  # as /proc/PID/fdinfo shows it
# Reads its own descriptors; what it opens to do so is gone when it looks where they lead.
CHILD = """
import os
for number in os.listdir("/proc/self/fd"):
    try:
        print(number, os.readlink(f"/proc/self/fd/{number}"))
    except FileNotFoundError:
        pass
"""
PARENT = f"""
import os, subprocess, sys
import numpy as np
import shoal

def count():
    return sum(os.readlink(f"/proc/self/fd/{{fd}}").startswith(("socket:", "/memfd:", "anon_inode:"))
               for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{{fd}}"))

before = count()
lanes = sys.argv[1].split(",")
clients = [shoal.connect("memory://") if lane == "memory" else shoal.connect(lane=lane) for lane in lanes]
for client in clients:
    table = client.table("t", dim=64, optimizer=shoal.optim.SGD(lr=1.0))
    table.push(np.arange(20_000), np.ones((20_000, 64), np.float32))
    table.pull(np.arange(20_000))
assert lanes == ["memory"] or count() > before
subprocess.run([sys.executable, "-c", {CHILD!r}], close_fds=False, check=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=2) as cluster:
        yield cluster


@pytest.mark.parametrize("lane", ["memory", "shm", "unix", "tcp", "memory,shm,unix,tcp"])
def test_a_program_started_by_a_client_gets_none(
    lane: str, cluster: shoal.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ADDRESS", cluster.address)
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(cluster.token_file))
    ran = subprocess.run(
        [sys.executable, "-c", PARENT, lane],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert {line.split()[0] for line in ran.stdout.splitlines()} == {"0", "1", "2"}, ran.stdout


def test_those_of_servers_and_coordinator_close_when_another_program_is_run(
    cluster: shoal.LocalCluster,
) -> None:
    clients = [cluster.connect(lane=lane) for lane in ("shm", "unix", "tcp")]
    for client in clients:
        table = client.table("t", dim=64, optimizer=shoal.optim.SGD(lr=1.0))
        table.push(np.arange(20_000), np.ones((20_000, 64), np.float32))
    for pid in (cluster.pid, *(server.pid for server in cluster.servers)):
        kept = {int(path.name): path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir()}
        flags = {fd: int(text.split("flags:")[1].split()[0], 8) for fd, text in kept.items()}
        assert len(flags) > 3
        assert {fd for fd, bits in flags.items() if not bits & CLOSE_ON_EXEC} <= {0, 1, 2}
    for client in clients:
        client.close()
