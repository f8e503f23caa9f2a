"""Exchanges among workers without the servers, whose failure says who did not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from shoal.collective.group import Group
from shoal.errors import Timeout, Unavailable

if TYPE_CHECKING:
    from shoal.train.worker import Worker

__all__ = ["Meeting"]

T = TypeVar("T")


class Meeting:
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
            missing = self._worker.stuck()
            if not missing:
                raise
            seen = str(error).strip().partition("\n")[0]
            raise Unavailable(
                f"worker {self.rank}, step {self._worker.step}: the exchange with the others failed; not "
                f"here: {missing}. Does it call optimizer.step() as often as the others? ({seen})"
            ) from error
