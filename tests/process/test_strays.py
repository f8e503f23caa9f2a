"""A server that sleeps, is given up, and writes into a client's memory when it wakes: nobody sees that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.process.stopping import stop

from shoal import _core

pytestmark = pytest.mark.process
SHARDS, WAIT_S = 4, 20.0
ASKED, OTHERS = np.arange(64), np.arange(1000, 1064)
SERVER = f"""
import sys
from shoal import _core
server = _core.Server(host="127.0.0.1", port=0, unix_path=sys.argv[1], token=b"t", shards={SHARDS}, threads=1,
                      frame_bytes_max=1 << 28)
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", SERVER, str(tmp_path / "sleeper")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def placement(servers: list[_core.ServerAddress], version: int, at: int) -> _core.Placement:
    return _core.Placement(
        version=version, weak=False, servers=servers, terms=[1 + version] * SHARDS, chains=[[at]] * SHARDS
    )


def connect(where: _core.Placement, client_id: int, lane: str) -> _core.Client:
    return _core.Client.connect(
        client_id=client_id,
        incarnation=1,
        token=b"t",
        placement=where,
        lane=lane,
        timeout_s=WAIT_S,
        shm_bytes_max=1 << 28,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def filled(value: float) -> np.ndarray:
    return np.full((len(ASKED), 4), value, np.float32)


@pytest.mark.parametrize("recycled", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_rows_stay_as_they_were_answered(sleeper, tmp_path: Path, many: bool, recycled: bool) -> None:
    process, port = sleeper
    awake = _core.Server(
        host="127.0.0.1",
        port=0,
        unix_path=str(tmp_path / "awake"),
        token=b"t",
        shards=SHARDS,
        threads=1,
        frame_bytes_max=1 << 28,
    )
    there = _core.ServerAddress(0, "127.0.0.1", port, str(tmp_path / "sleeper"))
    here = _core.ServerAddress(1, "127.0.0.1", awake.port, str(tmp_path / "awake"))
    gone = _core.ServerAddress(0, "127.0.0.1", 0, str(tmp_path / "sleeper"))
    connected = connect(placement([there, here], 0, 0), client_id=1, lane="shm")

    def pull(keys: np.ndarray) -> _core.Ticket:
        if many:
            return connected.pull_many([(1, keys, None), (2, keys, None)], codec="fp32", timeout_s=WAIT_S)
        return connected.pull(1, keys, timeout_s=WAIT_S)

    def rows_of(ticket: _core.Ticket) -> list[np.ndarray]:
        found = ticket.wait(WAIT_S)
        return list(found) if many else [found]

    with closing(connected):
        for identity in (1, 2):
            spec = _core.TableSpec()
            spec.id, spec.name, spec.dim = identity, f"t{identity}", 4
            spec.optimizer, spec.init = _core.OptimizerSpec("sgd"), _core.InitSpec("zeros")
            connected.declare(spec, WAIT_S)
            connected.push(identity, ASKED, filled(1.0), lr=1.0, timeout_s=WAIT_S).wait(WAIT_S)
        stop(process.pid)
        tickets = [pull(ASKED), pull(ASKED)]
        for ticket in tickets:
            ticket.leave()
        awake.place(1, placement([gone, here], 5, 1))
        connected.set_placement(placement([gone, here], 5, 1))
        rows = rows_of(tickets.pop(0))
        assert all((some == 0.0).all() for some in rows), "the other server has nothing yet"
        expected = 0.0
        if recycled:  # what is pulled next would lie where those rows and keys lay
            del rows
            expected = 5.0
            for identity in (1, 2):
                connected.push(identity, OTHERS, filled(-5.0), lr=1.0, timeout_s=WAIT_S).wait(WAIT_S)
            rows = rows_of(pull(OTHERS))
        os.kill(process.pid, signal.SIGCONT)
        with closing(connect(placement([there], 0, 0), client_id=2, lane="tcp")) as probe:
            wait_until(lambda: probe.table_stats(1, WAIT_S)["pulls"] == 2 * SHARDS)
        assert all((some == expected).all() for some in rows), "it wrote to memory that was not its own"
    awake.stop()
