"""Rounds, and bounded workers, whose servers die, sleep, come and go."""

from __future__ import annotations

import dataclasses

from tests.train.history import History

from .bounded import BoundedClient, make_bounded_plan, play_bounded
from .chain_nodes import HOMES_MS, ChainClient
from .chains import ChainWorld, make_chain_plan
from .ledger import Violation
from .plan import Action, Plan
from .rounds import Judge, RoundClient, RoundPlan, RoundWorld, make_round_plan


class ChainRoundClient(RoundClient, ChainClient):
    """A worker whose servers come and go."""

    def sync_server(self) -> int:
        return self.news.sync

    def everywhere(self) -> list[int]:
        return sorted(self.news.up)

    def _ask_again(self) -> None:
        incarnation = self.incarnation

        def again() -> None:
            if not self.down and self.incarnation == incarnation:
                self._carry()
                self._pump()

        self._chains.later(self, HOMES_MS, again)

    def _stage(self) -> None:
        if self._chains.changes_settings and self._settings_rng.random() < 0.2:
            self._change_settings(0)
        super()._stage()

    def _settle(self, seq: int) -> None:
        RoundClient._settle(self, seq)


class ChainRoundWorld(ChainWorld, RoundWorld):
    """Rounds over chains."""

    def __init__(self, shape: RoundPlan) -> None:
        self.shape = shape
        self.judged = Judge()
        ChainWorld.__init__(self, shape.plan)

    def _client(self, who: int) -> ChainRoundClient:
        return ChainRoundClient(self, who)

    def _compare_copies(self) -> None:
        super()._compare_copies()
        head, *copies = self.coordinator.chain(0)
        for copy_ in copies:
            if self.servers[head].store.sync_image() != self.servers[copy_].store.sync_image():
                raise Violation(f"the sync shards of servers {head} and {copy_} differ")


def _faults(plan: Plan, left_out: tuple[str, ...]) -> tuple[Action, ...]:
    """Those that strike while there is work: a few steps are soon over."""
    return tuple(a._replace(at=a.at / 5) for a in plan.actions if a.kind not in (*left_out, "push", "pull"))


def make_chain_round_plan(seed: int) -> RoundPlan:
    plan, rounds = make_chain_plan(seed), make_round_plan(seed)
    plan = dataclasses.replace(plan, actions=_faults(plan, ()), columns=rounds.plan.columns)
    return dataclasses.replace(rounds, plan=plan)


def run_chain_round_plan(shape: RoundPlan) -> tuple[int, int]:
    """The number of commits and of attempts; raises Violation."""
    return ChainRoundWorld(shape).run_rounds()


class ChainBoundedClient(BoundedClient, ChainRoundClient):
    """A worker that may be ahead of the slowest by so much, and whose servers come and go."""


class ChainBoundedWorld(ChainRoundWorld):
    """`ssp` over chains."""

    def __init__(self, shape: RoundPlan) -> None:
        self.history = History(shape.plan.clients)
        super().__init__(shape)

    def _client(self, who: int) -> ChainBoundedClient:
        return ChainBoundedClient(self, who)  # type: ignore[arg-type]


def make_chain_bounded_plan(seed: int) -> RoundPlan:
    shape, plan = make_bounded_plan(0)(seed), make_chain_plan(seed)
    plan = dataclasses.replace(
        plan,
        actions=_faults(plan, ("crash", "cut", "mute", "pause_client")),
        clients=shape.plan.clients,
        columns=shape.plan.columns,
        stream=True,  # a question that is asked anew all the time is not what is looked at here
    )
    return dataclasses.replace(shape, plan=plan)


def run_chain_bounded_plan(shape: RoundPlan) -> int:
    return play_bounded(ChainBoundedWorld(shape))
