"""Batches of a map-style dataset: batches of indexes are cut first, then only this worker's part is fetched.

The fetching is done by a DataLoader of the user's settings whose sampler is ours. Its worker processes draw
ahead of the loop, so what each fetched batch is stands in a queue beside it.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from shoal.data.handed import NO_UNIT, Count, Handed, Seen, one_ahead
from shoal.data.ledger import Ledger
from shoal.data.order import Order
from shoal.data.plan import Cuts, Plan, own_ranges
from shoal.errors import BadInput


class IndexedSource:
    """A map-style dataset behind a DataLoader."""

    def __init__(self, loader: DataLoader[Any], plan: Plan, *, rank: int, seed: int, count: Count) -> None:
        _refuse_divided(loader)
        self._rank, self._count = rank, count
        self.seen: Seen | None = None
        # Without batches of indexes there is nothing to cut: what a sampler gives is one item, and a unit.
        self._single = loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)
        self._plan = Plan(plan.workers, "each") if self._single else plan
        self._cuts: Cuts = ((0, plan.workers),)
        self._order = Order(loader, seed=seed, rank=rank)
        self._feed = _Feed()
        self._samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
        self.samples = _samples(loader)  # of a pass, if that is known
        self.order = ""
        sampler = (
            {"batch_sampler": self._feed} if loader.batch_sampler is not None else {"sampler": self._feed}
        )
        size = {} if loader.batch_sampler is not None else {"batch_size": None}
        self._fetching = copy_of(loader, generator=self._order.seeds, **sampler, **size)
        if self._order.length == 0:
            raise BadInput(f"{_described(loader)}: there is no batch in it")

    @property
    def whole(self) -> bool:
        """Whether a unit is all of what the sampler gives at once."""
        return self._plan.batch == "each"

    def __len__(self) -> int:
        batches = self._order.length
        if batches is None:
            raise TypeError("the loader's sampler has no length")
        if self._plan.batch == "split":
            return batches
        return sum(map(len, own_ranges(self._cuts, self._rank, batches)))

    def start(self, epoch: int, ledger: Ledger, done: set[int]) -> Iterator[Handed]:
        before, state = self._order.digest(epoch), self._order.state()
        drawn = self._order.begin(epoch)
        length = self._order.length
        batches: _Batches
        if ledger.ordered and self._order.known and length is not None:
            batches = _Streamed(drawn, length)
        else:
            # By lease a unit can be any, also one that came back. And all workers must have drawn alike when
            # the next pass begins, however much of this one each has trained.
            batches = _Kept(drawn)
        if len(batches) == 0:
            raise BadInput(f"pass {epoch}: the loader's sampler gave no batch")
        digest = batches.digest() if isinstance(batches, _Kept) else before
        self.order = f"{self._samples:,} samples in {len(batches):,} batches, order {digest:08x}"
        self._cuts = tuple(ledger.begin(epoch, len(batches), self._plan.workers))
        self._plan = Plan.of(self._cuts, self._plan.batch)
        return self._pass(epoch, batches, ledger, done, state)

    def skip(self, epoch: int) -> None:
        self._order.skip(epoch)

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)

    def _pass(
        self, epoch: int, batches: _Batches, ledger: Ledger, done: set[int], state: dict[str, Any]
    ) -> Iterator[Handed]:
        units = ledger.units(epoch, self._plan.units(len(batches)))
        if not ledger.remembers:
            units = (unit for unit in units if unit not in done)
        idled = False
        while True:
            life = ledger.life
            yield from self._fetch(batches, units, ledger)
            idle = ledger.ordered and not idled and self._plan.idle(self._rank, len(batches))
            if idle and ledger.life == life:
                idled = True
                yield Handed(NO_UNIT, 0, 0)
            if ledger.life == life and ledger.finish(epoch):
                return
            if isinstance(batches, _Streamed):  # what came back is looked up in another drawing
                self._order.load(state)
                batches = _Kept(self._order.begin(epoch))
            self._cuts = tuple(ledger.cuts)
            self._plan = Plan.of(self._cuts, self._plan.batch)
            units = ledger.units(epoch, self._plan.units(len(batches)))

    def _fetch(self, batches: _Batches, units: Iterable[int], ledger: Ledger) -> Iterator[Handed]:
        queue: deque[Handed] = deque()
        life = ledger.life
        self._feed.parts = self._parts(batches, units, queue.append)
        fetched: Iterator[Any] = iter(self._fetching)
        if self.seen is not None:
            fetched = one_ahead(fetched, self.seen)
        ended = object()
        while True:
            batch = next(fetched, ended)
            # Empty parts drawn before this batch come first; with none after them they come at the end.
            while ledger.life == life and queue and not queue[0].samples:
                yield queue.popleft()
            if ledger.life != life:  # what was drawn ahead is nobody's any more
                return
            if batch is ended:
                break
            now = queue.popleft()
            samples = self._count(batch) if self._single else now.samples
            yield Handed(now.unit, samples, samples if self._single else now.global_samples, batch)
        assert not queue, f"{len(queue)} units were drawn and not fetched"

    def _parts(
        self, batches: _Batches, units: Iterable[int], announce: Callable[[Handed], None]
    ) -> Iterator[Any]:
        """What the fetching loader draws: the indexes of this worker's units, each announced first."""
        for unit in units:
            batch, part = self._plan.place(unit)
            whole = batches.at(batch)
            if self._single:
                announce(Handed(unit, 1, 1))
                yield whole
                continue
            begin, end = self._plan.at(batch).bounds(part, len(whole))
            announce(Handed(unit, end - begin, len(whole)))
            if begin < end:
                yield _cut(whole, begin, end)
        batches.finish()


