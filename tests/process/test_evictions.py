"""Workers that nobody looks after: those that die or stand still are evicted by their lease, and who wakes
goes on. The script is dying_script.py, whose rows count samples and whose weight counts rounds, exactly.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_jobs import CLEAN, DEADLINE_S, wait_until
from stopping import stop

import shoal
from shoal.launch.worker_environment import free_port
from shoal.store.rounds import Rounds, client_name

pytestmark = pytest.mark.process
DYING = str(Path(__file__).with_name("dying_script.py"))
SAMPLES, BATCH, PASSES = 64, 8, 4  # of that script
ROUNDS = ("bsp", "quorum:0.5")
WORDS = ["quorum:0.5", "ssp:1", "softsync:2", "average:2", "easgd:2", "downpour:2,2"]


class ByHand:
    """Workers started against servers, as torchrun would, without a supervisor."""

    def __init__(self, cluster: shoal.LocalCluster, out: Path, word: str, workers: int, *how: str) -> None:
        self.out, self._stack, self._how = out, ExitStack(), how
        self._environment = {**CLEAN, "SHOAL_ADDRESS": cluster.address, "SHOAL_TOKEN": cluster.token}
        self._environment |= {"SHOAL_SYNC": word, "WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
        self._environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = [self.start(rank) for rank in range(workers)]

    def start(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, DYING, str(self.out), "epochs", "pace:0.03", *self._how]
        environment = {**self._environment, "RANK": str(rank)}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self._stack.callback(process.stderr.close)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def stepped(self, rank: int) -> bool:
        return (self.out / f"stepped-{rank}").exists()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def by_hand(out: Path, word: str, workers: int, *how: str) -> Iterator[tuple[ByHand, Rounds]]:
    """Workers in their second pass, and who sees what becomes of them."""
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        crew = ByHand(cluster, out, word, workers, *how)
        try:
            wait_until(lambda: all(crew.stepped(rank) for rank in range(workers)))
            yield crew, Rounds(client, 0, workers)
        finally:
            crew.close()


def ends(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    return said


def check(found: dict[str, Any], word: str, workers: int) -> None:
    for used in found["used"]:
        assert "0" not in used, "a unit was never used"
        assert sum(used.values()) == SAMPLES // BATCH * workers
    assert min(found["rows"]) >= PASSES / BATCH
    if word in ROUNDS:  # what an evicted worker had on its way counts nowhere
        assert sum(found["rows"]) == pytest.approx(found["rounds"])
        assert sum(found["dense"]) == pytest.approx(found["rounds"])


def evicted(rounds: Rounds, *ranks: int) -> bool:
    phases = rounds.state()["phases"]
    return all(phases[rank] == "away" for rank in ranks)


@pytest.mark.soak
def test_one_is_killed_and_one_stands_still_and_goes_on_when_it_wakes(tmp_path: Path) -> None:
    with by_hand(tmp_path, "bsp", 3) as (crew, rounds):
        stop(crew.processes[1].pid)
        crew.processes[2].kill()
        wait_until(lambda: evicted(rounds, 1, 2))
        crew.processes[1].send_signal(signal.SIGCONT)
        assert "worker 1 was evicted" in ends(crew.processes[1])
        assert ends(crew.processes[0]) == ""
        for rank in (0, 1):
            check(json.loads((tmp_path / f"{rank}.json").read_text()), "bsp", 3)


@pytest.mark.parametrize("word", ["asp", *(pytest.param(word, marks=pytest.mark.soak) for word in WORDS)])
def test_who_wakes_goes_on_under_every_word(tmp_path: Path, word: str) -> None:
    with by_hand(tmp_path, word, 2) as (crew, rounds):
        stop(crew.processes[1].pid)
        wait_until(lambda: evicted(rounds, 1))
        crew.processes[1].send_signal(signal.SIGCONT)
        assert "It has joined again" in ends(crew.processes[1])
        ends(crew.processes[0])
        for rank in range(2):
            check(json.loads((tmp_path / f"{rank}.json").read_text()), word, 2)


@pytest.mark.soak
def test_who_wakes_and_was_replaced_ends(tmp_path: Path) -> None:
    with by_hand(tmp_path, "bsp", 2, "hold:2") as (crew, rounds):
        stop(crew.processes[1].pid)
        wait_until(lambda: evicted(rounds, 1))
        crew.processes.append(crew.start(1))
        wait_until((tmp_path / "back-1").exists)
        crew.processes[1].send_signal(signal.SIGCONT)
        _, said = crew.processes[1].communicate(timeout=DEADLINE_S)
        assert crew.processes[1].returncode == 1
        last = said.splitlines()[-1]
        assert "Fenced" in last
        assert f"client {client_name(1)!r} was evicted, and another process has its place" in last
        (tmp_path / "go-2").touch()
        for process in (crew.processes[0], crew.processes[2]):
            ends(process)
        check(json.loads((tmp_path / "1.json").read_text()), "bsp", 2)


@pytest.mark.soak
def test_under_allreduce_of_torchruns_own_group_who_wakes_is_told(tmp_path: Path) -> None:
    with by_hand(tmp_path, "allreduce", 2) as (crew, rounds):
        stop(crew.processes[1].pid)
        wait_until(lambda: evicted(rounds, 1))
        crew.processes[1].send_signal(signal.SIGCONT)
        _, said = crew.processes[1].communicate(timeout=DEADLINE_S)
        assert crew.processes[1].returncode == 1
        assert "worker 1 was evicted" in said.splitlines()[-1]
