"""The tests of the tests: deliberate bugs, compiled in by `make mutants`, which the simulator must find.

Each hunt is a process of its own, with the extension module of build/mutants in place of Shoal's.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .kinds import KINDS
from .mutants import CHECKPOINT_MUTANTS, COORDINATOR_MUTANTS, CUT_MUTANTS, LOSS_MUTANTS, PYTHON_MUTANTS

ROOT = Path(__file__).resolve().parents[2]
CALM_SEEDS = 20  # of this build; of the one that ships test_simulator.py runs them all
SHRUNK_ACTIONS_MAX = 6
# Within these a bug must be found; of pushes within fewer.
HUNT_SEEDS = 400
PUSH_SEEDS = 200
# Rare ones are hunted from here on, near a seed that finds them: from 0 on it takes two minutes longer.
HUNT_FROM = {
    "shows_unheld": 4800,
    "ends_again": 3780,
    "grown_over": 2990,
    "gone_untold": 2860,
    "gone_is_awaited": 2505,
    "unplaced_is_last": 1000,
    "any_attempt": 560,
    "cut_without_unseen": 240,
    "grow_anytime": 150,
    "newcomer_unknown": 130,
    "cut_for_absent": 90,
    "late_ack": 80,
    "records_beyond_cut": 80,
    "answered_first": 60,
    "image_of_old_term": 50,
    "weak_to_servers": 30,
}
TIMEOUT_S = 180

# What each does wrong is beside its SHOAL_MUTANT in core/, or in mutants.py.
MUTANTS = {
    "pushes": [
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
    ],
    "rounds": ["any_life", "late_counts", "count_requests", "commits_once"],
    "chains": [
        "fill_any_term",
        "ack_unheld",
        "log_not_sent_again",
        "fill_without_log",
        "accept_old_term",
        "entries_out_of_turn",
        "image_without_records",
        "early_forgotten",
        "settings_at_once",
        "shows_unheld",
    ],
    "chain-rounds": ["commit_alone", "image_of_old_term"],
    "weak": ["loss_off_by_one", "weak_to_servers", "late_ack"],
    "reload": ["takeover_forgets", *(mutant.__name__ for mutant in LOSS_MUTANTS)],
    "passes": ["leased_twice", "units_of_the_dead", "kept_though_taken"],
    "growth": [
        "newcomer_unknown",
        "growth_untold",
        "grow_anytime",
        "cut_for_absent",
        "grown_over",
        "ends_again",
    ],
    "coordinator": [
        "unplaced_is_last",
        "gone_is_awaited",
        *(mutant.__name__ for mutant in COORDINATOR_MUTANTS),
    ],
    "cuts": [
        "held_in_flight",
        "short_hold",
        "image_without_records",
        *(mutant.__name__ for mutant in CUT_MUTANTS),
    ],
    "journal": ["batch_in_pieces"],
    "checkpoints": [mutant.__name__ for mutant in CHECKPOINT_MUTANTS],
}


@pytest.fixture(scope="module")
def core() -> Path:
    built = sorted((ROOT / "build" / "mutants").glob("_core*.so"))
    if not built:
        pytest.skip("no build with mutants: `make mutants` makes it")
    return built[0]


def hunt(
    core: Path, kind: str, *arguments: str, seeds: int = 0, first: int = 0
) -> subprocess.CompletedProcess[str]:
    last = first + (seeds or KINDS[kind].seeds)
    command = [sys.executable, "-m", "tests.sim", kind, f"{first}:{last}", "--core", str(core), *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.parametrize(("kind", "mutant"), [(kind, each) for kind in MUTANTS for each in MUTANTS[kind]])
def test_the_simulator_finds(kind: str, mutant: str, core: Path) -> None:
    seeds = PUSH_SEEDS if kind == "pushes" else HUNT_SEEDS
    first = HUNT_FROM.get(mutant, 0)
    found = hunt(core, kind, "--no-shrink", "--mutant", mutant, seeds=seeds, first=first)
    seed = re.match(r"seed (\d+) failed: ", found.stdout)
    assert seed, found
    assert found.stdout.rstrip().endswith(f"replay: python -m tests.sim {kind} {seed[1]}")
    assert found.returncode == 1


@pytest.mark.parametrize("kind", MUTANTS)
def test_without_a_mutant_the_same_seeds_pass(core: Path, kind: str) -> None:
    assert hunt(core, kind, seeds=CALM_SEEDS).stdout.startswith(f"{CALM_SEEDS} seeds passed")


@pytest.mark.parametrize(("kind", "mutant"), [("pushes", "dedupe_off"), ("checkpoints", "delta_of_unsaved")])
def test_a_failing_seed_is_shrunk_to_a_few_actions(core: Path, kind: str, mutant: str) -> None:
    found = hunt(core, kind, "--mutant", mutant).stdout
    assert 1 <= found.count("Action(") <= SHRUNK_ACTIONS_MAX, found
    assert re.search(r"fails with: (table|\d{6}-)", found), found


def test_every_mutant_is_hunted() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "core").rglob("*.[ch]*"))
    switches = set(re.findall(r"SHOAL_MUTANT\((\w+)\)", sources)) - {"name"}
    assert switches | PYTHON_MUTANTS.keys() == set().union(*MUTANTS.values())
