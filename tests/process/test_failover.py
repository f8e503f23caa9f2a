"""Jobs whose servers die: with a replica training goes on, and what the rows hold is exact.

The script is dying_script.py: its rows count samples, its weight counts rounds.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until

pytestmark = pytest.mark.process
DYING = str(Path(__file__).with_name("dying_script.py"))
SAMPLES, BATCH, PASSES = 64, 8, 4  # of that script, where it holds
WORDS = ["bsp", "asp", "ssp:1"]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def whole(jobs: Jobs, evicted: int) -> bool:
    found = json.loads(jobs.shoal("status", "job", "--json").stdout)
    states = [process["state"] for process in found["processes"] if process["role"] == "server"]
    return states.count("evicted") == evicted and found["degraded"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("word", WORDS)
def test_servers_die_one_after_the_other_and_nothing_is_lost(jobs: Jobs, tmp_path: Path, word: str) -> None:
    sizes = ["--workers", "2", "--servers", "2", "--replicas", "1", "--sync", word]
    with jobs.started(*sizes, DYING, str(tmp_path), "epochs", "hold:1", "hold:2", "hold:3") as process:
        # The first holds the sync shard; the next one then does, and had it from the beginning; the third is
        # one that was filled.
        for number, epoch in enumerate((1, 2), 1):
            wait_until((tmp_path / f"hold-{epoch}").exists)
            os.kill(jobs.record()["servers"][number - 1]["pid"], signal.SIGKILL)
            (tmp_path / f"go-{epoch}").touch()
            wait_until(lambda gone=number: whole(jobs, gone), process)
        (tmp_path / "go-3").touch()  # so that the job did not end before
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    assert "the copies of its rows go on, and server 2 takes its place" in errors
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert all("0" not in used for used in found["used"])
        if word == "bsp":
            assert found["rows"] == [PASSES / BATCH] * SAMPLES
            assert found["rounds"] == PASSES * SAMPLES / BATCH


@pytest.mark.soak
def test_without_a_replica_the_job_ends_and_says_why(jobs: Jobs, tmp_path: Path) -> None:
    with jobs.started("--servers", "2", DYING, str(tmp_path), "epochs", "hold:1") as process:
        wait_until((tmp_path / "hold-1").exists)
        pid = jobs.record()["servers"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert f"server 0 (pid {pid}) has ended, and its rows are gone" in errors


def test_more_replicas_than_servers_are_refused(jobs: Jobs) -> None:
    result = jobs.run("--servers", "2", "--replicas", "2", DYING)
    assert (result.returncode, result.stderr) == (
        2,
        "error: replicas is 2; allowed: a whole number from 0 to 1, one less than the number of servers, "
        "since a copy needs a server of its own\n",
    )
