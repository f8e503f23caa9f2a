"""Waiting for other workers: in slices, so that whoever looks on sees who is waited for, and with an end.

A wait that can never end is told apart from one that has not ended yet: where nobody trains any more and
units of the pass are left, somebody left the loop before its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shoal.errors import BadInput, Timeout
from shoal.store.rounds import Advanced, Rounds
from shoal.train.progress import ProgressReport

T = TypeVar("T")

# Others may evaluate, write a checkpoint, or compile for a while.
WAIT_S = 300.0
_SLICE_S_MAX = 1.0
_DOING = {
    "absent": "has not joined",
    "working": "is at step {clock}",
    "waiting": "waits at step {clock}",
    "at_end": "waits elsewhere",
    "left": "has left",
    "gone": "has died and is being replaced",
    "away": "was evicted",
}


class Waits:
    """The waits of one worker. `seconds` is the deadline of each."""

    def __init__(self, rounds: Rounds, progress: ProgressReport, seconds: float = WAIT_S) -> None:
        self._rounds, self._progress = rounds, progress
        self.seconds = seconds
        self._slice_s = min(_SLICE_S_MAX, seconds / 5)
        self._called: list[Callable[[bool], None]] = []

    def interrupt(self, called: Callable[[bool], None], every_s: float) -> None:
        """Call `called(rests)` so often within a wait: other workers may need this one, also while it rests.

        It rests where it waits for something else than the end of a step.
        """
        self._called.append(called)
        self._slice_s = min(self._slice_s, every_s)

    def step(self, step: int, **said: Any) -> Advanced:
        """Report a step as finished and wait until the next may begin."""

        def behind(state: dict[str, Any]) -> list[int]:
            return [rank for rank in _expected(state) if state["clocks"][rank] <= step]

        what, began = f"the end of step {step}", time.monotonic()
        ask = lambda seconds: self._rounds.advance(step, timeout=seconds, **said)  # noqa: E731
        done = self.until(what, ask, behind, rests=False)
        waited_s = time.monotonic() - began
        # The answer tells of the last slice alone.
        return done if waited_s < self._slice_s else replace(done, waited_s=waited_s)

    def end_of_pass(
        self, epoch: int, name: str, *, shares: int = 0, made: int = 0, patience_s: float = math.inf
    ) -> tuple[int, bool] | None:
        """Wait until a pass is over everywhere: the next step, and True; False where units came back, or it
        has grown; None where they are late.

        `shares`: units that each worker has in static order, 0 where they are leased; then those that others
        hold are late after `patience_s`. `made`: the steps that this worker has made in it.
        """
        seen: list[Any] = []
        late = time.monotonic() + patience_s

        def expected(state: dict[str, Any]) -> list[int]:
            found = _expected(state)
            # Twice the same: between two looks somebody may have come from the last step to the end.
            now = None if found else (self._rounds.report(epoch), state["clocks"], state["phases"])
            if now is not None and now == (seen.pop() if seen else None):
                self._give_up(name, shares, *now)
            seen[:] = [now]
            return found

        def ask(seconds: float) -> tuple[int, bool] | None:
            left = late - time.monotonic()
            return None if left <= 0 else self._rounds.end_pass(epoch, min(seconds, left))

        if not shares:
            return self.until(f"the end of {name}", ask, expected)
        # It may be this one that made too few, and is at the end before the others for that.
        doubt = f"This worker made {made} steps with its {shares} units: do all make equally many?"
        return self.until(f"the end of {name}", ask, expected, doubt=doubt)

    def until(
        self,
        what: str,
        ask: Callable[[float], T],
        expected: Callable[[dict[str, Any]], list[int]],
        *,
        rests: bool = True,
        doubt: str = "Does it call optimizer.step() as often as the others?",
    ) -> T:
        """Ask for so many seconds until there is an answer; `expected` says who is waited for, and `doubt`
        what may be the reason if there never is one.
        """
        began = time.monotonic()
        while True:
            left = began + self.seconds - time.monotonic()
            try:
                return ask(max(0.01, min(left, self._slice_s)))
            except Timeout:
                for called in self._called:
                    called(rests)
                state = self._rounds.state()
                others = expected(state)
                self._progress.update(state="waiting", waiting_for=tuple(others))
                if left > self._slice_s:
                    continue
                if not others:  # the servers, then
                    raise
                raise Timeout(
                    f"worker {self._rounds.rank}, {what}: waited {time.monotonic() - began:.0f} s for "
                    f"{doing(state, others)}. {doubt} SHOAL_WAIT_S (now {self.seconds:g}) allows more time"
                ) from None

    def _give_up(
        self, name: str, shares: int, report: dict[str, Any], clocks: list[int], phases: list[str]
    ) -> None:
        if report["done"] >= report["units"]:
            return
        state = {"clocks": clocks, "phases": phases}
        done = report["by_rank"]
        short = [rank for rank in done if rank != self._rounds.rank and (not shares or done[rank] < shares)]
        of = f" of {shares}" if shares else ""
        raise BadInput(
            f"worker {self._rounds.rank}: {name} cannot end: {report['units'] - report['done']} of its "
            f"{report['units']} units are left, and nobody trains them: "
            + "; ".join(f"worker {rank} did {done[rank]}{of} and {_phrase(state, rank)}" for rank in short)
            + ". Did it break out of the loop, end early, or not call optimizer.step()? Let all workers "
            "leave a loop at the same step"
        ) from None  # that it waited a moment for the end is no news


def _expected(state: dict[str, Any]) -> list[int]:
    """The ranks that still have something to do, or are still to come."""
    return [rank for rank, phase in enumerate(state["phases"]) if phase in ("working", "absent", "gone")]


def _phrase(state: dict[str, Any], rank: int) -> str:
    return _DOING[state["phases"][rank]].format(clock=state["clocks"][rank])


def doing(state: dict[str, Any], ranks: Sequence[int]) -> str:
    """Each of these workers, and where it is."""
    shown = [f"worker {rank}, which {_phrase(state, rank)}" for rank in ranks[:8]]
    return "; ".join(shown) + (f"; and {len(ranks) - 8} more" if len(ranks) > 8 else "")
