"""`shoal run --autoscale`: what it says of a job that trains, and what it does where it may.

A step sleeps, and every worker takes whole batches: twice the workers are twice as fast.
"""

from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until

pytestmark = pytest.mark.process
ENDLESS = str(Path(__file__).with_name("endless_script.py"))


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def events(jobs: Jobs) -> list[str]:
    return [event["text"] for event in jobs.record()["events"]] if jobs.path("job.json").exists() else []


def run_until(jobs: Jobs, out: Path, autoscale: str, beginning: str) -> list[str]:
    """The events of a job that trains until there is one that begins so, and then ends well."""
    options = ["--workers", "1", "--sync", "asp", "--batch", "each", "--autoscale", autoscale]
    with jobs.started(*options, ENDLESS, str(out), "50") as process:
        wait_until(lambda: any(text.startswith(beginning) for text in events(jobs)))
        (out / "stop").touch()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + errors
    assert beginning in jobs.path("logs/job.log").read_text()
    return events(jobs)


@pytest.mark.soak
def test_a_dry_run_says_what_it_would_do_and_does_nothing(jobs: Jobs, tmp_path: Path) -> None:
    said = run_until(jobs, tmp_path, "1:2,every=1s", "autoscale would go to 2 workers (dry run): ")
    assert len(said) == 1
    assert len(jobs.record()["workers"]) == 1


@pytest.mark.soak
def test_a_job_goes_to_the_size_that_is_fastest_and_stays(jobs: Jobs, tmp_path: Path) -> None:
    said = run_until(jobs, tmp_path, "1:2,every=2s,apply", "autoscale: stay with 2 workers: ")
    assert said[0].startswith("autoscale: go to 2 workers: ")
    assert said[1] == "scaled from 1 to 2 workers"
    assert len(said) == 3
