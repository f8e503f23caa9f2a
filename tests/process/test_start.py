"""Starting is quick: nearly every test starts a cluster of processes, and so does every job.

`python -m bench --only START` measures seconds; 0.3 are wanted. Here it is the CPU's time, the best of a few,
which other work on the machine hardly changes: only what has become several times slower is red.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

pytestmark = pytest.mark.process
TIMES, CPU_S_MAX = 3, 1.5
# What takes long to import, and is needed later, elsewhere or never.
HEAVY = {"torch", "matplotlib", "typer", "rich", "s3fs", "hdfs_native", "etcd3gw", "requests", "fsspec"}
ROLES = {
    "shoal": HEAVY | {"safetensors", "asyncio", "sqlite3"},
    "shoal.fleet.server_process": HEAVY | {"asyncio", "sqlite3"},
    "shoal.fleet.coordinator_process": HEAVY | {"safetensors"},
}


def import_cpu_s(module: str) -> float:
    with subprocess.Popen([sys.executable, "-c", f"import {module}"]) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return used.ru_utime + used.ru_stime


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("module", ROLES)
def test_nothing_heavy_is_imported(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ROLES[module] & set(ran.stdout.split()) == set()


@pytest.mark.parametrize("module", ROLES)
def test_an_import_takes_a_moment_only(module: str) -> None:
    assert min(import_cpu_s(module) for _ in range(TIMES)) < CPU_S_MAX


def test_servers_and_coordinator_take_a_moment_only() -> None:
    with shoal.LocalCluster(servers=TIMES) as cluster:
        assert min(cpu_s(server.pid) for server in cluster.servers) < CPU_S_MAX
        assert cpu_s(cluster.pid) < CPU_S_MAX
