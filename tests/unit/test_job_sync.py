"""What a supervisor makes of a script that says itself how its workers synchronise."""

from pathlib import Path

import pytest

from shoal.launch.autoscale import Autoscaler
from shoal.launch.board import Board
from shoal.launch.job_sync import JobSync
from shoal.launch.options import JobOptions
from shoal.sync import Bounded, Difference, Each, Elastic, Gradient, Outer, Policy, Share, Staleness, parse
from shoal.sync.plain import from_plain, to_plain
from shoal.train.progress import ProgressReport, progress_path

OWN = Policy(Bounded(8), Each(), Staleness(), Gradient())


def options(**given: object) -> JobOptions:
    return JobOptions(command=(__file__,), **given)


def board(job: Path, policy: Policy, batch: str = "split") -> Board:
    """Of a job whose worker 1 of 2 has joined."""
    (job / "progress").mkdir(exist_ok=True)
    ProgressReport(job, rank=1, policy=to_plain(policy), batch=batch).close()
    found = Board(job, 2)
    found.refresh()
    return found


def test_the_word_of_the_job_counts_until_workers_say_another(tmp_path: Path) -> None:
    sync = JobSync(options())
    assert sync.look(Board(tmp_path, 2)) is None
    assert sync.record == {"sync": "bsp", "batch": "split"}
    assert sync.look(board(tmp_path, parse("asp"))) == "the script's shoal.join says sync asp"
    assert sync.look(board(tmp_path, parse("asp"))) is None
    assert sync.record == {"sync": "asp", "batch": "split"}
    assert sync.policy.core_spec(3)["take"] == "each"


def test_a_word_that_is_given_and_not_used_is_named(tmp_path: Path) -> None:
    sync = JobSync(options(sync="ssp:3"))
    said = sync.look(board(tmp_path, OWN, "each"))
    assert said == f"the script's shoal.join says sync {OWN!r} and batch each; --sync ssp:3 is not used"
    assert sync.record == {"sync": repr(OWN), "batch": "each"}
    assert sync.policy == OWN


def test_the_same_by_another_name_is_no_news(tmp_path: Path) -> None:
    sync = JobSync(options(sync="delay:3"))
    assert sync.look(board(tmp_path, Policy(Bounded(3), Each(), Share(), Gradient()))) is None
    assert sync.record["sync"] == "delay:3"


@pytest.mark.parametrize(
    ("word", "on_workers"), [("allreduce", True), ("hogwild", True), ("average:3", False)]
)
def test_where_the_model_lies_is_as_the_workers_say(tmp_path: Path, word: str, on_workers: bool) -> None:
    sync = JobSync(options(sync="allreduce" if not on_workers else None))
    assert sync.on_workers != on_workers
    sync.look(board(tmp_path, parse(word)))
    assert sync.on_workers == on_workers


def test_a_report_of_another_release_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()
    for text in ('{"rank": 0}', '{"rank": 0, "policy": {"kind": "Other"}}', '{"rank": 0, "policy": {}}'):
        progress_path(tmp_path, 0).write_text(text)
        found = Board(tmp_path, 1)
        assert found.refresh()
        assert found.policy is None


def test_the_autoscaler_waits_for_a_pass_where_the_script_hands_out_data_in_order(tmp_path: Path) -> None:
    """Fewer workers than before: in fixed order they have the whole of a batch from the next pass on."""
    found = {}
    for word in ("bsp", "asp"):
        scaler = Autoscaler.of("1:2", "bsp" if word == "asp" else "asp")
        for workers in (2, 1):
            for rank in range(workers):
                (tmp_path / "progress").mkdir(exist_ok=True)
                report = ProgressReport(tmp_path, rank=rank, policy=to_plain(parse(word)))
                report.update(epoch=3, state="training")
                report.close()
            seen = Board(tmp_path, 2)
            seen.refresh()
            scaler.look(seen, workers, 1, 0.0)
        found[word] = scaler._epoch
    assert found == {"bsp": 3, "asp": -1}


@pytest.mark.parametrize(
    "policy",
    [
        *map(
            parse, ["bsp", "quorum:0.75", "dcasgd:0.04", "downpour:2,4", "average:10,state=reset", "bmuf:5"]
        ),
        *map(parse, ["easgd:2,alpha=0.4", "diloco:50", "allreduce,rows=ssp:3", "gossip", "hogwild"]),
        OWN,
        Policy(
            Bounded(8), Each(), Elastic(0.5), Difference(2, Outer(0.5, 0.6)), parse("asp"), "reset", "worker"
        ),
    ],
    ids=str,
)
def test_a_policy_comes_back_from_plain_data(policy: Policy) -> None:
    found = from_plain(to_plain(policy))
    assert found == policy
    assert str(found) == str(policy)


def test_a_piece_of_the_users_own_goes_as_what_it_is_derived_from() -> None:
    class Mine(Share):
        def factor(self, samples: float, global_samples: float) -> float:
            return 0.5

    found = from_plain(to_plain(Policy(Bounded(3), Each(), Mine(), Gradient())))
    assert found == parse("ssp:3")
    assert "Mine()" in str(found)
