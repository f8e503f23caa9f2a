"""Workers that die in the middle of training, by real jobs: they are replaced, and nothing is lost.

What the rows of dying_script.py hold is exact, since all its numbers are powers of two: of a round with n
samples each of them gets 1/n.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_jobs import CLEAN, DEADLINE_S, SCRIPT, Jobs, wait_until

import shoal
from shoal.store.rounds import Rounds, client_name

pytestmark = pytest.mark.process
DYING, COUNTING = (str(Path(__file__).with_name(f"{name}_script.py")) for name in ("dying", "counting"))
SAMPLES, BATCH, PASSES = 64, 8, 3  # of that script
ROUNDS = ("bsp", "quorum:1", "quorum:0.5")
DEATHS = ("1:3:half", "0:5:sent")
WORDS = [
    "bsp",
    "asp",
    "average:2",
    "quorum:1",
    "quorum:0.5",
    "ssp:1",
    "asp,scale=staleness",
    "softsync:2",
    "dcasgd:0.04",
    "downpour:2,2",
]
WORDS += ["bmuf:2", "easgd:2", "diloco:2", "hogwild"]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def run(jobs: Jobs, out: Path, word: str, loop: str, *deaths: str, workers: int = 2) -> list[dict[str, Any]]:
    result = jobs.run(
        "--workers", str(workers), "--servers", "2", "--sync", word, DYING, str(out), loop, *deaths
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for death in deaths:
        assert f"worker {death[0]} was killed by SIGKILL and is started again" in result.stderr
    assert f"{PASSES} passes" in result.stderr.splitlines()[-1]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(workers)]


def check(found: dict[str, Any], word: str) -> None:
    for used in found["used"]:
        assert "0" not in used, "a unit was never used"
        assert sum(used.values()) == SAMPLES // BATCH * 2
    assert min(found["rows"]) >= PASSES / BATCH
    if word in ROUNDS:  # whole or not at all: a unit's samples lie on both servers
        for unit in range(0, SAMPLES, BATCH // 2):
            assert len(set(found["rows"][unit : unit + BATCH // 2])) == 1, found["rows"]
        assert sum(found["rows"]) == found["rounds"]


@pytest.mark.soak
@pytest.mark.parametrize("word", WORDS)
def test_workers_that_die_are_replaced_and_every_sample_is_used(
    jobs: Jobs, tmp_path: Path, word: str
) -> None:
    loop = "range" if word == "bsp" else "epochs"
    found = run(jobs, tmp_path, word, loop, *DEATHS)
    for one in found:
        check(one, word)
        assert one["mean"] == 1.0
    assert [epoch for epoch, _ in found[1]["passes"]] == list(range(PASSES))
    events = [event["text"] for event in jobs.record()["events"]]
    assert len(events) == 2
    assert [worker["restarts"] for worker in jobs.record()["workers"]] == [1, 1]


@pytest.mark.soak
@pytest.mark.parametrize("place", ["computing", "half", "sent"])
@pytest.mark.parametrize("step", [0, 7, 8, 23])
def test_a_death_at_any_step_counts_nowhere_in_part(
    jobs: Jobs, tmp_path: Path, step: int, place: str
) -> None:
    for one in run(jobs, tmp_path, "bsp", "epochs", f"1:{step}:{place}"):
        check(one, "bsp")


@pytest.mark.soak
def test_the_only_worker_of_a_job_is_replaced(jobs: Jobs, tmp_path: Path) -> None:
    (found,) = run(jobs, tmp_path, "bsp", "epochs", "0:11:sent", workers=1)
    assert found["rows"] == [PASSES / BATCH] * SAMPLES
    assert found["rounds"] == PASSES * SAMPLES / BATCH
    assert found["passes"] == [[1, 5], [2, 8]]


def test_so_many_deaths_end_the_job(jobs: Jobs) -> None:
    result = jobs.run("--workers", "2", "--max-restarts", "1", SCRIPT, "die", "0", str(int(signal.SIGKILL)))
    assert result.returncode == 128 + signal.SIGKILL
    assert "started again (1 of 1)" in result.stderr
    assert "worker 0 was killed by SIGKILL:" in result.stderr


def test_a_script_that_dies_without_a_word_is_replaced_and_one_that_raises_is_not(jobs: Jobs) -> None:
    result = jobs.run("--workers", "1", "--max-restarts", "1", SCRIPT, "exit_at_once", "7")
    assert result.returncode == 7
    assert result.stderr.count("started again") == 1
    assert "started again" not in jobs.run("--workers", "1", SCRIPT, "throw", "0").stderr


def test_a_number_of_restarts_below_zero_is_refused(jobs: Jobs) -> None:
    result = jobs.run("--max-restarts", "-1", SCRIPT, "sit")
    assert (result.returncode, result.stderr) == (
        2,
        "error: max-restarts is -1; allowed: a whole number from 0 to 1000000\n",
    )


def test_a_killed_worker_is_shown(jobs: Jobs) -> None:
    with jobs.started("--workers", "1", SCRIPT, "sit"):
        jobs.until("ready-0")
        first = jobs.record()["workers"][0]["pid"]
        jobs.path("ready-0").unlink()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: jobs.record()["workers"][0]["pid"] != first)
        jobs.until("ready-0")
        shown = jobs.shoal("status", "job").stdout
        assert "worker 0 was killed by SIGKILL and is started again (1 of 3)" in shown


def test_one_that_is_killed_and_one_that_stands_still_are_replaced(jobs: Jobs, tmp_path: Path) -> None:
    command = ["--workers", "2", "--servers", "2", DYING, str(tmp_path), "range", "1:3:half", "0:5:stop"]
    with jobs.started(*command) as process:
        wait_until(lambda: (tmp_path / "stopped").exists())
        began = time.monotonic()
        wait_until(lambda: any("no sign of life" in event["text"] for event in jobs.record()["events"]))
        assert time.monotonic() - began < 3.0
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        check(found, "bsp")
        assert found["mean"] == 1.0
        assert [epoch for epoch, _ in found["passes"]] == list(range(PASSES))
    texts = [event["text"] for event in jobs.record()["events"]]
    assert [text.partition(" (")[0] for text in texts] == [
        "worker 1 was killed by SIGKILL and is started again",
        "worker 0",
        "worker 0 was killed by SIGKILL and is started again",
    ]
    assert [worker["restarts"] for worker in jobs.record()["workers"]] == [1, 1]


@pytest.mark.soak
def test_one_that_stands_still_and_may_not_be_replaced_does_not_hang_the_job(jobs: Jobs) -> None:
    options = ["--workers", "2", "--max-restarts", "0", "--sync", "asp"]
    with jobs.started(*options, COUNTING, "400", "2", "0.02") as process:
        jobs.until("progress/1.json")
        wait_until(lambda: json.loads(jobs.path("progress/1.json").read_text())["step"] > 0)
        pid = jobs.record()["workers"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: bool(jobs.record()["events"]))
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "error: worker 1 stands still, and all others are done"
    assert [event["text"] for event in jobs.record()["events"]] == [
        f"worker 1 (pid {pid}) has given no sign of life for 2 s, and no restart is left: it is waited for "
        "until the others are done"
    ]


@pytest.mark.soak
def test_a_server_that_stands_still_is_replaced_before_it_wakes(jobs: Jobs, tmp_path: Path) -> None:
    options = ["--servers", "2", "--replicas", "1"]
    with jobs.started(*options, DYING, str(tmp_path), "epochs", "hold:1") as process:
        wait_until((tmp_path / "hold-1").exists)
        pid = jobs.record()["servers"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: any("takes its place" in event["text"] for event in jobs.record()["events"]))
        (tmp_path / "go-1").touch()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    assert f"server 1 (pid {pid}) stands still and was given up: it is killed" in errors
    assert "the copies of its rows go on, and server 2 takes its place" in errors


def test_a_fenced_worker_that_wakes_changes_nothing(tmp_path: Path) -> None:
    """Without a supervisor: another client takes its name while it stands still, and keeps it."""
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect() as client:
        environment = {**CLEAN, "SHOAL_ADDRESS": cluster.address, "SHOAL_TOKEN": cluster.token}
        environment |= {"SHOAL_RANK": "0", "SHOAL_WORLD_SIZE": "1", "SHOAL_SYNC": "asp"}
        command = [sys.executable, DYING, str(tmp_path), "epochs", "0:3:stop"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                wait_until(lambda: (tmp_path / "stopped").exists())
                with cluster.connect(name=client_name(0)) as evictor:
                    Rounds(evictor, 0, 1).leave()
                    rows = client.table("counts").pull(range(SAMPLES)).copy()
                    process.send_signal(signal.SIGCONT)
                    _, said = process.communicate(timeout=DEADLINE_S)
            finally:
                process.kill()
        assert process.returncode == 1
        assert "Fenced" in said.splitlines()[-1]
        assert (client.table("counts").pull(range(SAMPLES)) == rows).all()
        assert rows.sum() == 3.0
