"""What looks at a job of `shoal run` or ends it (`status`, `logs`, `stop`), and what cannot be run."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, SCRIPT, SHOAL, Jobs, alive, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


# Looking at a job.


def test_status_lists_every_process_and_the_counters(jobs: Jobs) -> None:
    with jobs.started("--workers", "2", "--servers", "2", SCRIPT, "train_then_stay") as process:
        jobs.until("ready-0", "ready-1")
        wait_until(lambda: '"waiting"' in jobs.path("progress/0.json").read_text())
        wait_until(lambda: '"waiting"' in jobs.path("progress/1.json").read_text())
        status = jobs.shoal("status", "--json")
        assert status.returncode == 0, status.stdout
        report = json.loads(status.stdout)
        processes = report["processes"]
        assert [(p["role"], p["index"]) for p in processes] == [
            ("supervisor", 0),
            ("coordinator", 0),
            ("server", 0),
            ("server", 1),
            ("worker", 0),
            ("worker", 1),
        ]
        assert sorted(p["pid"] for p in processes) == sorted(jobs.pids())
        assert [p["state"] for p in processes] == [*4 * ["up"], "waiting", "waiting"]
        assert [p["clock"] for p in processes] == [None, None, None, None, 5, 5]
        assert all(p["address"] for p in processes[1:4])
        assert report["counters"]["samples"] == 320
        assert report["counters"]["clock_max"] == 5
        assert (report["state"], report["sync"], report["job"]) == ("running", "bsp", "job")
        assert [(t["name"], t["rows"]) for t in report["tables"]] == [("rows", 5)]
        shown = jobs.shoal("status", "job").stdout
        assert re.search(r"worker +0 +\d+ +waiting +5 +160 +0.25 +1", shown)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)


def test_status_of_a_job_that_has_ended(jobs: Jobs) -> None:
    assert jobs.run("--workers", "1", SCRIPT, "fail", "0", "3").returncode == 3
    result = jobs.shoal("status", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 2
    assert (report["state"], report["code"]) == ("ended", 3)
    assert report["reason"] == "worker 0 failed with code 3"
    assert jobs.run("--workers", "1", SCRIPT, "train", "1").returncode == 0
    assert jobs.shoal("status", str(jobs.path(""))).returncode == 0


def test_logs_of_a_job(jobs: Jobs) -> None:
    shown = jobs.run("--workers", "2", SCRIPT, "train", "1")
    assert jobs.shoal("logs", "job", "--worker", "1").stdout == "rank 1 is done\n"
    assert jobs.shoal("logs", "--server", "0").returncode == 0
    everything = jobs.shoal("logs").stdout.splitlines()
    assert sorted(everything) == sorted([*shown.stdout.splitlines(), *shown.stderr.splitlines()])


def test_logs_follow_until_the_job_ends(jobs: Jobs) -> None:
    with jobs.started("--workers", "1", SCRIPT, "sit") as process:
        jobs.until("ready-0")
        command = [*SHOAL, "logs", "--follow"]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=jobs.environment, **pipes) as follower:
            assert "1 worker, 1 server" in follower.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert "stopped by SIGTERM" in follower.stdout.read()
            assert follower.wait(DEADLINE_S) == 0
        assert process.wait(DEADLINE_S) == 143


def test_stop_ends_the_newest_job(jobs: Jobs) -> None:
    with jobs.started("--workers", "2", SCRIPT, "sit") as process:
        jobs.until("ready-0", "ready-1")
        pids = jobs.pids()
        assert jobs.shoal("stop").stdout == "stopped job job\n"
        assert process.wait(DEADLINE_S) == 143
    assert not any(map(alive, pids))
    assert jobs.shoal("stop", "job").stdout == "job job had ended already (code 143)\n"


def test_a_directory_may_be_chosen_and_is_found_by_name(jobs: Jobs, tmp_path: Path) -> None:
    directory = str(tmp_path / "here")
    for _ in range(2):  # the second takes the place of the first
        result = jobs.shoal("run", "--workers", "1", "--directory", directory, SCRIPT, "train", "1")
        assert result.returncode == 0, result.stderr
    for job in ("here", directory):
        assert json.loads(jobs.shoal("status", "--json", job).stdout)["directory"] == directory


# Bad input; the rest of it is in tests/unit/test_launch.py.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "script nowhere.py is not found"),
        (["-m"], "which script?"),
        (["--servers", "65", SCRIPT], "servers is 65; allowed: a whole number from 1 to 64, the number of"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(jobs: Jobs, arguments: list[str], said: str) -> None:
    result = jobs.shoal("run", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert not jobs.root.exists()


def test_a_running_job_keeps_its_name_and_a_foreign_directory_its_files(jobs: Jobs, tmp_path: Path) -> None:
    with jobs.started("--workers", "1", SCRIPT, "sit") as process:
        jobs.until("ready-0")
        result = jobs.run(SCRIPT, "sit")
        assert result.returncode == 2
        assert "error: job 'job' is running in" in result.stderr
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "logs").mkdir()
    result = jobs.shoal("run", "--directory", str(tmp_path / "mine"), SCRIPT, "sit")
    assert result.returncode == 2
    assert "is not the directory of a job" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status"], "no job has run here"),
        (["stop", "x"], "there is no job 'x'"),
        (["logs"], "no job has run here"),
    ],
)
def test_what_is_not_there_is_said(jobs: Jobs, arguments: list[str], said: str) -> None:
    result = jobs.shoal(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr


def test_a_log_that_is_not_there_is_said(jobs: Jobs) -> None:
    assert jobs.run("--workers", "1", SCRIPT, "train", "1").returncode == 0
    result = jobs.shoal("logs", "--worker", "4")
    assert "job job has no worker 4; allowed: 0 to 0" in result.stderr
    assert "choose one" in jobs.shoal("logs", "--worker", "0", "--server", "0").stderr
