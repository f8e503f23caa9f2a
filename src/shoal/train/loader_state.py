"""What the state of a loader means to a job.

In a job that is new the state knows better: its ledger, which knows nothing of the pass, is told what is
done, by a step that has no gradient. So units are done once, by who loaded the state. Where the job has made
steps before this worker came (it replaces another, or goes on from a checkpoint) the ledger knows better, and
the state says in which pass at most. And who goes back within a life has its units in fixed order again.
"""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING

from shoal.data.ledger import LeasedLedger
from shoal.data.loader import Start
from shoal.data.plan import Plan
from shoal.errors import BadInput

if TYPE_CHECKING:
    from shoal.train.passes import Passes
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.worker")
_UNITS_A_STEP = 1 << 16
_NOTHING: tuple[int, frozenset[int]] = (-1, frozenset())
_GO_ON = "A job of several workers goes on from its own checkpoints: shoal run --checkpoint URL"


class LoaderState:
    """Of one loader, whose first pass has the number `first`."""

    def __init__(self, passes: Passes, worker: Worker, first: int) -> None:
        self._passes, self._worker, self._first = passes, worker, first
        self._begun = False  # a pass over it, in this life
        self._untold = _NOTHING  # a pass, and its units that the ledger is to be told of

    def loaded(self, epoch: int, done: frozenset[int]) -> Start | None:
        """Where to begin with such a state; None: nowhere else than before."""
        passes, worker, self._untold = self._passes, self._worker, _NOTHING
        if passes.loader.stream_batches is not None:  # of which the ledger knows nothing
            first, _ = passes.begins_at(epoch)
            return (epoch, done) if first == epoch or self._begun else (first, ())
        leased = isinstance(passes.by_word, LeasedLedger)
        if self._begun and leased:
            raise BadInput(
                f"loader.load_state_dict behind a pass: under {worker.policy} data is leased, and what was "
                f"handed out is not handed out again. {_GO_ON}"
            )
        if self._begun:
            return epoch, done
        if not worker.rounds.first:
            first, known = passes.begins_at(epoch)
            if first == epoch and not worker.rounds.report(self._first + epoch)["units"]:
                first, known = passes.begins_at(0)  # the job has not come so far
            if first >= epoch:
                return first, known
            _log.warning(
                "worker %d: the loader's state is of pass %d, and the job is in pass %d: it goes on there",
                worker.rank,
                epoch,
                first,
            )
            return None
        if leased and done and worker.world_size > 1:
            raise BadInput(
                f"worker {worker.rank}: the loader's state says that {len(done)} units of pass {epoch} are "
                f"done, and the job's ledger knows nothing of them. Under {worker.policy} data is leased, "
                f"and a worker knows its own units alone: others would be trained twice. {_GO_ON}"
            )
        first, known = passes.begins_at(epoch)
        self._untold = epoch, done
        return first, {*known, *(done if first == epoch else ())}

    def tell(self, epoch: int, batches: int) -> None:
        """Pass `epoch` is open, and nothing of it was handed out here."""
        passes, worker, begun, self._begun = self._passes, self._worker, self._begun, True
        (at, done), self._untold = self._untold, _NOTHING
        done = done if at == epoch else frozenset()
        fixed, again = passes.loader.ledger.ordered, worker.lives.again
        if (
            worker.strategy is None
            or begun
            or not worker.rounds.first
            or passes.loader.stream_batches is not None
        ):
            return
        if fixed:
            said = f"pass {epoch}, steps {self._rows(done, batches)}" if at == epoch else "nothing"
            again(lambda: passes.agreement.done_before(said))
        number = self._first + epoch
        known = again(lambda: worker.rounds.resume(number))[1] if fixed and done else ()
        units = sorted(done.difference(known))
        for begin in range(0, len(units), _UNITS_A_STEP):
            worker._units = [(number, unit) for unit in units[begin : begin + _UNITS_A_STEP]]
            worker.advance(weight=0.0)

    def _rows(self, done: frozenset[int], batches: int) -> str:
        """Of which steps these units are, as "0-3, 5-5"; but for the last, of which some may have nothing."""
        loader, n = self._passes.loader, self._worker.world_size
        each = loader.whole or self._worker.batch == "each"
        plan = Plan(n, "each" if each else "split")
        rows = sorted({plan.row(unit) for unit in done} - {batches // n if each else batches - 1})
        runs = [
            [row for _, row in run] for _, run in groupby(enumerate(rows), lambda place: place[1] - place[0])
        ]
        return ", ".join(f"{run[0]}-{run[-1]}" for run in runs) or "none"
