"""A cluster whose network is slow or falls apart: run in a namespace of its own.

    unshare -rn python -m tests.process.network_world partition

A third server lies behind a wire (a pair of veth devices), which rules of routing cut. Prints what
it saw as JSON; an assertion ends it with 1.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.process.test_replicas import pushing, status, wait_for_pushes, wait_until

import shoal

HERE, AWAY = "10.9.0.1", "10.9.0.2"
DEEP = "deep" * 25


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def start_away(cluster: shoal.LocalCluster, slow: bool) -> subprocess.Popen[bytes]:
    """A server behind a wire of its own. By tcp alone: the path to its unix socket would be too long."""
    deep = Path(tempfile.mkdtemp()) / DEEP
    deep.mkdir(parents=True)
    environ = os.environ | {"TMPDIR": str(deep), "SHOAL_TOKEN": cluster.token}
    server = f"{sys.executable} -m shoal.fleet.server_process --join {cluster.address} --host {AWAY}"
    when_wired = f"read _; ip link set lo up; ip addr add {AWAY}/24 dev v1; ip link set v1 up; exec {server}"
    away = subprocess.Popen(["unshare", "-n", "sh", "-c", when_wired], env=environ, stdin=subprocess.PIPE)
    here, there = Path("/proc/self/ns/net"), Path(f"/proc/{away.pid}/ns/net")
    wait_until(lambda: there.readlink() != here.readlink(), "it has no network of its own")
    run(f"ip link set v1 netns {away.pid}")
    if slow:
        run("tc qdisc add dev v0 root handle 1: htb default 1")
        run("tc class add dev v0 parent 1: classid 1:1 htb rate 40mbit")
    assert away.stdin is not None
    away.stdin.write(b"\n")
    away.stdin.close()
    return away


def cut() -> None:
    """No packet reaches AWAY or comes from it, and nobody is told."""
    for end in ("from", "to"):
        run(f"ip rule add pref 10 {end} {AWAY} blackhole")


def mend() -> None:
    for _ in range(2):
        run("ip rule del pref 10")


def is_whole(cluster: shoal.LocalCluster, servers: int) -> bool:
    now = status(cluster)
    up = sum(server.state == "up" for server in now.servers)
    return up == servers and now.degraded == 0 and now.filling == 0


def main(case: str) -> None:
    for command in (
        "ip link set lo up",
        "ip link add v0 type veth peer name v1",
        f"ip addr add {HERE}/24 dev v0",
        "ip link set v0 up",
    ):
        run(command)
    with shoal.LocalCluster(servers=2, replicas=1, bind=HERE, token="behind-a-wire-of-its-own") as cluster:
        away = start_away(cluster, slow=case == "slow")
        try:
            wait_until(lambda: is_whole(cluster, 3), "the third server got no shards")
            with pushing(cluster) as pushers:
                wait_for_pushes(pushers, 20)
                if case == "partition":
                    began = time.monotonic()
                    cut()
                    wait_until(lambda: is_whole(cluster, 2), "it was not given up, or not replaced")
                    wait_for_pushes(pushers, 20)
                    went_on = time.monotonic() - began
                    mend()
                    wait_until(lambda: away.poll() is not None, "it is back, was given up and goes on")
                    wait_for_pushes(pushers, 20)
                    print(
                        json.dumps({"seconds until all went on": round(went_on, 2), "code": away.returncode})
                    )
                elif case == "hiccup":  # shorter than a lease: nobody is given up
                    cut()
                    time.sleep(1.0)
                    mend()
                    wait_for_pushes(pushers, 20)
                    states = [server.state for server in status(cluster).servers]
                    assert states == ["up"] * 3, states
                    wait_until(lambda: is_whole(cluster, 3), "what was being moved never arrives")
        finally:
            if away.poll() is None:
                away.send_signal(signal.SIGTERM)
                away.wait(20)


if __name__ == "__main__":
    main(sys.argv[1])
