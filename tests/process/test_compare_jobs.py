"""`shoal compare` with real jobs: its figures, its mistakes, its end by a signal."""

import json
import signal
import struct
import subprocess
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, SHOAL, Jobs, all_end, wait_until

from shoal.train.history import history_path, read_history

pytestmark = pytest.mark.process
SCRIPT = str(Path(__file__).with_name("compare_scripts.py"))


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path / "state")


def compare(jobs: Jobs, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return jobs.shoal("compare", "--out", str(out), *arguments)


@pytest.mark.soak
def test_a_straggler_makes_others_wait_under_bsp(jobs: Jobs, tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy.json"
    arguments = ["--sync", "bsp,asp,scale=1", "--straggler", "1:60ms", "--seeds", "1", "--target", "loss=0.5"]
    done = compare(jobs, out, *arguments, "--json", str(copy), SCRIPT, "train", "{seed}")
    assert done.returncode == 0, done.stderr
    assert "asp,scale=1" in done.stdout
    results = json.loads((out / "results.json").read_text())
    assert copy.read_text() == (out / "results.json").read_text()
    assert [run["word"] for run in results["runs"]] == ["bsp", "asp,scale=1"]
    for run in results["runs"]:
        word = run["word"]
        fast, slow = (read_history(history_path(out / f"{word}-0", rank)) for rank in (0, 1))
        assert fast[-1].samples + slow[-1].samples == 2 * 96
        assert results["words"][word]["seconds to loss <= 0.5"]["median"] <= run["seconds"]
        assert run["bytes_sent"] > 0
        if word == "bsp":
            assert fast[-1].steps == slow[-1].steps == 24
            assert fast[-1].waited_s > 0.4  # the straggler slept 24 times 60 ms
            assert run["idle"] > 0.05
        else:
            assert fast[-1].steps + slow[-1].steps == 48  # who makes how many is the moment's affair


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("silent", "compare_scripts.py reported nothing in its first run (sync bsp): call worker.report"),
        ("pretend", "target f1 >= 0.5: "),
        ("broken", "ValueError: a mistake in the script"),
        ("own", "its shoal.join says sync ssp:2, so no word can be tried: leave out sync="),
    ],
)
def test_what_the_first_run_shows_ends_it(jobs: Jobs, tmp_path: Path, case: str, said: str) -> None:
    out = tmp_path / "out"
    done = compare(jobs, out, "--sync", "bsp,asp", "--target", "f1>=0.5", SCRIPT, case)
    assert done.returncode == 2
    assert said in done.stderr
    assert [path.name for path in out.iterdir()] == ["bsp-0"]
    if case == "pretend":
        assert "does not report 'f1'; it reports: auc, loss" in done.stderr


def test_a_comparison_leaves_a_table_its_results_and_a_picture(jobs: Jobs, tmp_path: Path) -> None:
    arguments = ["--sync", "bsp,ssp:1", "--seeds", "1", "--workers", "1", "--target", "loss=0.4"]
    done = compare(jobs, tmp_path, *arguments, SCRIPT, "pretend")
    assert done.returncode == 0, done.stderr
    assert "[2/2] ssp:1, seed 0: " in done.stderr
    assert " s, loss 0.3333" in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["workers"], results["target"]) == (1, "loss <= 0.4")
    assert [(run["word"], run["seed"], run["code"]) for run in results["runs"]] == [
        ("bsp", 0, 0),
        ("ssp:1", 0, 0),
    ]
    for run in results["runs"]:
        points = [(steps, round(value, 3)) for _, steps, value in run["series"]["loss"]]
        assert points == [(0, 1.0), (1, 0.5), (2, 0.333)]
    for word, row in results["words"].items():
        assert word in done.stdout
        assert row["final loss"]["median"] == pytest.approx(1 / 3)
        assert row["final loss"]["difference"] == (None if word == "bsp" else "not shown")
        assert row["steps a worker to loss <= 0.4"]["median"] == 2
    picture = (tmp_path / "compare.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">2I", picture[16:24]) == (750, 420)


def test_a_run_that_fails_is_told_and_the_others_count(jobs: Jobs, tmp_path: Path) -> None:
    arguments = ["--sync", "bsp,asp", "--seeds", "1", "--workers", "1", "--target", "loss=0.1"]
    done = compare(jobs, tmp_path, *arguments, SCRIPT, "pretend")
    assert done.returncode == 1
    assert "[2/2] asp, seed 0: worker 0 failed with code 1:" in done.stderr
    assert "ValueError: only this one fails" in done.stderr
    assert "not reached" in done.stdout
    assert "1 failed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sync", "bsp,aps", SCRIPT], "Did you mean asp"),
        (["--sync", "bsp", "--straggler", "2:5x", SCRIPT], "ranks are 0 to 1"),
        (["--sync", "bsp", "--target", "loss", SCRIPT], "target is 'loss'"),
        (["--sync", "bsp", "--json", "missing/x.json", SCRIPT], "cannot write missing/x.json"),
    ],
)
def test_bad_input_is_one_line_and_runs_nothing(
    jobs: Jobs, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = compare(jobs, tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert not jobs.root.exists()


@pytest.mark.soak
def test_a_run_that_is_stopped_by_its_timeout_counts(jobs: Jobs, tmp_path: Path) -> None:
    done = compare(
        jobs, tmp_path, "--sync", "asp", "--seeds", "1", "--workers", "1", "--timeout", "15", SCRIPT, "stay"
    )
    assert done.returncode == 0, done.stderr
    assert "loss 0.5, stopped by --timeout" in done.stderr


def test_a_signal_ends_the_job_and_the_comparison(jobs: Jobs, tmp_path: Path) -> None:
    command = [*SHOAL, "compare", "--sync", "bsp,asp", "--out", str(tmp_path), SCRIPT, "stay"]
    with subprocess.Popen(command, env=jobs.environment, stderr=subprocess.PIPE, text=True) as process:
        ready = [tmp_path / "bsp-0" / f"ready-{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in ready))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "stopped; what the finished runs did is in" in errors
    all_end([int(path.read_text()) for path in ready])
