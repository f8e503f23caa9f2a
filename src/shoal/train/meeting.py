"""Exchanges among workers without the servers, whose failure says who did not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeVar

import torch

from shoal.collective.group import Group
from shoal.errors import Timeout, Unavailable
from shoal.train.waits import doing

if TYPE_CHECKING:
    from shoal.train.worker import Worker

T = TypeVar("T")

# The notice of a worker whose exchange with the others has failed; models and loaders have those below.
_TOPIC = (1 << 16) - 1
# Those who wait as well give up at about the same time.
_OTHERS_S = 3.0
_LOOK_EVERY_S = 0.1


class Meeting(Group):
    """A group whose errors name the workers that are missing: a collective knows only that it failed."""

    def __init__(self, worker: Worker, group: Group) -> None:
        self._worker, self._group = worker, group
        self.rank, self.size = group.rank, group.size

    def sum_(self, values: torch.Tensor) -> None:
        self._meet(lambda: self._group.sum_(values))

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        return self._meet(lambda: self._group.swap(values, peers))

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        self._meet(lambda: self._group.copy_from_(values, root))

    def _meet(self, exchange: Callable[[], T]) -> T:
        try:
            return exchange()
        except (Timeout, RuntimeError) as error:
            missing = self._missing()
            if not missing:
                raise
            seen = str(error).strip().partition("\n")[0]
            raise Unavailable(
                f"worker {self.rank}, step {self._worker.step}: the exchange with the others failed; not "
                f"here: {missing}. Does it call optimizer.step() as often as the others? ({seen})"
            ) from error

    def _missing(self) -> str:
        """Who is not where this worker waits for all of them; empty if all are."""
        worker, board = self._worker, self._worker.board
        if board is None:
            return ""
        others = [rank for rank in range(worker.world_size) if rank != worker.rank]
        here = str(worker.step)
        board.post(_TOPIC, here)
        until = monotonic() + _OTHERS_S
        while True:
            state = worker.rounds.state()
            there = board.posted(_TOPIC, here, others)
            gone = [rank for rank in others if state["phases"][rank] in ("left", "gone", "away")]
            missing = [rank for rank in others if rank not in there or rank in gone]
            if gone or not missing or monotonic() > until:
                return doing(state, missing)
            sleep(_LOOK_EVERY_S)
