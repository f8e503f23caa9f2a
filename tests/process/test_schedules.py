"""Schedulers of jobs whose workers die, that go on from a checkpoint, or that grow: the learning rate of each
step is that of a job which was let alone."""

import json
import os
import signal
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, Jobs, all_end, wait_until

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.place import Place
from shoal.train.progress import progress_path

pytestmark = pytest.mark.process
SCRIPT = str(Path(__file__).with_name("scheduled_script.py"))
LR, BATCHES, PASSES = 0.05, 8, 4  # of that script


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def moved(kind: str, epoch: int, steps: int) -> float:
    """The learning rate of a step in plain torch, behind so many others."""
    if kind == "step":
        return LR * 0.95**steps
    by = {"epoch": epoch, "early": epoch + 1, "plateau": max(0, epoch - 1)}  # its first metric is the best
    return LR * 0.7 ** by[kind]


def check(out: Path, kind: str, workers: int, *, own: bool = False) -> None:
    """`own`: by the steps of each worker, of which another life makes up for those that it has missed."""
    for rank in range(workers):
        lines = [json.loads(line) for line in (out / f"{rank}.lines").read_text().splitlines()]
        steps = range(len(lines)) if own else [clock for _, clock, _ in lines]
        wrong = [
            (line, made)
            for line, made in zip(lines, steps, strict=True)
            if line[2] != pytest.approx(moved(kind, line[0], made), rel=1e-9)
        ]
        assert wrong == [], f"worker {rank}"


def model(out: Path, rank: int = 0) -> object:
    return json.loads((out / f"{rank}.json").read_text())


