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
ENVIRONMENT["XDG_STATE_HOME"] = "/nowhere"  # no job has run there


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
        (["status"], "no job has run here"),
        (["status", "--token-file", "/nowhere"], "which cluster"),
        (["status", "shoal://127.0.0.1:1"], "no token"),
        (["status", "nonsense", "--token-file", "/nowhere"], "token file /nowhere"),
        (["up", "--bind", "0.0.0.0"], "refusing to listen"),
        (["status", "shoal://127.0.0.1:1", "--timeout", "-1"], "timeout is -1.0"),
        (["up", "--servers", "0"], "servers is 0"),
        (["up", "--port", "70000"], "port is 70000"),
        (["server", "--join", "127.0.0.1:1"], "SHOAL_TOKEN_FILE"),
        (["server", "--join", "127.0.0.1:1", "--bind", "0.0.0.0"], "refusing to listen"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(arguments: list[str], said: str) -> None:
    fails_with_one_line(run(*arguments), said)


def fails_with_one_line(result: subprocess.CompletedProcess[str], said: str) -> None:
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.parametrize("command", [["up"], ["server", "--join", "127.0.0.1:1"]])
def test_a_bad_variable_is_one_line_too(command: list[str]) -> None:
    fails_with_one_line(
        run(*command, SHOAL_LOG="loud", SHOAL_TOKEN="x"), "SHOAL_LOG is 'loud'; allowed: DEBUG"
    )


def test_a_server_that_cannot_start_says_so_in_one_line(cluster: shoal.LocalCluster) -> None:
    join = ["server", "--join", cluster.address]
    port = cluster.servers[0].address.split(":")[1]
    fails_with_one_line(run(*join, "--port", port, SHOAL_TOKEN=cluster.token), f"127.0.0.1:{port}")
    fails_with_one_line(run(*join, "--threads", "-1", SHOAL_TOKEN=cluster.token), "threads is -1")
    fails_with_one_line(run(*join, SHOAL_TOKEN="wrong"), "wrong token")
    fails_with_one_line(run("server", "--join", "nonsense", SHOAL_TOKEN="x"), "address is 'nonsense'")


def test_a_wrong_token_is_told_where_it_was_looked_for(cluster: shoal.LocalCluster) -> None:
    result = run("status", cluster.address, SHOAL_TOKEN="wrong")
    fails_with_one_line(result, "wrong token. It is looked for in token= (--token-file")
    assert "SHOAL_TOKEN, then in the file that SHOAL_TOKEN_FILE names" in result.stderr


def test_status_has_a_line_for_each_table_however_long(cluster: shoal.LocalCluster) -> None:
    name = "[bold]" + 60 * "x"
    optimizer = shoal.optim.SGD(lr=0.125, momentum=0.9, weight_decay=1e-3, nesterov=True)
    with cluster.connect() as client:
        client.table(name, dim=4, optimizer=optimizer)
    printed = run("status", cluster.address, SHOAL_TOKEN=cluster.token, COLUMNS="40").stdout
    lines = {line.split()[0]: line for line in printed.splitlines() if line}
    assert lines["items"].rstrip().endswith(" SGD(lr=1.0)")
    assert "SGD(lr=0.125, momentum=0.9, weight_decay=0.001, nesterov=True)" in lines[name]


def test_status_says_by_its_exit_code_that_a_server_is_missing() -> None:
    with shoal.LocalCluster(servers=2) as cluster:
        with cluster.connect() as client:
            client.table("items", dim=4, optimizer=shoal.optim.SGD(lr=1.0))
        ask = ["status", cluster.address, "--timeout", "1"]
        assert run(*ask, SHOAL_TOKEN=cluster.token).returncode == 0
        os.kill(cluster.servers[1].pid, signal.SIGKILL)
        result = run(*ask, SHOAL_TOKEN=cluster.token)
        assert result.returncode == 2
        assert "is degraded" in result.stdout
        assert json.loads(run(*ask, "--json", SHOAL_TOKEN=cluster.token).stdout)["state"] == "degraded"
    assert run(*ask, SHOAL_TOKEN=cluster.token).returncode == 1


def test_status_documents_its_exit_codes() -> None:
    assert "Exit code: 0 if all is up, 2 if a server is missing" in " ".join(
        run("status", "--help").stdout.split()
    )


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
