"""Policies: what the core is told, what workers ask, which parts go together; outer rules; mixing."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.errors import BadInput
from shoal.sync import (
    All,
    Always,
    Bounded,
    Compensate,
    Difference,
    Each,
    Elastic,
    Every,
    First,
    Gradient,
    GradientSum,
    Mean,
    Neighbours,
    One,
    Outer,
    Parameters,
    Payload,
    Policy,
    Proceed,
    Round,
    Scale,
    Share,
    Staleness,
    Take,
    WithNeighbours,
    mixing,
    parse,
)
from shoal.sync.outer import average, bmuf, diloco
from shoal.sync.policy import Home

NO_CLOCK = {"take": "each", "quorum": 4, "count": 1, "slack": -1}
ROUND = {"take": "round", "quorum": 4, "count": 1, "slack": -1}


def test_sync_does_not_import_torch() -> None:
    code = "import sys, shoal.sync; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("bsp", ROUND),
        ("quorum:1", ROUND),
        ("quorum:0.5", {**ROUND, "quorum": 2}),
        ("asp", NO_CLOCK),
        ("ssp:0", {**NO_CLOCK, "slack": 0}),
        ("delay:5", {**NO_CLOCK, "slack": 5}),
        ("softsync:1", NO_CLOCK),
        ("softsync:3", {**NO_CLOCK, "take": "count", "count": 3}),
        ("dcasgd:0.1", NO_CLOCK),
        ("downpour:2,2", NO_CLOCK),
        ("average:10", ROUND),
        ("bmuf:10", ROUND),
        ("diloco:10", ROUND),
        ("easgd:10", NO_CLOCK),
        ("allreduce", ROUND),
        ("allreduce,rows=ssp:3", {**NO_CLOCK, "slack": 3}),
        ("gossip", NO_CLOCK),
        ("hogwild", NO_CLOCK),
        ("easgd:10,rows=bsp", ROUND),
        ("bsp,rows=asp", ROUND),
    ],
)
def test_the_core_is_told(text: str, spec: dict[str, object]) -> None:
    assert parse(text).core_spec(4) == spec


@pytest.mark.parametrize("n", [0, -1, 1.5, None])
def test_the_number_of_workers_is_checked(n: int) -> None:
    with pytest.raises(BadInput, match="number of workers"):
        parse("bsp").core_spec(n)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_equal_words(n: int) -> None:
    assert parse("quorum:1").core_spec(n) == parse("bsp").core_spec(n)
    assert parse("softsync:1").core_spec(n) == parse("asp").core_spec(n)
    assert parse("softsync:1").staged is parse("asp").staged is False
    assert parse("ssp:0").core_spec(n)["slack"] == 0
    assert parse("delay:4") == parse("ssp:4")


def test_order_is_static_where_every_step_has_everybody() -> None:
    for word in ["bsp", "quorum:1", "allreduce", "allreduce,rows=asp", "gossip", "bsp,rows=asp"]:
        assert parse(word).order(4) == "static"
    for word in [
        "quorum:0.5",
        "ssp:0",
        "asp",
        "softsync:4",
        "average:1",
        "bmuf:4",
        "easgd:4",
        "hogwild",
    ]:
        assert parse(word).order(4) == "leased"


def test_staged_are_the_gradients_that_wait_at_servers() -> None:
    assert [w for w in ["bsp", "quorum:0.5", "softsync:2", "asp", "average:3"] if parse(w).staged] == [
        "bsp",
        "quorum:0.5",
        "softsync:2",
    ]
    assert not parse("allreduce").staged
    assert parse("allreduce").rows_policy.staged


def test_shares_add_up_to_a_whole_step() -> None:
    asp = parse("asp")
    assert sum(asp.contribution_scale(part, 10) for part in (4, 3, 3)) == pytest.approx(1)
    assert asp.contribution_scale(0, 0) == 0
    assert parse("asp,scale=1").contribution_scale(3, 10) == 1
    assert parse("bsp").contribution_scale(3, 10) == 1
    assert parse("dcasgd:0.1").contribution_scale(3, 12) == 0.25
    assert parse("dcasgd:0.1,scale=1").rows_policy.contribution_scale(3, 12) == 1


def test_of_several_in_an_update_none_is_more_than_its_part_of_the_mean() -> None:
    assert parse("softsync:1").contribution_scale(3, 12) == parse("asp").contribution_scale(3, 12)
    assert [parse(f"softsync:{k}").contribution_scale(3, 12) for k in (2, 4, 5)] == [0.25, 0.25, 0.2]
    assert parse("softsync:4").contribution_scale(8, 8) == 0.25  # whole batches
    assert parse("softsync:4").with_whole_batches().contribution_scale(3, 12) == 0.25
    assert parse("softsync:4,scale=1").contribution_scale(3, 12) == 0.25


def test_whole_batches_are_not_scaled() -> None:
    assert parse("asp").with_whole_batches() == parse("asp,scale=1")
    assert str(parse("asp").with_whole_batches()) == "asp"
    assert parse("average:5").with_whole_batches().rows == parse("asp,scale=1")
    assert parse("dcasgd:2").with_whole_batches().contribution_scale(3, 12) == 1
    assert parse("bsp").with_whole_batches() == parse("bsp")


def test_what_else_a_worker_asks() -> None:
    assert parse("asp:staleness").by_staleness
    assert parse("softsync:2,scale=staleness").by_staleness
    assert not parse("asp").by_staleness
    assert parse("dcasgd:0.5").compensation == 0.5
    assert parse("asp").compensation == 0
    assert parse("easgd:3").alpha(4) == pytest.approx(0.225)
    assert parse("easgd:3,alpha=0.5").alpha(4) == 0.5
    assert parse("asp").alpha(4) == 0
    assert parse("asp").rows_policy == parse("asp")


ASP = parse("asp")
NONSENSE: Any = "moon"
WRONG = {
    "proceed is": lambda: Policy(NONSENSE, Each(), Share(), Gradient()),
    "take is": lambda: Policy(Always(), NONSENSE, Share(), Gradient()),
    "take All or First": lambda: Policy(Round(), Each(), Share(), Gradient()),
    "take Each or Every": lambda: Policy(Always(), All(), Mean(), Gradient()),
    "scale Share": lambda: Policy(Round(), All(), Share(), Gradient()),
    "scale Mean": lambda: Policy(Bounded(1), Each(), Mean(), Gradient()),
    "dense_home='worker'": lambda: Policy(Round(), All(), Mean(), Difference(5, Outer()), ASP),
    "dense_home is 'moon'": lambda: Policy(Always(), Each(), Share(), Gradient(), dense_home=NONSENSE),
    "state is 'moon'": lambda: Policy(Always(), Each(), Share(), Gradient(), state=NONSENSE),
    "state is 'reset'": lambda: Policy(Always(), Each(), Share(), Gradient(), state="reset"),
    "rows is None": lambda: Policy(Always(), Each(), One(), Parameters(), dense_home="shared"),
    "DCASGD": lambda: Policy(Always(), Each(), Compensate(1.0), Gradient()),
    "rows is moon": lambda: Policy(Always(), Each(), Share(), Gradient(), NONSENSE),
    "outer is": lambda: Difference(5, NONSENSE),
    "nesterov is": lambda: Outer(nesterov=NONSENSE),
    "one clock": lambda: Policy(Round(), All(), Mean(), Gradient(), parse("ssp:3")),
}


@pytest.mark.parametrize("reason", WRONG)
def test_parts_without_a_meaning_together_are_refused(reason: str) -> None:
    with pytest.raises(BadInput) as refused:
        WRONG[reason]()
    assert ("rows is None" if reason == "DCASGD" else reason) in str(refused.value)


# By home: what was once taken for something else, or for nothing.
NOT_CARRIED_OUT: list[tuple[Home, Proceed, Take, Scale, Payload]] = [
    ("server", Round(), All(), Mean(), GradientSum(2, 2)),
    ("server", Always(), Every(2), Share(), GradientSum(2, 2)),
    ("server", Always(), Every(2), Compensate(1.0), Gradient()),
    ("server", Always(), Each(), Elastic(), Gradient()),
    ("server", WithNeighbours(), Neighbours(), Mean(), Gradient()),
    ("worker", Always(), Each(), One(), Parameters(5)),
    ("worker", Always(), Each(), Share(), Difference(5, Outer())),
    ("worker", Always(), Every(2), Share(), Difference(5, Outer())),
    ("worker", Bounded(2), Each(), Staleness(), Parameters(5)),
    ("worker", Always(), Each(), Elastic(), Parameters(5)),
    ("worker", Always(), Each(), Compensate(1.0), Parameters(5)),
    ("worker", WithNeighbours(), Neighbours(), Mean(), Parameters(5)),
    ("peers", Round(), First(0.5), Mean(), Gradient()),
    ("peers", Always(), Each(), Share(), Gradient()),
    ("peers", Bounded(2), Each(), Staleness(), Gradient()),
    ("peers", Round(), All(), Mean(), Parameters(3)),
    ("peers", Always(), Each(), One(), Parameters()),
    ("shared", Bounded(2), Each(), One(), Parameters()),
    ("shared", Always(), Each(), Share(), Parameters()),
    ("shared", Round(), All(), Mean(), Parameters()),
]


@pytest.mark.parametrize(("home", "proceed", "take", "scale", "payload"), NOT_CARRIED_OUT)
def test_what_nobody_carries_out_is_refused(
    home: Home, proceed: Proceed, take: Take, scale: Scale, payload: Payload
) -> None:
    with pytest.raises(BadInput) as refused:
        Policy(proceed, take, scale, payload, ASP, dense_home=home)
    message = str(refused.value)
    assert all(repr(piece) in message for piece in (proceed, take, scale, payload, home))
    assert "What goes together:\n" in message
    assert f"\n  dense_home={home!r}, payload " in message


def test_shared_memory_has_no_period() -> None:
    with pytest.raises(BadInput, match=r"Parameters\(period=10\) with dense_home='shared'"):
        Policy(Always(), Each(), One(), Parameters(10), ASP, dense_home="shared")


def test_a_piece_of_ones_own_class_is_refused() -> None:
    class Sometimes(Proceed):
        pass

    with pytest.raises(BadInput, match="nothing carries this out"):
        Policy(Sometimes(), Each(), Share(), Gradient())


def test_an_own_composition_is_as_good_as_a_word() -> None:
    mine = Policy(Bounded(8), Every(3), Staleness(), Gradient())
    assert mine.core_spec(4) == {"take": "count", "quorum": 4, "count": 3, "slack": 8}
    assert str(mine).startswith("Policy(proceed=Bounded(bound=8)")


# Outer rules: each against plain NumPy, run by the servers' own optimizer.


def servers_path(rule: Outer, n: int, differences: np.ndarray) -> np.ndarray:
    with shoal.connect("memory://") as client:
        centre = client.tensor("w", np.zeros(3, np.float32), optimizer=rule(n))
        path = []
        for difference in differences:
            centre.push(difference)
            path.append(centre.pull())
    return np.array(path)


def plain_path(differences: np.ndarray, *, lr: float, momentum: float, nesterov: bool) -> np.ndarray:
    centre, velocity, path = np.zeros(3), np.zeros(3), []
    for difference in differences.astype(np.float64):
        velocity = momentum * velocity + difference
        centre = centre - lr * (difference + momentum * velocity if nesterov else velocity)
        path.append(centre)
    return np.array(path)


@pytest.mark.parametrize(
    ("rule", "lr", "momentum", "nesterov"),
    [
        (average(), 1.0, 0.0, False),
        (bmuf(), 1.0, 0.75, False),
        (bmuf(nesterov=True), 1.0, 0.75, True),
        (bmuf(momentum=0.5), 1.0, 0.5, False),
        (diloco(), 0.7, 0.9, True),
    ],
)
def test_outer_rules(rule: Outer, lr: float, momentum: float, nesterov: bool) -> None:
    differences = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    expected = plain_path(differences, lr=lr, momentum=momentum, nesterov=nesterov)
    np.testing.assert_allclose(servers_path(rule, 4, differences), expected, rtol=1e-5, atol=1e-6)


def test_bmuf_without_momentum_is_averaging() -> None:
    assert bmuf(momentum=0.0)(7) == average()(7) == Parameters(3).outer(7)


def test_bmuf_of_one_worker_does_not_look_ahead() -> None:
    differences = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    for nesterov in (False, True):
        found = servers_path(bmuf(nesterov=nesterov), 1, differences)
        np.testing.assert_array_equal(found, servers_path(average(), 1, differences))


# Mixing.


@pytest.mark.parametrize("n", range(1, 12))
def test_mixing_is_doubly_stochastic_and_keeps_the_mean(n: int) -> None:
    matrix = np.zeros((n, n))
    for rank in range(n):
        for peer, weight in mixing(n, rank).items():
            matrix[rank, peer] = weight
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_allclose(matrix.sum(1), 1)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert np.sort(np.abs(np.linalg.eigvalsh(matrix)))[:-1].max(initial=0.0) < 1 - 1e-9


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_mixing_brings_all_to_the_mean(n: int) -> None:
    models = np.random.default_rng(n).normal(size=(n, 4))
    mean, spread = models.mean(0), np.ptp(models)
    for _ in range(200):
        models = np.array([sum(w * models[peer] for peer, w in mixing(n, rank).items()) for rank in range(n)])
        assert np.ptp(models) <= spread + 1e-12
    np.testing.assert_allclose(models, np.broadcast_to(mean, models.shape), atol=1e-6)


@pytest.mark.parametrize(("n", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_mixing_refuses_ranks_outside(n: int, rank: int) -> None:
    with pytest.raises(BadInput, match="rank is"):
        mixing(n, rank)
