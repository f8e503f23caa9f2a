"""All simulators, by name: what each makes of a seed, and how it runs that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .bounded import make_bounded_plan, run_bounded_plan
from .chain_rounds import (
    make_chain_bounded_plan,
    make_chain_round_plan,
    run_chain_bounded_plan,
    run_chain_round_plan,
)
from .chains import make_chain_plan, run_chain_plan
from .checkpoints import make_disk_plan, run_disk_plan
from .coordinated import make_coordinator_plan, run_coordinator_plan
from .cuts import make_cut_plan, run_cut_plan
from .growth import make_growth_plan, run_growth_plan
from .journals import make_journal_plan, run_journal_plan
from .ledger import Violation
from .losses import make_reload_plan, make_weak_plan, run_reload_plan, run_weak_plan
from .passes import make_pass_plan, run_pass_plan
from .plan import Action, make_plan
from .rounds import RoundPlan, make_round_plan, run_round_plan
from .simulator import run_plan


class Kind(NamedTuple):
    """A plan is a value with actions; to run it raises Violation."""

    make: Callable[[int], Any]
    run: Callable[[Any], Any]
    seeds: int  # in `make test`: docs/guarantees.md has the sum


KINDS = {
    "pushes": Kind(make_plan, run_plan, 1500),
    "rounds": Kind(make_round_plan, run_round_plan, 600),
    "passes": Kind(make_pass_plan, run_pass_plan, 300),
    "growth": Kind(make_growth_plan, run_growth_plan, 300),
    **{f"ssp:{bound}": Kind(make_bounded_plan(bound), run_bounded_plan, 100) for bound in (0, 1, 3)},
    "chains": Kind(make_chain_plan, run_chain_plan, 200),
    "chain-rounds": Kind(make_chain_round_plan, run_chain_round_plan, 120),
    "chain-ssp:0": Kind(make_chain_bounded_plan, run_chain_bounded_plan, 40),
    "weak": Kind(make_weak_plan, run_weak_plan, 100),
    "reload": Kind(make_reload_plan, run_reload_plan, 100),
    "checkpoints": Kind(make_disk_plan, run_disk_plan, 120),
    "coordinator": Kind(make_coordinator_plan, run_coordinator_plan, 100),
    "cuts": Kind(make_cut_plan, run_cut_plan, 100),
    "journal": Kind(make_journal_plan, run_journal_plan, 150),
}


def run_seed(kind: str, seed: int) -> Any:
    """What the run of that seed went through. A Violation names the seed, and how to replay it."""
    plan = KINDS[kind].make(seed)
    try:
        return KINDS[kind].run(plan)
    except Exception as error:  # noqa: BLE001  # whatever it is, the seed must be said
        known = isinstance(error, Violation)
        what = str(error) if known else f"{type(error).__name__}: {error}"
        replay = f"replay: python -m tests.sim {kind} {seed}"
        raise Violation(f"{kind}, seed {seed}: {what}; {replay}") from (None if known else error)


def first_failure(kind: str, seeds: Iterable[int]) -> tuple[int, Violation] | None:
    """The first of these seeds that fails, with what was violated."""
    for seed in seeds:
        try:
            run_seed(kind, seed)
        except Violation as violation:
            return seed, violation
    return None


def fails(kind: str, plan: Any) -> Exception | None:
    """What goes wrong in it, if anything."""
    try:
        KINDS[kind].run(plan)
    except Exception as error:  # noqa: BLE001  # it may break down elsewhere now
        return error
    return None


def shrink(kind: str, plan: Any) -> Any:
    """A smaller plan that still fails: actions are left out greedily, then the network is made kinder."""
    size = len(actions_of(plan)) // 2
    while size > 0:
        at = 0
        while at < len(actions := actions_of(plan)):
            smaller = _with(plan, actions=actions[:at] + actions[at + size :])
            if fails(kind, smaller):
                plan = smaller
            else:
                at += size
        size //= 2
    for kinder in ({"drop": 0.0}, {"double": 0.0}, {"delay_ms": 1.0}, {"late_ms": 20.0}):
        if hasattr(_inner(plan), *kinder):
            smaller = _with(plan, **kinder)
            plan = smaller if fails(kind, smaller) else plan
    return plan


def _inner(plan: Any) -> Any:
    return plan.plan if isinstance(plan, RoundPlan) else plan


def actions_of(plan: Any) -> tuple[Action, ...]:
    """What happens in it."""
    found: tuple[Action, ...] = _inner(plan).actions
    return found


def _with(plan: Any, **changes: Any) -> Any:
    inner = dataclasses.replace(_inner(plan), **changes)
    return dataclasses.replace(plan, plan=inner) if isinstance(plan, RoundPlan) else inner