def soak(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("word", "loop", "kind", "death"),
    [
        ("bsp", "epochs", "epoch", "0:2:within"),
        soak("asp", "epochs", "epoch", "1:2:behind"),
        soak("bsp", "epochs", "epoch", "1:0:behind"),
        soak("bsp", "epochs", "early", "0:2:begins"),
        soak("bsp", "epochs", "plateau", "0:2:within"),
        soak("bsp", "range", "plateau", "0:2:within"),
        soak("bsp", "range", "epoch", "0:2:within"),
        soak("bsp", "range", "early", "1:2:within"),
        soak("bsp", "epochs", "step", "0:2:within"),
        soak("bsp", "range", "step", "0:2:within"),
        soak("bsp", "epochs", "step", "1:0:within"),
        soak("asp", "epochs", "step", "1:2:within"),
        soak("ssp:1", "epochs", "epoch", "0:1:begins"),
        soak("average:2", "epochs", "epoch", "0:2:within"),
        soak("easgd:2", "epochs", "epoch", "1:2:within"),
        soak("downpour:2,2", "epochs", "epoch", "1:2:within"),
        soak("hogwild", "epochs", "epoch", "1:2:within"),
    ],
)
def test_one_that_replaces_a_worker(
    jobs: Jobs, tmp_path: Path, word: str, loop: str, kind: str, death: str
) -> None:
    out = tmp_path / "out"
    result = jobs.run("--workers", "2", "--sync", word, SCRIPT, str(out), loop, kind, "4", f"die:{death}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"worker {death[0]} was killed by SIGKILL and is started again" in result.stderr
    check(out, kind, 2, own=True)


@pytest.mark.parametrize(
    ("loop", "kind", "place"),
    [
        soak("epochs", "epoch", "within"),
        soak("epochs", "epoch", "behind"),
        soak("range", "epoch", "behind"),
        soak("epochs", "early", "within"),
        soak("epochs", "early", "behind"),
        soak("epochs", "step", "behind"),
        soak("epochs", "plateau", "within"),
    ],
)
def test_the_only_worker_dies_and_the_job_ends_with_the_same_model(
    jobs: Jobs, tmp_path: Path, loop: str, kind: str, place: str
) -> None:
    for out, death in (("whole", []), ("out", [f"die:0:1:{place}"])):
        arguments = [SCRIPT, str(tmp_path / out), loop, kind, str(PASSES), *death]
        result = jobs.run("--workers", "1", *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        check(tmp_path / out, kind, 1)
    assert model(tmp_path / "out") == model(tmp_path / "whole")


def clock(url: Path) -> int:
    """Of the newest checkpoint that is whole."""
    if not list(url.glob("*/manifest.json")):
        return 0
    return max(manifest_.latest(Place(str(url))).clocks, default=0)


@pytest.mark.parametrize(
    ("word", "loop", "kind", "workers"),
    [
        soak("bsp", "epochs", "epoch", "2"),
        soak("bsp", "range", "epoch", "2"),
        soak("bsp", "epochs", "early", "2"),
        soak("bsp", "epochs", "plateau", "2"),
        soak("bsp", "epochs", "step", "2"),
        soak("bsp", "epochs", "epoch", "3"),
        soak("allreduce", "epochs", "epoch", "2"),
        soak("average:2", "epochs", "epoch", "2"),
    ],
)
def test_a_job_that_goes_on_from_a_checkpoint(
    jobs: Jobs, tmp_path: Path, word: str, loop: str, kind: str, workers: str
) -> None:
    url, killed, again = tmp_path / "ckpt", tmp_path / "killed", tmp_path / "again"
    saves = ["--sync", word, "--checkpoint", str(url), "--every", "0.2s"]
    with jobs.started("--workers", "2", *saves, SCRIPT, str(killed), loop, kind, "6", "pace:0.05") as process:
        wait_until(lambda: clock(url) > (9 if word == "average:2" else 2 * BATCHES), process)
        pids = jobs.pids()
        os.kill(pids[0], signal.SIGKILL)
        process.wait()
        all_end(pids)
    assert clock(url) < 6 * BATCHES
    for out, how in ((again, saves), (tmp_path / "whole", ["--sync", word])):
        arguments = ["--workers", workers, *how, SCRIPT, str(out), loop, kind, "6"]
        done = jobs.shoal("run", "--name", out.name, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        check(out, kind, int(workers))
    begun = json.loads((again / "0.lines").read_text().splitlines()[0])[0]
    assert begun > 0
    if workers == "2" and word != "average:2":
        for rank in (0, 1):
            assert model(again, rank) == model(tmp_path / "whole", rank)


@pytest.mark.parametrize(
    ("word", "loop", "kind"),
    [
        soak("bsp", "epochs", "epoch"),
        soak("asp", "epochs", "epoch"),
        soak("bsp", "range", "epoch"),
        soak("bsp", "epochs", "early"),
        soak("bsp", "epochs", "step"),
        soak("bsp", "epochs", "plateau"),
        soak("average:2", "epochs", "epoch"),
    ],
)
def test_workers_that_come_later(jobs: Jobs, tmp_path: Path, word: str, loop: str, kind: str) -> None:
    out = tmp_path / "out"
    arguments = ["--sync", word, SCRIPT, str(out), loop, kind, str(PASSES)]
    with jobs.started("--workers", "2", *arguments, "hold:2") as process:
        wait_until((out / "hold-2").exists, process)
        assert jobs.shoal("scale", "job", "--workers", "3").returncode == 0
        wait_until(lambda: progress_path(jobs.path("."), 2).exists(), process)
        (out / "go-2").touch()
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
    check(out, kind, 3)
    if word == "bsp":
        whole = jobs.run("--workers", "1", SCRIPT, str(tmp_path / "whole"), loop, kind, str(PASSES))
        assert whole.returncode == 0, whole.stderr
        (weight, bias), lr = model(out, 2)
        expected = model(tmp_path / "whole")
        assert weight[0] == pytest.approx(expected[0][0][0], rel=1e-4)
        assert (bias, lr) == (pytest.approx(expected[0][1], rel=1e-4), pytest.approx(expected[1]))
