"""The tests of the tests: deliberate bugs, compiled in by `make mutants`, which the simulator must find.

Each hunt is a process of its own, with the extension module of build/mutants in place of Shoal's.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200  # within so many each bug must be found
SHRUNK_ACTIONS_MAX = 6
TIMEOUT_S = 60

# What each does wrong is beside its SHOAL_MUTANT in core/: the server's first, then the client's.
MUTANTS = [
    "dedupe_off",
    "accept_old_incarnation",
    "forget_below_low",
    "newest_only",
    "few_records",
    "reconnect_forgets",
    "window_ignored",
    "low_too_high",
    "retry_renamed",
    "never_again",
    "ack_too_early",
]
ROUND_MUTANTS = ["any_life", "late_counts", "count_requests", "commits_once"]
CHAIN_MUTANTS = [
    "fill_any_term",
    "ack_unheld",
    "log_not_sent_again",
    "fill_without_log",
    "accept_old_term",
    "entries_out_of_turn",
    "image_without_records",
    "early_forgotten",
]
CHAIN_ROUND_MUTANTS = ["commit_alone", "image_of_old_term"]


@pytest.fixture(scope="module")
def core() -> Path:
    built = sorted((ROOT / "build" / "mutants").glob("_core*.so"))
    if not built:
        pytest.skip("no build with mutants: `make mutants` makes it")
    return built[0]


def hunt(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sim", f"0:{SEEDS}", "--core", str(core), *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulator_finds(mutant: str, core: Path) -> None:
    found = hunt(core, "--no-shrink", "--mutant", mutant)
    assert re.match(r"seed \d+ failed: ", found.stdout), found
    assert found.returncode == 1


@pytest.mark.parametrize("mutant", ROUND_MUTANTS)
def test_the_simulator_of_rounds_finds(mutant: str, core: Path) -> None:
    found = hunt(core, "--rounds", "--mutant", mutant)
    assert re.match(r"seed \d+ failed: ", found.stdout), found
    assert found.returncode == 1


@pytest.mark.parametrize("mutant", CHAIN_MUTANTS)
def test_the_simulator_of_chains_finds(mutant: str, core: Path) -> None:
    found = hunt(core, "--chains", "--no-shrink", "--mutant", mutant)
    assert re.match(r"seed \d+ failed: ", found.stdout), found
    assert found.returncode == 1


@pytest.mark.parametrize("mutant", CHAIN_ROUND_MUTANTS)
def test_the_simulator_of_rounds_over_chains_finds(mutant: str, core: Path) -> None:
    found = hunt(core, "--chains", "--rounds", "--mutant", mutant)
    assert re.match(r"seed \d+ failed: ", found.stdout), found
    assert found.returncode == 1


@pytest.mark.parametrize("kind", [[], ["--rounds"], ["--chains"], ["--chains", "--rounds"]])
def test_without_a_mutant_the_same_seeds_pass(core: Path, kind: list[str]) -> None:
    assert hunt(core, *kind).stdout.startswith(f"{SEEDS} seeds passed")


def test_a_failing_seed_is_shrunk_to_a_few_actions(core: Path) -> None:
    found = hunt(core, "--mutant", "dedupe_off").stdout
    assert 1 <= found.count("Action(") <= SHRUNK_ACTIONS_MAX, found
    assert "fails with: table" in found


def test_every_mutant_in_the_core_is_hunted() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "core").rglob("*.[ch]*"))
    hunted = {*MUTANTS, *ROUND_MUTANTS, *CHAIN_MUTANTS, *CHAIN_ROUND_MUTANTS}
    assert set(re.findall(r"SHOAL_MUTANT\((\w+)\)", sources)) - {"name"} == hunted
