"""Mistakes that need real processes, and what is seen of a worker that others wait for."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_jobs import CLEAN, Jobs, wait_until

import shoal
from shoal.cli.job_status import collect
from shoal.launch.records import find_job
from shoal.train.progress import Progress, progress_path, read_progress

pytestmark = pytest.mark.process
TRAIN = """
import os, sys, time
import torch
import shoal

if os.environ["SHOAL_RANK"] == "1" and "late" in sys.argv:
    time.sleep(120)
worker = shoal.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=8)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
while not os.path.exists(os.environ["SHOAL_JOB"] + "/enough"):
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        worker.report(loss=loss)
        if "raises" in sys.argv and worker.rank == 1 and worker.step == 3:
            raise KeyError("what only worker 1 has met")
    if worker.mean(float(os.path.exists(os.environ["SHOAL_JOB"] + "/enough"))):
        break
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_mistake_a_script_that_never_joins(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("print('trained')\n")
    result = jobs.run(str(script))
    assert result.returncode == 2
    assert "ended without calling shoal.join()" in result.stderr


def test_a_worker_that_never_joins_is_named_by_those_that_wait(jobs: Jobs, script: str) -> None:
    result = jobs.run("--join-timeout", "1", script, "late")
    assert result.returncode == 2, result.stderr
    assert "worker 1 has not called shoal.join() within 1 s, and worker 0 waits for it" in result.stderr


def test_a_worker_that_stands_still_is_named_as_the_one_waited_for(jobs: Jobs, script: str) -> None:
    def said(rank: int) -> Progress:
        return read_progress(progress_path(jobs.path("."), rank)) or Progress(rank=rank)

    with jobs.started("--sync", "asp:staleness", "--max-restarts", "0", script) as job:
        wait_until(lambda: all(said(rank).clock > 8 for rank in (0, 1)))
        os.kill(said(1).pid, signal.SIGSTOP)
        wait_until(lambda: said(0).waiting_for == (1,))
        # What `shoal status` shows, in time: once its lease is over nobody waits for it any more.
        shown = collect(find_job(str(jobs.path("."))), 5.0)
        (waiting,) = (p for p in shown["processes"] if p["role"] == "worker" and p["index"] == 0)
        assert (waiting["state"], waiting["waiting_for"]) == ("waiting", [1])
        assert min(waiting["clock"], waiting["samples"], waiting["loss"]) > 0
        os.kill(said(1).pid, signal.SIGCONT)
        jobs.path("enough").touch()
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert "every sample used once in each" in errors
    after = json.loads(jobs.shoal("status", "--json", "job").stdout)
    assert after["data"]["units"] == after["data"]["once"] > 0
    assert after["counters"]["staleness"] is not None


@pytest.mark.parametrize(
    "word", ["bsp", pytest.param("allreduce", marks=[pytest.mark.soak, pytest.mark.gloo])]
)
def test_what_one_worker_raises_is_the_reason_and_not_what_others_meet_then(
    jobs: Jobs, script: str, word: str
) -> None:
    result = jobs.run("--sync", word, script, "raises")
    assert result.returncode == 1, result.stderr
    last = result.stderr[result.stderr.rindex("\nworker 1 failed with code 1:\n") + 1 :].splitlines()
    assert last[1] == "Traceback (most recent call last):"
    assert last[-1] == "KeyError: 'what only worker 1 has met'"
    assert result.stderr.count("Traceback") == 2, result.stderr  # as it came, and at the end


@pytest.mark.gloo
def test_workers_of_torchrun_train_against_servers_that_stay(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("training_script.py")
    with shoal.LocalCluster(servers=2) as cluster:
        # One after the other, so that the second job finds what the first has left at the servers.
        for word in ("bsp", "allreduce"):
            where = tmp_path / word
            where.mkdir()
            environment = {
                **CLEAN,
                "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
                "SHOAL_ADDRESS": cluster.address,
                "SHOAL_TOKEN_FILE": str(cluster.token_file),
                "SHOAL_SYNC": word,
                "OMP_NUM_THREADS": "1",
            }
            command = [*torchrun, str(script), str(where)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
            assert done.returncode == 0, done.stdout + done.stderr
            found = [json.loads((where / f"{rank}.json").read_text()) for rank in range(2)]
            assert all(one["once"] and one["final"] < 1.2 for one in found), found
            assert found[0]["mean"] == pytest.approx((found[0]["final"] + found[1]["final"]) / 2, rel=1e-5)
