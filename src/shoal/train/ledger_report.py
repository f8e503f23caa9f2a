"""The proof of what data was used: `worker.ledger.report()`, and in a job's progress for `shoal status`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.store.rounds import Rounds

__all__ = ["LedgerReport", "PassReport"]


@dataclass(frozen=True)
class PassReport:
    """How one pass used its units (a unit is one worker's part of one global batch)."""

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
        return f"pass {self.epoch}: {self.done} of {self.units} units done ({how})"


class LedgerReport:
    """Reads the ledger of the job. `last` is the pass that this worker ended last."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.last = 0

    def report(self, epoch: int | None = None) -> PassReport:
        """What became of the units of one pass; of the one that ended last if none is named."""
        epoch = self.last if epoch is None else epoch
        found = self._rounds.report(epoch)
        return PassReport(
            epoch=epoch,
            units=found["units"],
            done=found["done"],
            used={int(times): int(units) for times, units in found["used"].items()},
            by_rank={int(rank): int(units) for rank, units in found["by_rank"].items()},
        )
