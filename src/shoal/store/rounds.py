"""Steps, rounds and the data ledger, as a worker asks for them; the answers come from the sync shard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal import _core
from shoal.errors import BadInput, Timeout

if TYPE_CHECKING:
    from shoal.store.client import Client

# What a worker is doing, as the sync shard numbers it (core/store/sync_shard.h).
PHASES = ("absent", "working", "waiting", "at_end", "left", "gone", "away")
_WORKER = "worker-"

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def client_name(rank: int) -> str:
    """The name under which worker `rank` is a client: a later client of that name takes its place."""
    return f"{_WORKER}{rank}"


def rank_of(name: str | None) -> int | None:
    """The rank of the worker of that name; None: it is no worker's.

    >>> rank_of(client_name(3)), rank_of("saver")
    (3, None)
    """
    number = (name or "").removeprefix(_WORKER)
    return int(number) if number.isdecimal() and client_name(int(number)) == name else None


class _Asking(Protocol[T_co]):
    """A function of the core, all but its deadline given."""

    def __call__(self, *, timeout_s: float) -> T_co: ...


@dataclass(frozen=True)
class Advanced:
    """What came of finishing a step."""

    step: int  # to work on next
    dropped: bool  # the contribution came too late for its round
    norm: float  # of the round's gradient, where it was clipped
    waited_s: float


class Rounds:
    """One worker's place in the job: clocks, rounds, leases. Made by joining; `rank` is its name.

    `growths`: how often a running pass has taken in new workers, as it was when this one was let go on.
    `first`: no life of this rank was in the job before, and the job began with it.
    """

    def __init__(self, client: Client, rank: int, workers: int) -> None:
        self._session = client._session
        self.rank = rank
        self.workers = workers
        self.growths = 0
        self.first = False

    def open(
        self,
        *,
        take: str,
        quorum: int,
        count: int,
        slack: int,
        resize: bool = False,
        back: bool = False,
    ) -> int:
        """Define the job's rules, or agree with those who did; the step to begin with.

        `resize`: do not join, but let the job go on with this number of workers. `back`: it was here before,
        or was started by who decides on the number, and need not know how many there are by now.
        """
        call = partial(
            self._session.core.sync_open,
            rank=self.rank,
            workers=self.workers,
            take=take,
            quorum=quorum / self.workers,
            count=count,
            slack=slack,
            resize=resize,
            back=back,
        )
        # Rounds of a quorum close also without who has not come; else its first step is the first of all.
        awaited = quorum < self.workers and not resize and self._is_awaited()
        step, self.growths = self._ask("sync", call)
        self.first = step == 0 or awaited
        return step

    def _is_awaited(self) -> bool:
        """Whether the job has begun, with this rank to come."""
        try:
            state = self.state()
        except BadInput:  # nobody has come
            return False
        known = self.rank < len(state["phases"])
        return known and (state["phases"][self.rank], state["clocks"][self.rank]) == ("absent", 0)

    def advance(
        self,
        step: int,
        *,
        weight: float,
        lr: float = float("nan"),
        clip: float = 0.0,
        units: Sequence[tuple[int, int]] = (),
        timeout: float | None = None,
    ) -> Advanced:
        """Report `step` as finished and wait until the next may begin; its commits are then applied."""
        call = partial(
            self._session.core.advance,
            rank=self.rank,
            step=step,
            weight=weight,
            lr=lr,
            clip=clip,
            units=list(units),
        )
        answer = self._ask(f"step {step}", call, timeout)
        self.growths = answer["growths"]
        return Advanced(answer["step"], answer["dropped"], answer["norm"], answer["waited_s"])

    def state(self) -> dict[str, Any]:
        """Clocks and phases by rank, who waits, staged bytes, dropped contributions, staleness."""
        found = dict(self._ask("sync state", self._session.core.sync_state))
        return {**found, "phases": [PHASES[number] for number in found["phases"]]}

    def joined(self) -> list[int]:
        """The ranks that have joined this job, also those that have left it again."""
        return [rank for rank, phase in enumerate(self.state()["phases"]) if phase != "absent"]

    def open_pass(
        self,
        epoch: int,
        batches: int,
        *,
        split: bool = False,
        fixed: bool = False,
        several_steps: bool = False,
    ) -> tuple[tuple[int, int], ...]:
        """A pass over the data has that many batches; all workers must say the same.

        Gives (first unit, workers) for each time that it was cut: with `split` each batch from there on into
        as many units. `fixed`: rank r of n has every n-th of them, from first + r on; else units are leased.
        `several_steps` may be made with a batch: then no pass of this job grows.
        """
        core = self._session.core
        call = partial(
            core.ledger_open,
            epoch=epoch,
            units=batches,
            split=split,
            fixed=fixed,
            several_steps=several_steps,
        )
        return tuple(self._ask(f"pass {epoch}", call))

    def lease(self, epoch: int, want: int, *, overdue: bool = False) -> list[tuple[int, int]]:
        """Ranges of units to work on, `want` at most in all; none when nothing is left to hand out.

        `overdue`: where nothing else is left, also what others hold.
        """
        core = self._session.core
        call = partial(core.lease, rank=self.rank, epoch=epoch, want=want, overdue=overdue)
        return self._ask(f"pass {epoch}", call)

    def keep(self, epoch: int, units: Sequence[int]) -> list[int]:
        """Those of the units that are still leased to this worker: nobody takes them over any more."""
        call = partial(self._session.core.keep_units, rank=self.rank, epoch=epoch, units=list(units))
        return self._ask(f"pass {epoch}", call)

    def end_pass(self, epoch: int, timeout: float | None = None) -> tuple[int, bool]:
        """Wait until all units are done and all workers are here: the step to go on with, and whether the
        pass is over. Else units came back, or it has grown: open it and lease again.
        """
        call = partial(self._session.core.pass_end, rank=self.rank, epoch=epoch, growths=self.growths)
        step, again, self.growths = self._ask(f"the end of pass {epoch}", call, timeout)
        return step, not again

    def resume(self, epoch: int) -> tuple[int, list[int]]:
        """Where a worker that comes late goes on: the first pass from `epoch` on that is not over, and what
        is done in it of the units that are this rank's in fixed order.
        """
        call = partial(self._session.core.resume, rank=self.rank, epoch=epoch)
        return self._ask(f"pass {epoch}", call)

    def go_on(self, epoch: int) -> tuple[int, list[int]]:
        """As `resume`, for passes over data: one that was left by a `break` is over once a later one was
        begun, though the ledger does not know it. Not so for the first life of a rank: what others have left
        it has yet to train.
        """
        first, done = self.resume(epoch)
        while not self.first:
            later, later_done = self.resume(first + 1)
            if later == first + 1 and not self.report(later)["units"]:
                break
            first, done = later, later_done
        return first, done

    def report(self, epoch: int) -> dict[str, Any]:
        """How often each unit of a pass was used, and by whom."""
        call = partial(self._session.core.ledger_report, epoch=epoch)
        return dict(self._ask(f"pass {epoch}", call))

    def leave(self, *, away: bool = False) -> None:
        """Gone for good: others wait no more for this rank, and its leases return.

        Said by a newer client of the same name it evicts the older one, for which another is to come; `away`:
        or not, and the rest does what is left of its part.
        """
        self._ask("leaving", partial(self._session.core.leave, rank=self.rank, away=away))

    def _ask(self, what: str, call: _Asking[T], timeout: float | None = None) -> T:
        started = time.monotonic()
        seconds = self._session.deadline(timeout)
        try:
            return call(timeout_s=seconds)
        except _core.CoreError as error:
            failure = self._session.error(error, f"worker {self.rank}, {what}")
            if isinstance(failure, Timeout):
                failure = Timeout(f"{failure} (waited {time.monotonic() - started:.1f} s)")
            raise failure from None
