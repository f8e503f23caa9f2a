"""Thousands of seeded schedules; each failure names its seed and how to replay it."""

import functools
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import _core

from .kinds import KINDS, run_seed
from .ledger import Violation
from .nodes import TOKEN
from .plan import BURST_EVERY, make_plan
from .rounds import ADVANCE, ASK, OPEN, SYNC
from .simulator import LIVENESS_MS

ROOT = Path(__file__).resolve().parents[2]
SOAKED = int(os.environ.get("SOAK_SEEDS", "1000"))  # seeds of a block

REPLAYED = 10


Runs = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """What all seeds of a simulator went through; a Violation says which, and how to replay it."""
    return functools.cache(lambda kind: [run_seed(kind, seed) for seed in range(KINDS[kind].seeds)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_right_and_replays_exactly(kind: str, runs: Runs) -> None:
    found = runs(kind)
    assert found[:REPLAYED] == [run_seed(kind, seed) for seed in range(REPLAYED)]


def test_a_thousand_seeds_and_more() -> None:
    said = re.search(r"([\d,]+) seeds in `make test`", (ROOT / "docs" / "guarantees.md").read_text())
    assert said is not None
    assert int(said[1].replace(",", "")) == sum(kind.seeds for kind in KINDS.values()) >= 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [Violation("planted"), RuntimeError("planted")], ids=["found", "raised"])
def test_a_seed_that_fails_says_how_to_replay_it(
    kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_plan: object) -> None:
        raise error

    monkeypatch.setitem(KINDS, kind, KINDS[kind]._replace(run=fail))
    with pytest.raises(Violation, match=rf"seed 17: .*planted; replay: python -m tests.sim {kind} 17$"):
        run_seed(kind, 17)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_schedules_are_right(kind: str, block: int) -> None:
    for seed in range((block + 1) * SOAKED, (block + 2) * SOAKED):
        run_seed(kind, seed)


@pytest.mark.parametrize("hard", ["duplicates", "applied_unacked", "fenced_frames", "blocked"])
def test_schedules_reach_the_hard_cases(hard: str, runs: Runs) -> None:
    """A simulator that meets no trouble proves nothing."""
    assert sum(getattr(run, hard) for run in runs("pushes")[:200]) >= 20


def test_rounds_are_closed_over_chains_and_without(runs: Runs) -> None:
    for kind in ("rounds", "chain-rounds"):
        assert sum(commits for commits, _ in runs(kind)) > 5 * len(runs(kind))
    assert sum(attempts for _, attempts in runs("rounds")) > 10 * len(runs("rounds"))


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_somebody_is_as_far_ahead_as_the_bound_allows(bound: int, runs: Runs) -> None:
    assert max(runs(f"ssp:{bound}")) == bound


def test_chains_lose_servers(runs: Runs) -> None:
    assert sum(kills for _, kills in runs("chains")) > len(runs("chains")) / 2


def test_something_is_lost_where_it_may_be(runs: Runs) -> None:
    assert sum(runs("weak")) > len(runs("weak")) / 2
    assert sum(pushes for _, pushes in runs("reload")) > 2 * len(runs("reload"))
    assert sum(servers for servers, _ in runs("reload")) > len(runs("reload")) / 2


def test_coordinators_servers_and_workers_are_lost(runs: Runs) -> None:
    deaths, kills, evicted = map(sum, zip(*runs("coordinator"), strict=True))
    assert min(deaths, kills) > len(runs("coordinator")) / 2
    assert evicted > len(runs("coordinator")) / 20


def test_a_server_that_left_a_chain_knows_it_before_it_is_filled_again() -> None:
    """In seed 1968 it learnt that it had left after it was filled, and dropped what it was filled with."""
    assert run_seed("chains", 1968)


@pytest.mark.parametrize("seed", [344, 485])
def test_no_server_is_killed_with_the_only_copy(seed: int) -> None:
    """In 344 a coordinator heard of another and died before it wrote that; in 485 the other was silent."""
    assert run_seed("coordinator", seed)


def test_cuts_are_made_and_tried_again(runs: Runs) -> None:
    made, attempts, kills = map(sum, zip(*runs("cuts"), strict=True))
    assert made > 1.5 * len(runs("cuts"))
    assert attempts > 1.1 * made
    assert kills > 0


def test_units_are_trained_and_taken_over(runs: Runs) -> None:
    trained, revoked = map(sum, zip(*runs("passes"), strict=True))
    assert trained > 10 * len(runs("passes"))
    assert revoked > len(runs("passes")) / 50


def test_journals_are_torn_and_refuse(runs: Runs) -> None:
    assert min(sum(each) for each in zip(*runs("journal"), strict=True)) > 100


@pytest.mark.parametrize("hard", ["saved", "failed", "crashes", "fell_back", "deltas"])
def test_disks_are_bad_enough(hard: str, runs: Runs) -> None:
    assert sum(getattr(run, hard) for run in runs("checkpoints")) >= len(runs("checkpoints")) / 4


def _placement(version: int) -> _core.Placement:
    address = _core.ServerAddress(0, "sim", 1)
    return _core.Placement(version=version, weak=False, servers=[address], terms=[version], chains=[[0]])


def test_whoever_is_let_go_on_learns_the_placement_first() -> None:
    """Else it could read at a server that slept, was replaced, and does not know it."""
    server = _core.protocol.Server(1, TOKEN, placed=False)
    server.place(0, _placement(1))
    workers = [_core.protocol.Client(who + 1, 1, 1, [0]) for who in range(2)]
    sessions = [_core.protocol.Session(server) for _ in workers]
    for worker, session in zip(workers, sessions, strict=True):
        worker.set_placement(_placement(1))
        [challenge], _ = session.feed(worker.hello())
        session.feed(worker.proof(TOKEN, challenge))

    def carry() -> None:
        for worker, session in zip(workers, sessions, strict=True):
            for frame in worker.outgoing(0):
                for reply in session.feed(frame)[0]:
                    worker.incoming(0, reply)
        for number, reply in server.mail():
            [at] = [i for i, session in enumerate(sessions) if session.number() == number]
            workers[at].incoming(0, reply)

    def ask(who: int, verb: int, number: int) -> int:
        bounded = (2, 0, 1.0, 1, 0, 1.0, float("nan"), 0.0, 0)  # two workers, none ahead of the other
        body = ASK.pack(verb, who, 0, 0, 0, number, 0, *bounded) + struct.pack("<Q", 0)
        operation = workers[who].ask(SYNC, [0], body)
        carry()
        return operation

    for who in range(2):
        assert workers[who].done(ask(who, OPEN, 1))
    early = ask(0, ADVANCE, 2)
    assert not workers[0].done(early)  # the other is still at step 0
    server.place(0, _placement(2))
    workers[1].set_placement(_placement(2))
    assert workers[1].done(ask(1, ADVANCE, 2))
    assert not workers[0].done(early)
    assert workers[0].homeless()
    workers[0].send_homeless()
    carry()
    assert not workers[0].done(early)  # asked again, and refused: it has yet to learn
    workers[0].set_placement(_placement(2))
    carry()
    assert workers[0].done(early)
    assert workers[0].code(early) == 0


def test_a_client_with_more_pushes_than_its_window_waits_and_finishes(runs: Runs) -> None:
    assert min(run.pushes for run in runs("pushes")[: 10 * BURST_EVERY : BURST_EVERY]) > 256


def test_everything_ends_soon_after_the_last_fault(runs: Runs) -> None:
    after = [run.virtual_ms - make_plan(seed).quiet_after for seed, run in enumerate(runs("pushes")[:100])]
    assert max(after) < LIVENESS_MS / 10
