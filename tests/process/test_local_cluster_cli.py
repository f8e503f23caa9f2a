"""The command `shoal`, as a process."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shoal

pytestmark = pytest.mark.process
SHOAL = [sys.executable, "-m", "shoal.cli"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SHOAL, *arguments],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        table = client.table("items", dim=4, optimizer=shoal.optim.SGD(lr=1.0))
        table.push(np.arange(30), np.ones((30, 4), np.float32))
        client.tensor("w", np.ones((2, 3), np.float32), optimizer=shoal.optim.SGD(lr=1.0))
        yield cluster


def test_version() -> None:
    assert run("--version").stdout == f"shoal {shoal.__version__}\n"


def test_doctor_says_that_the_store_works() -> None:
    result = run("doctor")
    assert result.returncode == 0
    assert "kernels" in result.stdout
    assert "works" in result.stdout


def test_status_as_json_lists_every_process_and_table(cluster: shoal.LocalCluster) -> None:
    report = json.loads(run("status", cluster.address, "--json", SHOAL_TOKEN=cluster.token).stdout)
    assert [(p["role"], p["index"], p["state"]) for p in report["processes"]] == [
        ("coordinator", 0, "up"),
        ("server", 0, "up"),
        ("server", 1, "up"),
    ]
    assert [p["pid"] for p in report["processes"]] == [cluster.pid, *(s.pid for s in cluster.servers)]
    assert [p["address"] for p in report["processes"][1:]] == [s.address for s in cluster.servers]
    assert {t["name"]: t["rows"] for t in report["tables"]} == {"items": 30, "w": None}


def test_status_for_people(cluster: shoal.LocalCluster) -> None:
    result = run("status", "--token-file", str(cluster.token_file), SHOAL_ADDRESS=cluster.address)
    assert result.returncode == 0
    assert cluster.address in result.stdout
    assert "items" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status"], "which cluster"),
        (["status", "shoal://127.0.0.1:1"], "no token"),
        (["status", "nonsense", "--token-file", "/nowhere"], "token file /nowhere"),
        (["up", "--bind", "0.0.0.0"], "refusing to listen"),
        (["up", "--servers", "0"], "servers is 0"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_a_wrong_token_is_an_error(cluster: shoal.LocalCluster) -> None:
    result = run("status", cluster.address, SHOAL_TOKEN="wrong")
    assert result.returncode == 1
    assert "wrong token" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_says_where_it_is_and_stops_by_signal(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "token"
    command = [*SHOAL, "up", "--servers", "2", "--token-file", str(path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        assert process.stdout.readline().split()[-1] == str(path)
        with shoal.connect(address, token=path.read_text().strip()) as client:
            assert client.table("t", dim=1, optimizer=shoal.optim.SGD(lr=1)).pull([1]).shape == (1, 1)
        process.send_signal(number)
        assert process.wait(30) == 0
        assert process.stdout.read().endswith("stopped\n")


def test_a_server_joins_by_hand(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    environment = {**ENVIRONMENT, "SHOAL_TOKEN": "a-token-for-this-test"}
    module = [sys.executable, "-m", "shoal.fleet.coordinator_process"]
    coordinate = [*module, "--journal", str(tmp_path / "j.db"), "--port", port, "--watch-stdin"]
    address = f"shoal://127.0.0.1:{port}"
    pipes = {"env": environment, "stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with (
        subprocess.Popen(coordinate, **pipes),
        subprocess.Popen([*SHOAL, "server", "--join", address], **pipes) as s,
    ):
        with shoal.connect(address, token="a-token-for-this-test") as client:
            assert client.table("t", dim=1, optimizer=shoal.optim.SGD(lr=1)).pull([1]).shape == (1, 1)
        s.send_signal(signal.SIGTERM)
        assert s.wait(30) == 0
