"""Every role of a job is killed and stopped at random moments, under every family of sync words."""

from pathlib import Path

import pytest
from tests.process.kills import Fault, check, faults, suffer

pytestmark = pytest.mark.process
# Those that no other test has outside of soaks: workers die and stop in test_deaths.py, the coordinator in
# test_coordinator_deaths.py, the supervisor dies in test_checkpoint_jobs.py and test_run.py.
USUAL = [Fault("server", "SIGKILL", "bsp"), Fault("coordinator", "SIGSTOP", "bsp")]
SEEDS = range(1, 4)


@pytest.mark.parametrize("fault", USUAL, ids=str)
def test_the_job_goes_on_and_its_counts_are_exact(fault: Fault, tmp_path: Path) -> None:
    check(fault, suffer(tmp_path, fault))


@pytest.mark.soak
@pytest.mark.parametrize("fault", [fault for seed in SEEDS for fault in faults(seed)], ids=str)
def test_any_role_at_any_moment_under_any_word(fault: Fault, tmp_path: Path) -> None:
    check(fault, suffer(tmp_path, fault))