class _Feed:
    """The sampler of the fetching loader: what is in `parts` when a pass begins."""

    parts: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.parts


class _Streamed:
    """The global batches of a pass in order, drawn as they are needed and not kept, as torch does."""

    def __init__(self, drawn: Iterator[Any], length: int) -> None:
        self._drawn, self._length = drawn, length
        self._next = 0

    def __len__(self) -> int:
        return self._length

    def at(self, batch: int) -> Any:
        """Batch number `batch`, which is beyond the last one asked for."""
        assert batch >= self._next
        for found in self._drawn:
            self._next += 1
            if self._next > batch:
                return found
        raise BadInput(
            f"the loader's sampler ended after {self._next} of {self._length} batches; its length is wrong"
        )

    def finish(self) -> None:
        """Draw what is left, so that generators stand where torch leaves them."""
        for _ in self._drawn:
            self._next += 1


class _Kept:
    """The global batches of a pass, all drawn at once."""

    def __init__(self, drawn: Iterator[Any]) -> None:
        self._batches = [_packed(batch) for batch in drawn]

    def __len__(self) -> int:
        return len(self._batches)

    def digest(self) -> int:
        """A number that stands for the indexes and their order."""
        found = 0
        for batch in self._batches:
            # Of what is no list of indexes (names, tuples) only the size is known to be the same everywhere.
            seen = batch.tobytes() if isinstance(batch, array) else str(_size(batch)).encode()
            found = zlib.crc32(seen, found)
        return found

    def at(self, batch: int) -> Any:
        """Batch number `batch`, in any order."""
        return self._batches[batch]

    def finish(self) -> None:
        """Nothing is left to draw."""


_Batches = _Streamed | _Kept


def _packed(batch: Any) -> Any:
    """The same indexes in less memory: a list of ints costs five times its numbers."""
    if isinstance(batch, list) and all(type(index) is int for index in batch):
        return array("q", batch)
    return batch if hasattr(batch, "__getitem__") or not isinstance(batch, Iterable) else list(batch)


def _size(batch: Any) -> int:
    return len(batch) if hasattr(batch, "__len__") else 1


def _cut(batch: Any, begin: int, end: int) -> Any:
    part = batch[begin:end]
    return part.tolist() if isinstance(part, array) else part


def copy_of(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A DataLoader of the same dataset and settings, but for `changed`. Batches come in the order drawn."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise BadInput(
            f"{type(loader).__name__} has an __iter__ of its own, which a divided loader cannot use; give a "
            f"plain torch DataLoader, or any other iterable of batches, which workers then take in turn"
        )
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
    }
    return DataLoader(loader.dataset, **settings, **changed)


def _refuse_divided(loader: DataLoader[Any]) -> None:
    """A sampler that already takes a part would leave data out when it is cut again."""
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "num_replicas", 1) != 1:
            raise BadInput(
                f"the loader's {type(sampler).__name__} divides the data itself; Shoal does so, too. Give a "
                f"loader with shuffle=True or a sampler of all the data"
            )


def _samples(loader: DataLoader[Any]) -> int | None:
    size = loader.batch_size
    try:
        drawn = None if size is None else len(loader.sampler)  # type: ignore[arg-type]  # or it has none
    except (TypeError, NotImplementedError):
        return None
    return drawn // size * size if size and drawn and loader.drop_last else drawn


def _described(loader: DataLoader[Any]) -> str:
    size = f"{len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else "its dataset"
    dropped = f", batch_size={loader.batch_size} and drop_last=True" if loader.drop_last else ""
    return f"the loader is empty ({size}{dropped})"
