"""Which workers are in trouble, by what they report: a pure function of their pasts; and what is done."""

from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.launch.board import Board
from shoal.launch.health import POLICIES, HealthWatch, Look, Past, Trouble, find_trouble, parse_policies
from shoal.launch.treatment import treat
from shoal.train.progress import BETWEEN_PASSES, Progress, progress_path, read_trust, write_trust


def looks(
    count: int = 100, *, step_s: float = 0.1, waits: float = 0.0, losses=None, every: int = 1
) -> list[Look]:
    """One a second, of a worker whose steps take so long, that waits such a part of the time, and that has
    told another loss every so many seconds.
    """
    return [
        Look(
            time=float(second),
            step=int(second * (1 - waits) / step_s),
            loss=None if losses is None else losses[second // every],
            reports=0 if losses is None else 1 + second // every,
            waited_s=second * waits,
        )
        for second in range(count)
    ]


def kinds(histories: dict[int, list[Look]], now: float = 100.0) -> dict[int, str]:
    pasts = {rank: Past(seen) for rank, seen in histories.items()}
    return {trouble.rank: trouble.kind for trouble in find_trouble(pasts, now)}


def test_workers_that_do_the_same_are_well() -> None:
    assert kinds({rank: looks(losses=[1 / (1 + t + rank) for t in range(100)]) for rank in range(4)}) == {}


def test_a_worker_that_is_far_slower_than_its_peers_is_slow() -> None:
    assert kinds({0: looks(), 1: looks(step_s=0.11), 2: looks(step_s=0.5)}) == {2: "slow"}
    assert kinds({0: looks(), 1: looks(step_s=0.5)}) == {1: "slow"}


def test_a_worker_that_waits_for_others_is_not_slow() -> None:
    assert kinds({0: looks(waits=0.8), 1: looks(), 2: looks()}) == {}


def test_peers_that_differ_allow_more() -> None:
    mixed = {rank: looks(step_s=0.1 * (1 + rank)) for rank in range(4)}
    assert kinds({**mixed, 9: looks(step_s=0.9)}) == {}
    assert kinds({**mixed, 9: looks(step_s=3.0)}) == {9: "slow"}


def test_a_few_milliseconds_are_not_slow() -> None:
    assert kinds({0: looks(step_s=0.001), 1: looks(step_s=0.004)}) == {}


def test_a_pause_is_not_slow() -> None:
    late = [Look(look.time + 60 * (look.time > 50), look.step) for look in looks()]
    assert kinds({0: looks(), 1: late}, now=160.0) == {0: "stuck"}


def test_of_a_few_steps_nothing_is_said() -> None:
    assert kinds({0: looks(), 1: looks(4, step_s=1.0)}, now=4.0) == {}


@pytest.mark.parametrize(("last", "expected"), [(1.5, {}), (9.0, {}), (50.0, {0: "exploding"})])
def test_a_loss_that_jumps_far_above_its_past_explodes(last: float, expected: dict[int, str]) -> None:
    assert kinds({0: looks(losses=[1.0 + t % 3 / 10 for t in range(97)] + [last] * 3)}) == expected


@pytest.mark.parametrize("odd", [[50.0], [50.0, 50.0], [50.0, 50.0, 1.0], [50.0, 1.0, 50.0, 1.0, 50.0]])
def test_one_odd_report_or_two_are_no_trouble(odd: list[float]) -> None:
    usual = [1.0 + t % 3 / 10 for t in range(100 - len(odd))]
    assert kinds({0: looks(losses=usual + odd)}) == {}


def test_an_odd_report_that_stands_there_until_the_next_is_one() -> None:
    losses = [1.0 + t % 3 / 10 for t in range(19)]
    assert kinds({0: looks(losses=[*losses, 50.0], every=5)}) == {}
    assert kinds({0: looks(120, losses=[*losses, 50.0, 50.0, 50.0, 50.0, 50.0], every=5)}) == {0: "exploding"}


def test_a_loss_below_zero_does_not_explode_by_its_sign() -> None:
    assert kinds({0: looks(losses=[-5.0 - t % 3 for t in range(99)] + [-1.0])}) == {}


def test_a_loss_that_stands_still_is_flat() -> None:
    assert kinds({0: looks(losses=[0.7] * 100)}) == {0: "flat"}
    assert kinds({0: looks(losses=[0.7] * 99 + [0.6])}) == {}


def test_a_loss_that_is_reported_once_a_pass_is_not_flat_in_between() -> None:
    assert kinds({0: looks(100, losses=[0.7, 0.6], every=90)}) == {}
    assert kinds({0: looks(300, losses=[0.7] * 30, every=10)}, now=300.0) == {}
    assert kinds({0: looks(700, losses=[0.7] * 70, every=10)}, now=700.0) == {0: "flat"}


def test_a_loss_that_is_reported_without_a_step_is_not_flat() -> None:
    assert kinds({0: looks(losses=[0.7] * 100, step_s=1000.0)}) == {}


def test_a_worker_that_makes_no_step_is_stuck_unless_it_waits() -> None:
    assert kinds({0: looks()}, now=120.0) == {}
    assert kinds({0: looks()}, now=140.0) == {0: "stuck"}
    waiting = [*looks(), Look(time=100.0, step=990, waiting=True)]
    assert kinds({0: waiting}, now=140.0) == {}


@pytest.mark.parametrize(("state", "waits"), [("training", False), (BETWEEN_PASSES, True), ("waiting", True)])
def test_who_evaluates_between_passes_is_not_stuck(state: str, waits: bool) -> None:
    assert Look.at(Progress(rank=0, step=5, state=state)).waiting == waits


def test_who_waits_for_a_server_is_not_stuck() -> None:
    said = Progress(rank=0, step=990, state="training", waiting_for_servers=(1,), time=100.0)
    waits = Look.at(said)
    assert waits.waiting
    assert kinds({0: [*looks(), waits]}, now=140.0) == {}
    goes_on = Look(time=160.0, step=990)
    assert kinds({0: [*looks(), waits, goes_on]}, now=180.0) == {}
    assert kinds({0: [*looks(), waits, goes_on]}, now=200.0) == {0: "stuck"}


def test_who_has_just_come_back_from_an_evaluation_is_not_stuck() -> None:
    """It trains again, and its first step is not told yet."""
    steps = looks()
    last = steps[-1]
    evaluates = [Look(last.time + s, last.step, waiting=True) for s in range(1, 60)]
    trains = Look(last.time + 60, last.step)
    assert kinds({0: [*steps, *evaluates, trains]}, now=last.time + 61) == {}
    assert kinds({0: [*steps, *evaluates, trains]}, now=last.time + 160) == {0: "stuck"}


def test_slow_steps_give_more_time_before_one_is_stuck() -> None:
    assert kinds({0: looks(step_s=9.0)}, now=200.0) == {}
    assert kinds({0: looks(step_s=9.0)}, now=300.0) == {0: "stuck"}


@pytest.mark.parametrize("text", ["slow", "slow=", "slow=sell", "lazy=report", "slow=report;stuck=replace"])
def test_an_unknown_policy_is_refused(text: str) -> None:
    with pytest.raises(
        BadInput, match=r"kind of exploding, flat, stuck, slow, nan and a policy of report, scale"
    ):
        parse_policies(text)


def test_what_is_not_finite_is_told_of_where_the_worker_goes_on() -> None:
    assert kinds({0: looks(), 1: [*looks(99), Look(time=99.0, step=990, nan_step=7)]}) == {1: "nan"}


def test_what_is_not_finite_cannot_be_scaled() -> None:
    assert parse_policies("nan=refuse")["nan"] == "refuse"
    with pytest.raises(BadInput, match=r"on-trouble is 'nan=scale'.*nan cannot be scaled"):
        parse_policies("nan=scale")


def seen_by(watch: HealthWatch, histories: dict[int, list[Look]]) -> dict[str, str]:
    """What a watch tells of workers that report so, second by second: policies by kind. Each once."""
    board, told = Board(Path("nowhere"), len(histories)), []
    for second in range(len(histories[0])):
        for rank, seen in histories.items():
            look = seen[second]
            board.views[rank].progress = Progress(
                rank=rank,
                state="training",
                step=look.step,
                loss=look.loss,
                reports=look.reports,
                waited_s=look.waited_s,
                waiting_for=(1 - rank,) if look.waiting else (),
                time=look.time,
            )
        told += watch.look(board, look.time)
    assert {trouble.rank for trouble, _ in told} <= {1}
    assert len({trouble.kind for trouble, _ in told}) == len(told)
    return {trouble.kind: policy for trouble, policy in told}


WELL = [1.0 + t % 3 / 10 for t in range(100)]
ILL: dict[str, list[Look]] = {
    "exploding": looks(losses=WELL[:50] + [100.0] * 50),
    "flat": looks(losses=[0.7] * 100),
    "stuck": [Look(look.time, min(look.step, 500)) for look in looks()],
    "slow": looks(step_s=0.5, losses=WELL),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ILL)
def test_a_watch_tells_of_each_trouble_once_with_its_policy(kind: str, policy: str) -> None:
    watch = HealthWatch(parse_policies(f"{kind}={policy}"))
    assert seen_by(watch, {0: looks(losses=WELL), 1: ILL[kind]}) == {kind: policy}


def test_another_process_in_its_place_is_told_of_again() -> None:
    watch, crew = HealthWatch(parse_policies("flat=scale")), {0: looks(losses=WELL), 1: ILL["flat"]}
    assert seen_by(watch, crew) == {"flat": "scale"}
    assert seen_by(watch, crew) == {}
    watch.forget(1)
    assert seen_by(watch, crew) == {"flat": "scale"}


def test_one_that_waits_or_is_not_there_is_not_looked_at() -> None:
    waiting = [Look(look.time, look.step, waiting=True) for look in ILL["stuck"]]
    assert seen_by(HealthWatch(parse_policies("")), {0: looks(), 1: waiting}) == {}
    board = Board(Path("nowhere"), 1)
    assert HealthWatch(parse_policies("")).look(board, 1000.0) == []


@pytest.fixture
def job(tmp_path: Path) -> Path:
    progress_path(tmp_path, 0).parent.mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "trust", "said"),
    [
        ("report", 1.0, "worker 1 is slow (very)"),
        ("scale", 0.1, "worker 1 is slow: it counts a tenth (very)"),
        ("refuse", 0.0, "worker 1 is slow: it counts nothing (very)"),
        ("replace", 1.0, "worker 1 is slow and is replaced (very)"),
    ],
)
def test_a_policy_says_what_a_worker_counts_for(job: Path, policy: str, trust: float, said: str) -> None:
    assert treat(job, Trouble(1, "slow", "very"), policy) == said
    assert (read_trust(job, 1), read_trust(job, 0)) == (trust, 1.0)


@pytest.mark.parametrize("later", ["report", "scale", "refuse", "replace"])
def test_another_trouble_gives_no_trust_back_in_this_life(job: Path, later: str) -> None:
    treat(job, Trouble(1, "exploding", "far"), "refuse")
    did = treat(job, Trouble(1, "slow", "very"), later)
    assert read_trust(job, 1) == 0.0
    assert ("replaced" if later == "replace" else "it counts nothing") in did
    write_trust(job, 1, 1.0)  # as the supervisor does for a new process
    assert read_trust(job, 1) == 1.0


def test_one_that_is_not_finite_abstains_by_itself_and_counts_as_before(job: Path) -> None:
    assert treat(job, Trouble(1, "nan", "in step 3"), "refuse") == "worker 1 is not finite (in step 3)"
    assert read_trust(job, 1) == 1.0
    treat(job, Trouble(1, "slow", "very"), "scale")
    assert treat(job, Trouble(1, "nan", "now"), "replace") == "worker 1 is not finite and is replaced (now)"
    assert read_trust(job, 1) == 0.1
