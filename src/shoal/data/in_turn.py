"""Batches of anything that iterates: an iterable dataset, a generator, a list. Whole ones, in turn.

Nothing of a stream can be left unread, so every worker reads all of it and keeps batch i where i % n is its
rank; all must read the same stream. A dataset that divides itself is for `prepare(..., split=False)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from shoal.data.handed import NO_UNIT, Count, Handed, Seen, one_ahead
from shoal.data.indexed import copy_of
from shoal.data.ledger import Ledger
from shoal.data.order import Order
from shoal.data.plan import Plan
from shoal.errors import BadInput


class InTurnSource:
    """An iterable of batches. The ledger is not asked: it cannot lease what has no known end."""

    def __init__(self, batches: Iterable[Any], n: int, *, rank: int, seed: int, count: Count) -> None:
        self._n, self._rank, self._count = n, rank, count
        self.seen: Seen | None = None
        self._order: Order | None = None
        self._batches: Any = batches
        self._any = False
        self.read = 0  # batches of the pass that runs, or ran last
        self.order = "a stream"
        if isinstance(batches, DataLoader):
            self._order = Order(batches, seed=seed, rank=rank)
            self._batches = copy_of(
                batches,
                generator=self._order.seeds,
                batch_size=batches.batch_size,
                drop_last=batches.drop_last,
            )
        elif getattr(batches, "__len__", lambda: 1)() == 0:
            raise BadInput(f"the loader ({type(batches).__name__}) is empty: there is no batch in it")

    def __len__(self) -> int:
        batches = self._batches
        if not hasattr(batches, "__len__"):
            raise TypeError(f"{type(batches).__name__} has no length")
        return max(0, (len(batches) - self._rank + self._n - 1) // self._n)

    def start(self, epoch: int, ledger: Ledger, done: set[int]) -> Iterator[Handed]:
        if self._order is not None:
            self._order.begin_stream(epoch)
        self._n = ledger.begin(epoch, 0, self._n)[-1][1]
        return self._pass(iter(self._batches), ledger, done)

    def skip(self, epoch: int) -> None:
        if self._order is not None:
            self._order.begin_stream(epoch)

    def state(self) -> dict[str, Any]:
        return {} if self._order is None else self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        if self._order is not None:
            self._order.load(state)

    def _pass(self, batches: Iterator[Any], ledger: Ledger, done: set[int]) -> Iterator[Handed]:
        self.read = 0

        def mine() -> Iterator[tuple[int, Any]]:
            for unit, batch in enumerate(batches):
                self.read = unit + 1
                if unit % self._n == self._rank and unit not in done:
                    yield unit, batch

        seen = self.seen
        own = mine() if seen is None else one_ahead(mine(), lambda pair: seen(pair[1]))
        for unit, batch in own:
            samples = self._count(batch)
            yield Handed(unit, samples, samples, batch)
        # A generator gives nothing the second time, as in plain Python; nothing at all is a mistake.
        if self.read == 0 and not self._any:
            raise BadInput("the loader is empty: its dataset gave no batch")
        self._any = True
        if ledger.ordered and Plan(self._n, "each").idle(self._rank, self.read):
            yield Handed(NO_UNIT, 0, 0)
