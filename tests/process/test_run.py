"""`shoal run` as real processes: how jobs run and end. A case runs a function of run_scripts.py."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, SCRIPT, SHOAL, Jobs, alive, all_end

pytestmark = pytest.mark.process


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


# Ending well.


def test_a_job_ends_well(jobs: Jobs) -> None:
    result = jobs.run("--workers", "2", "--servers", "2", "--on", "local", SCRIPT, "train", "3")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[worker {r}] rank {r} is done" for r in (0, 1)]
    done = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"\[shoal\] job job is done: \d+\.\d s, 3 steps a worker, 192 samples, [\d,]+ samples/s, loss 0.5",
        done,
    )
    assert not any(map(alive, jobs.pids()))
    assert jobs.record()["code"] == 0
    assert not list(jobs.root.rglob("token"))


def test_workers_see_their_place_and_their_arguments(jobs: Jobs) -> None:
    options = ["--workers", "2", "--sync", "ssp:3", "--batch", "each", "--seed", "7"]
    script = [SCRIPT, "show_environment", "--workers", "9", "-m", "--", "x"]
    result = jobs.run(*options, *script)
    lines = [line.removeprefix("[worker 1] ") for line in result.stdout.splitlines() if "[worker 1]" in line]
    assert lines.pop() == "['--workers', '9', '-m', '--', 'x']"
    said = dict(line.split("=", 1) for line in lines)
    assert said["SHOAL_RANK"] == said["RANK"] == said["LOCAL_RANK"] == "1"
    assert said["SHOAL_WORLD_SIZE"] == said["WORLD_SIZE"] == "2"
    assert (said["SHOAL_SYNC"], said["SHOAL_BATCH"], said["SHOAL_SEED"]) == ("ssp:3", "each", "7")
    assert said["SHOAL_JOB"] == str(jobs.path(""))
    assert said["SHOAL_ADDRESS"] == jobs.record()["address"]
    assert said["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(said["MASTER_PORT"]) < 65536


def test_a_token_of_the_environment_does_not_reach_the_workers(jobs: Jobs) -> None:
    jobs.environment["SHOAL_TOKEN"] = "of another cluster"
    assert jobs.run("--workers", "1", SCRIPT, "train", "1").returncode == 0


def test_a_module_runs_and_keeps_its_arguments(jobs: Jobs) -> None:
    result = jobs.run(
        "--workers", "1", "-m", "run_scripts", "show_environment", "--servers", "5", cwd=Path(SCRIPT).parent
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[worker 0] ['--servers', '5']"


def test_lines_are_whole_and_none_is_lost(jobs: Jobs) -> None:
    result = jobs.run("--workers", "2", SCRIPT, "say", "2000")
    assert result.returncode == 0
    for rank in (0, 1):
        prefix = f"[worker {rank}] "
        out = [line for line in result.stdout.splitlines() if line.startswith(prefix)]
        err = [line for line in result.stderr.splitlines() if line.startswith(prefix)]
        assert out == [*(f"{prefix}out {n} {100 * 'x'}" for n in range(2000)), f"{prefix}no end"]
        assert err == [f"{prefix}err {n} {100 * 'y'}" for n in range(2000)]
        log = jobs.path(f"logs/worker-{rank}.log").read_text().splitlines()
        assert sorted(log) == sorted(line.removeprefix(prefix) for line in [*out, *err])


def test_a_reader_that_goes_away_does_not_end_the_job(jobs: Jobs) -> None:
    with jobs.started("--workers", "1", SCRIPT, "say", "20000") as process:
        process.stdout.close()
        process.stderr.close()
        assert process.wait(DEADLINE_S) == 0
    assert jobs.path("logs/worker-0.log").read_text().endswith("no end\n")


# Failing.


@pytest.mark.parametrize("code", [1, 255])
def test_the_code_of_a_worker_is_passed_on(jobs: Jobs, code: int) -> None:
    result = jobs.run("--workers", "2", SCRIPT, "fail", "1", str(code))
    assert result.returncode == code
    assert result.stderr.endswith(f"worker 1 failed with code {code}:\ngoing\n")
    assert not any(map(alive, jobs.pids()))


def test_who_exits_with_a_code_is_named_and_not_who_fails_because_of_it(jobs: Jobs) -> None:
    result = jobs.run("--workers", "2", SCRIPT, "fail_behind", "7")
    assert result.returncode == 7
    assert "[worker 0] ValueError: the other has left" in result.stderr
    assert result.stderr.endswith("worker 1 failed with code 7:\ngoing\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_is_128_and_the_signal(jobs: Jobs, number: signal.Signals) -> None:
    result = jobs.run("--workers", "2", "--max-restarts", "0", SCRIPT, "die", "0", str(int(number)))
    assert result.returncode == 128 + number
    assert f"worker 0 was killed by {number.name}:" in result.stderr


def test_the_traceback_is_shown_again_at_the_end_with_its_rank(jobs: Jobs) -> None:
    result = jobs.run("--workers", "3", SCRIPT, "throw", "1")
    assert result.returncode == 1
    assert "[worker 1] ValueError: the thing itself" in result.stderr
    last = result.stderr[result.stderr.index("\nworker 1 failed with code 1:\n") + 1 :].splitlines()
    assert last[1] == "Traceback (most recent call last):"
    assert "KeyError: 'the cause'" in last
    assert last[-1] == "ValueError: the thing itself"


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_killed(jobs: Jobs) -> None:
    with jobs.started("--workers", "2", "--max-restarts", "0", SCRIPT, "sit_ignoring_sigterm") as process:
        jobs.until("ready-0", "ready-1")
        pids = jobs.pids()
        os.kill(jobs.record()["workers"][0]["pid"], signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 137
    assert not any(map(alive, pids))


def test_a_cluster_that_cannot_start_is_one_sentence(jobs: Jobs) -> None:
    jobs.environment["SHOAL_LOG"] = "loud"
    result = jobs.run(SCRIPT, "sit")
    assert result.returncode == 1
    assert re.fullmatch(
        r"error: the \w+( 0)? ended with code 1 while starting: SHOAL_LOG is .*\n", result.stderr
    )
    record = jobs.record()
    assert (record["state"], record["code"]) == ("ended", 1)


def test_a_lost_server_ends_the_job(jobs: Jobs) -> None:
    jobs.environment["SHOAL_ADDRESS"] = "shoal://127.0.0.1:1"
    with jobs.started("--workers", "1", "--servers", "2", SCRIPT, "sit") as process:
        jobs.until("ready-0")
        os.kill(jobs.record()["servers"][1]["pid"], signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 1
        said = process.stderr.read()
        assert "server 1 (pid " in said
        assert "SHOAL_ADDRESS (shoal://127.0.0.1:1) is not used: a job has servers of its own" in said


def test_a_job_that_is_not_done_in_time_is_stopped(jobs: Jobs) -> None:
    result = jobs.run("--workers", "1", "--timeout", "2", SCRIPT, "sit")
    assert result.returncode == 124
    assert result.stderr.endswith("error: stopped: not done within --timeout 2 s\n")


# Nothing is left behind.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all(jobs: Jobs, number: signal.Signals, code: int) -> None:
    with jobs.started("--workers", "2", SCRIPT, "sit_with_children") as process:
        children = [int(pid) for text in jobs.until("children-0", "children-1") for pid in text.split()]
        pids = [*jobs.pids(), *children]
        assert all(map(alive, pids))
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == code
        assert not any(map(alive, pids))
        assert "Traceback" not in process.stderr.read()


def test_a_second_ctrl_c_does_not_wait(jobs: Jobs) -> None:
    # A first one alone would wait longer than this test does.
    patient = "import shoal.launch.supervisor as s; s._TERMINATE_S = 1e6; from shoal.cli import main; main()"
    command = [sys.executable, "-c", patient]
    with jobs.started("--workers", "2", SCRIPT, "sit_ignoring_sigterm", command=command) as process:
        jobs.until("ready-0", "ready-1")
        process.send_signal(signal.SIGINT)
        said = ""
        while "stopped by Ctrl-C" not in said:
            said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130


def test_a_signal_while_starting_ends_all(jobs: Jobs) -> None:
    with jobs.started("--workers", "2", "--servers", "3", SCRIPT, "sit") as process:
        jobs.until("job.json")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        assert "Traceback" not in process.stderr.read()
    record = jobs.record()
    assert (record["state"], record["code"]) == ("ended", 130)


def test_a_killed_supervisor_leaves_nothing(jobs: Jobs) -> None:
    with jobs.started("--workers", "2", "--servers", "2", SCRIPT, "sit_with_children") as process:
        children = [int(pid) for text in jobs.until("children-0", "children-1") for pid in text.split()]
        pids = [*jobs.pids(), *children]
        guardians = [
            int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        process.kill()
        all_end([*pids, *guardians])
    assert json.loads(jobs.shoal("status", "--json").stdout)["state"] == "lost"
    assert "had ended already (its supervisor was killed)" in jobs.shoal("stop").stdout


def test_what_a_worker_leaves_behind_is_ended(jobs: Jobs) -> None:
    result = jobs.run("--workers", "1", SCRIPT, "leave_a_child_behind")
    assert result.returncode == 0
    assert "[worker 0] the last line, without an end\n" in result.stdout
    assert not alive(int(jobs.until("children-0")[0]))


# Joining.


def test_a_worker_that_never_joins_is_an_error(jobs: Jobs) -> None:
    result = jobs.run("--workers", "1", SCRIPT, "never_join")
    assert result.returncode == 2
    assert result.stderr.endswith("error: worker 0 ended without calling shoal.join()\n")


def test_a_worker_that_has_not_joined_in_time_is_named(jobs: Jobs) -> None:
    with jobs.started(
        "--workers",
        "1",
        "--join-timeout",
        "0.1",
        "-m",
        "timeit",
        "-n1",
        "-r1",
        "import time; time.sleep(100)",
    ) as process:
        said = ""
        while "has not called" not in said:
            said = process.stderr.readline()
        assert said == "[shoal] worker 0 has not called shoal.join() within 0.1 s (--join-timeout)\n"
        status = jobs.shoal("status", "--json")
        assert status.returncode == 2
        report = json.loads(status.stdout)
        assert report["processes"][-1]["state"] == "not joined"
        assert report["problem"] == "worker 0 has not called shoal.join()"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143


def test_others_do_not_wait_for_ever_for_one_that_never_joins(jobs: Jobs) -> None:
    result = jobs.run("--workers", "2", "--join-timeout", "1", SCRIPT, "wait_for_rank_1")
    assert result.returncode == 2
    assert (
        "error: worker 1 has not called shoal.join() within 1 s, and worker 0 waits for it" in result.stderr
    )


# A terminal.


def test_on_a_terminal_there_is_one_display(jobs: Jobs) -> None:
    main, other = os.openpty()
    command = [*SHOAL, "run", "--workers", "2", "--name", "job", SCRIPT, "train_then_stay"]
    environment = {**jobs.environment, "TERM": "xterm"}
    with subprocess.Popen(command, env=environment, stdout=other, stderr=other, stdin=other) as process:
        os.close(other)
        seen = b""
        while not re.search(rb"waiting.+0\.25.+worker 1", seen):
            assert select.select([main], [], [], DEADLINE_S)[0]
            seen += os.read(main, 1 << 16)
        process.send_signal(signal.SIGINT)
        while chunk := read_terminal(main):
            seen += chunk
        assert process.wait(DEADLINE_S) == 130
    os.close(main)
    assert b"samples/s" in seen
    assert b"\x1b[36m[worker 0] \x1b[0mrank 0 is done" in seen
    assert b"stopped by Ctrl-C" in seen


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""
