"""G4 on real processes: the history of a job under `ssp`, with workers that are slow now and then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.history import History, check

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("bounded_script.py")
WORKERS, STEPS, BOUND = 2, 25, 1


def test_a_job_of_two_workers_is_bounded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal.cli", "run", "--workers", str(WORKERS), "--servers", "2"]
    command += ["--sync", f"ssp:{BOUND},scale=1", "--directory", str(tmp_path / "job"), str(SCRIPT)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(tmp_path), str(STEPS)],
        capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    history = History(WORKERS)
    for rank in range(WORKERS):
        history.add((tmp_path / f"{rank}.json").read_text())
    check(history, BOUND)
    assert history.largest_lead() == BOUND
    assert len(history.reads) == 2 * STEPS * WORKERS
