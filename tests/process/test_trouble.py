"""Workers that run and are not well, and what --on-trouble does about it: an event, and an effect."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until
from stopping import stop

import shoal
from shoal.store.rounds import Rounds

pytestmark = pytest.mark.process
SCRIPT = str(Path(__file__).with_name("trouble_script.py"))


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def events(jobs: Jobs) -> str:
    return "\n".join(event["text"] for event in jobs.record()["events"])


def ends(process: Any, out: Path) -> tuple[str, list[dict[str, float]]]:
    """Its last line, and what its workers found."""
    (out / "go").touch()
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    return errors.splitlines()[-1], [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("policy", ["refuse", "report"])
def test_a_step_that_is_not_finite_counts_nothing_and_is_told(
    jobs: Jobs, tmp_path: Path, policy: str
) -> None:
    options = ["--sync", "asp", "--on-trouble", f"nan={policy}"]
    with jobs.started(*options, SCRIPT, str(tmp_path), "once") as process:
        jobs.until("progress/0.json")
        wait_until(lambda: "worker 1 is not finite (in step 3, which counts nothing)" in events(jobs))
        last, (well, other) = ends(process, tmp_path)
    assert well["row"] == well["steps"]
    assert other["row"] == other["steps"] - 1
    assert "; 1 step of one worker counted nothing (not finite, or refused)" in last


def test_one_that_is_not_finite_is_replaced(jobs: Jobs, tmp_path: Path) -> None:
    options = ["--sync", "asp", "--on-trouble", "nan=replace"]
    with jobs.started(*options, SCRIPT, str(tmp_path), "always") as process:
        jobs.until("progress/0.json")
        wait_until(lambda: "worker 1 was killed by SIGKILL and is started again (1 of 3)" in events(jobs))
        assert "worker 1 is not finite and is replaced (in step " in events(jobs)
        wait_until(lambda: jobs.record()["workers"][1]["restarts"] == 1)
        _, (_, other) = ends(process, tmp_path)
    assert other["row"] == other["steps"] + 3  # of its first life


def test_without_a_policy_it_ends_the_job_and_names_worker_and_step(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run("--sync", "asp", SCRIPT, str(tmp_path), "once")
    assert result.returncode == 1
    assert "BadInput: worker 1, step 3: the loss is nan" in result.stderr


@pytest.mark.parametrize("word", ["asp", pytest.param("bsp", marks=pytest.mark.soak)])
def test_workers_say_that_they_wait_for_a_server_while_it_stands_still(
    jobs: Jobs, tmp_path: Path, word: str
) -> None:
    with jobs.started("--sync", word, SCRIPT, str(tmp_path), "well") as process:
        wait_until(lambda: all(said(jobs, rank, "step") for rank in range(2)), process)
        assert [said(jobs, rank, "waiting_for_servers") for rank in range(2)] == [[], []]
        (server,) = (server["pid"] for server in jobs.record()["servers"])
        stop(server)
        try:
            wait_until(lambda: all(said(jobs, rank, "waiting_for_servers") == [0] for rank in range(2)))
            shown = jobs.shoal("status", "job").stdout.splitlines()
        finally:
            os.kill(server, signal.SIGCONT)
        wait_until(lambda: not any(said(jobs, rank, "waiting_for_servers") for rank in range(2)))
        ends(process, tmp_path)
    assert len([line for line in shown if line.startswith("worker") and "server 0" in line]) == 2, shown


def said(jobs: Jobs, rank: int, what: str) -> Any:
    try:
        return json.loads(jobs.path(f"progress/{rank}.json").read_text())[what]
    except FileNotFoundError:
        return None


def test_a_question_that_waits_for_other_workers_is_no_wait_for_a_server() -> None:
    with shoal.LocalCluster() as cluster, cluster.connect() as client, cluster.connect() as other:
        rounds = [Rounds(one, rank, 2) for rank, one in enumerate((client, other))]
        for one in rounds:
            one.open(take="round", quorum=2, count=1, slack=-1)
        with pytest.raises(shoal.errors.Timeout):
            rounds[0].advance(0, weight=1.0, timeout=1.5)
        assert client.stats()["waits_s"] == [0.0]
        table = client.table("t", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        stop(cluster.servers[0].pid)
        with pytest.raises(shoal.errors.Timeout):
            table.pull([1], timeout=0.5)
        assert client.stats()["waits_s"][0] > 0.4
        os.kill(cluster.servers[0].pid, signal.SIGCONT)
        wait_until(lambda: client.stats()["waits_s"] == [0.0])


@pytest.mark.soak  # a loss must have a past of ten seconds before it explodes
def test_one_whose_loss_explodes_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    options = ["--sync", "asp", "--on-trouble", "exploding=refuse"]
    with jobs.started(*options, SCRIPT, str(tmp_path), "exploding") as process:
        jobs.until("progress/1.json")
        times: set[float] = set()
        wait_until(
            lambda: times.add(json.loads(jobs.path("progress/1.json").read_text())["time"]) or len(times) > 13
        )
        (tmp_path / "explode").touch()
        seen = "worker 1 is exploding: it counts nothing (its loss is 100 after 1"  # or 1.1, or 1.2
        wait_until(lambda: seen in events(jobs), process)
        last, (well, other) = ends(process, tmp_path)
    assert well["row"] == well["steps"]
    assert other["refused"] > 0
    assert other["row"] == other["steps"] - other["refused"]
    assert f"; {other['refused']} steps of one worker counted nothing" in last


@pytest.mark.soak  # a step's usual time is known after ten seconds
def test_one_that_is_slow_is_scaled(jobs: Jobs, tmp_path: Path) -> None:
    options = ["--sync", "asp", "--on-trouble", "slow=scale"]
    with jobs.started(*options, SCRIPT, str(tmp_path), "slow") as process:
        jobs.until("progress/1.json")
        seen = "worker 1 is slow: it counts a tenth (a step takes it "
        wait_until(lambda: seen in events(jobs), process)
        last, (well, other) = ends(process, tmp_path)
    assert well["row"] == well["steps"]
    assert other["less"] > 0
    assert other["row"] == pytest.approx(other["counted"], rel=1e-4)
    assert other["counted"] == pytest.approx(other["steps"] - 0.9 * other["less"])
    assert "counted nothing" not in last
