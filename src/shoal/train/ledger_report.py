"""The proof of what data was used: `worker.ledger.report()`, and in a job's progress for `shoal status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import optim
from shoal.errors import BadInput
from shoal.store.client import Client
from shoal.store.rounds import Rounds
from shoal.store.table import Table
from shoal.train.progress import PASSES_A_LOADER, DataUse, ProgressReport
from shoal.train.share import Drawn


@dataclass(frozen=True)
class PassReport:
    """How one pass used its units (a unit is one worker's part of one global batch; of a stream, a batch)."""

    epoch: int
    units: int
    done: int
    used: dict[int, int]  # times used -> units
    by_rank: dict[int, int]

    @property
    def exactly_once(self) -> bool:
        """Whether every unit was used once and none twice."""
        return self.used.get(1, 0) == self.units

    def __str__(self) -> str:
        how = ", ".join(f"{units} units {times} times" for times, units in sorted(self.used.items()))
        loader, epoch = divmod(self.epoch, PASSES_A_LOADER)
        name = f"pass {epoch} of loader {loader}" if loader else f"pass {epoch}"
        return f"{name}: {self.done} of {self.units} units done ({how})"


_KEPT = 8  # passes, by the ledger
# The ledger knows nothing of streams: how many batches each worker has seen and used lies in a table.
_STREAMS, _RANKS = "shoal.streams", 1 << 12
_EXACT = 1 << 24  # whole numbers up to here are exact in a float32


class LedgerReport:
    """Reads the ledger of the job. `last` is the pass that this worker ended last."""

    def __init__(self, rounds: Rounds, client: Client) -> None:
        self._rounds, self._client = rounds, client
        self.last = 0

    def report(self, epoch: int | None = None) -> PassReport:
        """What became of the units of one pass; of the one that ended last if none is named."""
        epoch = self.last if epoch is None else epoch
        if (report := self.find(epoch)) is None:
            raise BadInput(
                f"the ledger knows nothing of pass {epoch}: it was never begun, or is forgotten (the latest "
                f"{_KEPT} are kept). The one that ended last is {self.last}"
            )
        return report

    def find(self, epoch: int) -> PassReport | None:
        """The report of a pass; None if it was never begun, or is forgotten."""
        found = self._rounds.report(epoch)
        used = {int(times): int(units) for times, units in found["used"].items()}
        by_rank = {int(rank): int(units) for rank, units in found["by_rank"].items()}
        units, done = found["units"], found["done"]
        if units == 0:
            keys = [epoch * _RANKS + rank for rank in by_rank]
            rows = self._streams().pull(keys).astype(np.int64) @ np.array(
                [[1, 0], [_EXACT, 0], [0, 1], [0, _EXACT]]
            )
            if not rows.any():
                return None
            units = int(rows[:, 0].max()) - 1
            by_rank = {rank: int(row[1]) for rank, row in zip(by_rank, rows, strict=True)}
            done = sum(by_rank.values())
            used = {times: count for times, count in ((0, units - done), (1, done)) if count}
        return PassReport(epoch=epoch, units=units, done=done, used=used, by_rank=by_rank)

    def streamed(self, epoch: int, batches: int, used: int) -> None:
        """This worker has come to the end of a stream of so many batches, of which it has used these."""
        batches += 1  # a row of zeros was never written
        row = [batches % _EXACT, batches // _EXACT, used % _EXACT, used // _EXACT]
        self._streams().assign([epoch * _RANKS + self._rounds.rank], np.array([row], np.float32))

    def _streams(self) -> Table:
        return self._client.table(_STREAMS, dim=4, optimizer=optim.SGD(lr=1.0))


class Usage:
    """What data a job has used, as its progress tells it: what a worker trained of passes that have not ended
    is its own word; of passes that ended, also what workers trained that are gone, the ledger's, by worker 0.
    """

    def __init__(self, ledger: LedgerReport, progress: ProgressReport, *, tells: bool) -> None:
        self._ledger, self._progress, self._tells = ledger, progress, tells
        self._ended = progress.value.ended
        self._open, self._over = Counter(progress.value.open), dict(progress.value.over)

    def drew(self, drawn: Iterable[Drawn]) -> None:
        """A step takes these."""
        for one in drawn:
            self._open[one.epoch] += max(0, one.samples)

    @property
    def known(self) -> dict[str, Any]:
        """What progress is told with the samples."""
        return {"ended": self._ended, "open": dict(self._open), "over": dict(self._over)}

    def ends(self, epoch: int, samples: int | None) -> None:
        """A pass of so many samples, if that is known, is over everywhere, and so are those before it."""
        self._ledger.last = epoch
        for left in self._left_before(epoch):
            self._is_over(left, samples, broken=True)
        self._is_over(epoch, samples)

    def _is_over(self, epoch: int, samples: int | None, *, broken: bool = False) -> None:
        own, so_far = self._open.pop(epoch, 0), self._progress.value.data or DataUse()
        tells = self._tells and not so_far.has(epoch)
        ended = self._ledger.find(epoch) if tells or broken else None
        said: dict[str, Any] = {}
        if broken and (ended is None or ended.done < ended.units):  # what was trained stays the workers' word
            said = {"data": so_far.and_left(epoch)} if tells else {}
        else:
            self._end(epoch, own if samples else 0)
            if tells and ended:
                said = {"data": so_far.and_a_pass(epoch, ended.units, ended.used, samples)}
        self._progress.update(**self.known, **said)

    def _end(self, epoch: int, own: int) -> None:
        """Worker 0 may have left the pass, and know only later that it has ended."""
        if own:
            self._over[epoch] = self._over.get(epoch, 0) + own
        loader = epoch // PASSES_A_LOADER
        for past in sorted(one for one in self._over if one // PASSES_A_LOADER == loader)[:-_KEPT]:
            self._ended += self._over.pop(past)

    def breaks(self, epoch: int) -> None:
        """The loop leaves a pass. Whether others end it is known when a later one has ended everywhere."""
        self._open.setdefault(epoch, 0)
        for left in self._left_before(epoch - _KEPT):
            del self._open[left]

    def _left_before(self, epoch: int) -> list[int]:
        loader = epoch // PASSES_A_LOADER
        return sorted(one for one in self._open if one < epoch and one // PASSES_A_LOADER == loader)
