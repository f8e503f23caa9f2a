"""Every role of a job is killed and stopped at random moments, under every family of sync words."""

import itertools
from pathlib import Path

import pytest
from tests.process.kills import HOWS, ROLES, WORDS, Fault, check, suffer

pytestmark = pytest.mark.process
# Those that no other test has outside of soaks: workers die and stop in test_deaths.py, the coordinator dies in
# test_coordinator_deaths.py, the supervisor in test_checkpoint_jobs.py and test_run.py.
USUAL = [("server", "SIGKILL"), ("coordinator", "SIGSTOP")]


@pytest.mark.parametrize(("role", "how"), USUAL)
def test_the_job_goes_on_and_its_counts_are_exact(role: str, how: str, tmp_path: Path) -> None:
    fault = Fault(role, how, "bsp")
    check(fault, suffer(tmp_path, fault))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(("role", "how", "word"), list(itertools.product(ROLES, HOWS, WORDS)))
def test_any_role_under_any_word(role: str, how: str, word: str, seed: int, tmp_path: Path) -> None:
    fault = Fault(role, how, word, seed)
    check(fault, suffer(tmp_path, fault))
