"""Workers that exchange gradients or models among themselves die and come, by real jobs: the others go on."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_jobs import Jobs

pytestmark = [pytest.mark.process, pytest.mark.gloo]
DYING = str(Path(__file__).with_name("dying_script.py"))
SAMPLES, BATCH, PASSES, WORKERS = 64, 8, 3, 3  # of that script; and here
PLACES = ["computing", "summing", "summed", "sent", "finished"]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def run(jobs: Jobs, out: Path, word: str, *deaths: str) -> list[dict[str, Any]]:
    options = ["--workers", str(WORKERS), "--servers", "2", "--sync", word]
    result = jobs.run(*options, DYING, str(out), "epochs", *deaths)
    assert result.returncode == 0, result.stdout + result.stderr
    for death in set(deaths) - {"late"}:
        assert f"worker {death[0]} was killed by SIGKILL and is started again" in result.stderr
    assert f"{PASSES} passes" in result.stderr.splitlines()[-1]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def check(found: list[dict[str, Any]]) -> None:
    """Every worker has the same bits; every sample was used; what counts for a row counts for the rest."""
    for one in found:
        assert (one["dense"], one["rounds"]) == (found[0]["dense"], found[0]["rounds"])
        for used in one["used"]:
            assert "0" not in used, "a unit was never used"
            assert sum(used.values()) == SAMPLES // BATCH * WORKERS
        assert one["mean"] == 1.0
    assert min(found[0]["rows"]) > PASSES / BATCH - 0.001


def check_sums(found: list[dict[str, Any]]) -> None:
    check(found)
    assert found[0]["dense"] == pytest.approx(found[0]["rows"], rel=1e-4)
    assert sum(found[0]["rows"]) == pytest.approx(found[0]["rounds"], rel=1e-4)


def test_a_sum_that_a_death_broke_is_made_again_without_it(jobs: Jobs, tmp_path: Path) -> None:
    check_sums(run(jobs, tmp_path, "allreduce", "0:5:sent"))


@pytest.mark.parametrize(
    ("word", "death"),
    [("allreduce", "0:-1:over"), pytest.param("gossip", "1:-1:over", marks=pytest.mark.soak)],
)
def test_who_is_replaced_when_the_others_are_done_has_the_model(
    word: str, death: str, jobs: Jobs, tmp_path: Path
) -> None:
    check(run(jobs, tmp_path, word, death, "late"))


@pytest.mark.soak
def test_two_deaths_one_after_the_other(jobs: Jobs, tmp_path: Path) -> None:
    check_sums(run(jobs, tmp_path, "allreduce", "0:5:sent", "2:3:summing"))


@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [0, 7, 8, 23])
def test_a_death_at_any_place_counts_for_all_or_for_nobody(
    jobs: Jobs, tmp_path: Path, step: int, place: str
) -> None:
    check_sums(run(jobs, tmp_path, "allreduce", f"{step % WORKERS}:{step}:{place}"))


@pytest.mark.soak
@pytest.mark.parametrize("word", ["gossip", "gossip,rows=bsp", "allreduce,rows=asp", "allreduce,rows=ssp:1"])
def test_whatever_the_rows_do(jobs: Jobs, tmp_path: Path, word: str) -> None:
    check(run(jobs, tmp_path, word, "0:5:sent", "1:12:computing"))


@pytest.mark.soak
@pytest.mark.parametrize("step", [0, 7, 11])
def test_a_model_that_was_being_mixed_is_mixed_with_those_who_live(
    jobs: Jobs, tmp_path: Path, step: int
) -> None:
    check(run(jobs, tmp_path, "gossip", f"1:{step}:swapping"))


@pytest.mark.soak
def test_where_all_that_had_the_model_die_the_job_says_so(jobs: Jobs, tmp_path: Path) -> None:
    deaths = [f"{rank}:5:computing" for rank in range(WORKERS)]
    options = ["--workers", str(WORKERS), "--sync", "allreduce"]
    result = jobs.run(*options, DYING, str(tmp_path), "epochs", *deaths)
    assert result.returncode != 0
    assert "all that had it have died" in result.stderr
