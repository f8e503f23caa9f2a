"""The loader that `worker.prepare` returns: this worker's part of each pass over the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shoal.data.handed import NO_UNIT, Count, Handed, Seen, Source
from shoal.data.in_turn import InTurnSource
from shoal.data.indexed import IndexedSource
from shoal.data.ledger import Ledger, StaticLedger
from shoal.data.plan import BatchMode, Cuts, Plan, own_units
from shoal.data.samples import samples_in
from shoal.errors import BadInput

OnUnit = Callable[[int, int, int], object]
OnPass = Callable[[int], object]
Reading = Callable[[], Ledger | None]
Start = tuple[int, Iterable[int]]  # a pass, and which units of it are done
OnLoad = Callable[[int, frozenset[int]], Start | None]

_STATE_VERSION = 2


class ShardedLoader:
    """Iterates worker `rank`'s part of a DataLoader, or of any iterable of batches.

    The loader's batch_size is the global batch. Each global batch is cut into `n` contiguous parts before
    anything is fetched; which of them this worker trains says `ledger` (default: part `rank` of each). With
    batch="each" whole batches are handed out. Iterable datasets and other iterables: whole batches in turn.

    `on_unit(epoch, unit, samples)` is called when a batch is handed to the loop, and with 0 samples for an
    empty part, for which the loop sees no batch: `empty` then says so, for a stream may hold batches of 0
    samples. `global_samples` holds the samples of the unit's global batch. With the unit `NO_UNIT` and 0
    samples others have a batch in this step and this worker has none.
    `on_pass(epoch)` is called when the worker has come to the end of a pass; if it gives False, the next
    `for` runs the same one again. `on_over(epoch)` is called when it passes over one that was finished before
    it came, `on_break(epoch)` when the loop is left before its end. `on_batch(batch)` is called just before
    the loop gets a batch, `ahead(batch)`, if given, before the loop gets the one before that, `on_left()`
    when it gets no more, however it ended. `reading()` is asked when a `for` begins: with a ledger for an
    answer it only reads, is no pass, and leaves one that runs alone. `on_load(epoch, done)` is asked when
    a state is loaded by which these units of the pass are done: where to begin; None: it is passed over.

    `seed`: of the order where the loader has no generator; the same on every worker. `count` says how many
    samples a batch of an iterable holds.

    A pass ends with the loop; the next `for` runs the next one. Not for use by several threads at once.

    >>> from torch.utils.data import DataLoader
    >>> batches = DataLoader(range(8), batch_size=4)
    >>> [batch.tolist() for batch in ShardedLoader(batches, rank=1, n=2)]
    [[2, 3], [6, 7]]
    """

    def __init__(
        self,
        loader: DataLoader[Any] | Iterable[Any],
        rank: int,
        n: int,
        ledger: Ledger | None = None,
        *,
        batch: BatchMode = "split",
        on_unit: OnUnit | None = None,
        on_pass: OnPass | None = None,
        on_over: OnPass | None = None,
        on_break: OnPass | None = None,
        on_batch: Seen | None = None,
        ahead: Seen | None = None,
        on_left: Callable[[], object] | None = None,
        reading: Reading | None = None,
        on_load: OnLoad | None = None,
        seed: int = 0,
        count: Count = samples_in,
    ) -> None:
        plan, self._rank = Plan(n, batch), rank
        self.ledger: Ledger = StaticLedger(rank, n) if ledger is None else ledger
        self._loader, self._plan = loader, plan
        self._on_unit, self._on_pass, self._on_over, self._on_break = on_unit, on_pass, on_over, on_break
        self._on_batch, self._on_left, self._reading = on_batch, on_left, reading
        self._on_load = on_load
        self._leased = self.ledger.remembers  # for training; what is read can have another
        self._new_source = partial(_source, loader, plan, rank=rank, seed=seed, count=count)
        self._source = self._new_source()
        self._source.seen = ahead
        self._reader: Source | None = None
        self._epoch = 0
        self._begun = False  # whether pass `_epoch` was begun, and so the next `for` runs another
        self._start_epoch = 0
        self._start_done: set[int] = set()  # units of that pass
        self._done: set[int] = set()
        self._pass_state: dict[str, Any] = {}
        self.global_samples = 0
        self.empty = False

    @property
    def epoch(self) -> int:
        """The pass that runs; between passes, the one that the next `for` runs."""
        return self._epoch

    @property
    def begins(self) -> int:
        """The pass to go on with: those before it are finished, in this job or as a loaded state has it."""
        return self._start_epoch

    @property
    def order(self) -> str:
        """The order of the pass that runs, in words: equal on workers that draw the same batches."""
        return self._source.order

    @property
    def whole(self) -> bool:
        """Whether its units are whole batches, or items, whatever was asked for."""
        return not isinstance(self._source, IndexedSource) or self._source.whole

    @property
    def samples(self) -> int | None:
        """How many samples a pass has, if that is known."""
        return self._source.samples if isinstance(self._source, IndexedSource) else None

    @property
    def stream_batches(self) -> int | None:
        """How many batches a stream has given so far in its pass; None where batches have indexes."""
        return self._source.read if isinstance(self._source, InTurnSource) else None

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` run this pass; those in between are passed over, as if they were trained."""
        if not isinstance(epoch, int) or epoch < self._epoch:
            raise BadInput(f"set_epoch: epoch is {epoch!r}; the loader is at {self._epoch} already")
        if epoch == self._epoch:
            return
        for skipped in range(self._epoch + self._begun, epoch):
            self._source.skip(skipped)
        self._move_to(epoch)

    def set_start(self, epoch: int, done_units: Iterable[int] = ()) -> None:
        """For a worker that is started again: passes before `epoch` are finished and yield no batch, and of
        `epoch` itself these units are done. A ledger that remembers (`LeasedLedger`) is believed instead.
        """
        self._start_epoch = epoch
        self._start_done = set(done_units)

    def __len__(self) -> int:
        """Batches of a pass in static order: all global ones; in turn, this worker's. Empty parts count."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        ledger = None if self._reading is None else self._reading()
        if ledger is not None:
            # A source of its own: a pass that is being trained may go on behind it.
            self._reader = self._new_source() if self._reader is None else self._reader
            return self._until_left(self._read(self._reader.start(self._epoch, ledger, set())))
        if self._begun:
            self._move_to(self._epoch + 1)
        epoch = self._epoch
        self._begun = True
        if epoch < self._start_epoch:
            self._source.skip(epoch)
            self._move_to(epoch + 1)
            if self._on_over is not None:
                self._on_over(epoch)
            return iter(())
        before = self._start_done if epoch == self._start_epoch else set()
        self._done = before.copy()
        self._pass_state = self._source.state()
        return self._until_left(self._pass(epoch, self._source.start(epoch, self.ledger, before), self._done))

    def _until_left(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        finally:
            if self._on_left is not None:
                self._on_left()

    def _read(self, handed: Iterator[Handed]) -> Iterator[Any]:
        for one in handed:
            if one.batch is not None:
                yield self._shown(one.batch)

    def _shown(self, batch: Any) -> Any:
        """`batch`, which the loop gets next."""
        if self._on_batch is not None:
            self._on_batch(batch)
        return batch

    def _pass(self, epoch: int, handed: Iterator[Handed], done: set[int]) -> Iterator[Any]:
        before: float | None = None
        for one in handed:
            if one.unit != NO_UNIT:
                done.add(one.unit)
            self.global_samples, self.empty = one.global_samples, not one.samples and one.batch is None
            if self._on_unit is not None:
                self._on_unit(epoch, one.unit, one.samples)
            if self.empty:
                continue
            now = time.perf_counter()
            if before is not None:
                self.ledger.spent(now - before)
            before = now
            try:
                yield self._shown(one.batch)
            except GeneratorExit:
                if self._on_break is not None and self._epoch == epoch:
                    self._on_break(epoch)
                raise
        counts = self._on_pass is None or self._on_pass(epoch) is not False
        if self._epoch == epoch:
            self._move_to(epoch + counts)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as values that JSON can hold: a batch counts once the loop has it."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "workers": self._cuts[-1][1],
            "batch": self._plan.batch,
            "leased": self._leased,
            "done": self._done_units() if self._begun else [],
            "source": self._pass_state if self._begun else self._source.state(),
        }

    @property
    def _cuts(self) -> Cuts:
        return self.ledger.cuts or ((0, self._plan.workers),)

    def _done_units(self) -> list[int]:
        """What is done, for a pass that is cut for the present number of workers from its beginning on."""
        cuts, mode = self._cuts, "each" if self.whole else self._plan.batch
        if len(cuts) == 1:
            return sorted(self._done)
        plan, last = Plan.of(cuts, mode), max(self._done, default=-1)
        batches = max(plan.first, plan.ended(last)) if last >= 0 else plan.first
        total = Plan(plan.workers, mode).units(batches)
        return list(own_units(((0, plan.workers),), self._rank, total))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the next `for` yields what was left of that pass.

        The number of workers and the way of cutting must be the same. In fixed order it may be any worker's:
        all have made the steps that one has. Of several that lease each knows its own units alone: there the
        job's ledger says what is left.
        """
        own = {"version": _STATE_VERSION, "workers": self._cuts[-1][1], "batch": self._plan.batch}
        for name, value in own.items():
            if state.get(name) != value:
                raise BadInput(
                    f"the loader's state has {name}={state.get(name)!r}; this loader has {value!r}"
                )
        epoch, done, n = int(state["epoch"]), frozenset(state["done"]), self._cuts[-1][1]
        if not self._leased:
            if state.get("leased") and n > 1:
                raise BadInput(
                    "the loader's state is of a worker that leased its data: it does not tell what others "
                    "have trained. A job of several workers goes on from its own checkpoints: "
                    "shoal run --checkpoint URL"
                )
            plan = Plan(n, "each" if self.whole else self._plan.batch)
            done = frozenset(plan.row(unit) * n + self._rank for unit in done)
        start = (epoch, done) if self._on_load is None else self._on_load(epoch, done)
        if start is None:
            return
        self._source.load(state["source"])
        self._move_to(epoch)
        self.set_start(*start)

    def __getattr__(self, name: str) -> Any:
        # What scripts read off a DataLoader: dataset, batch_size, sampler, collate_fn, ...
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _move_to(self, epoch: int) -> None:
        self._epoch = epoch
        self._begun = False


def _source(
    loader: DataLoader[Any] | Iterable[Any], plan: Plan, *, rank: int, seed: int, count: Count
) -> Source:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return IndexedSource(loader, plan, rank=rank, seed=seed, count=count)
    if not hasattr(loader, "__iter__"):
        raise BadInput(f"a loader is a DataLoader or an iterable of batches, not {type(loader).__name__}")
    return InTurnSource(loader, plan.workers, rank=rank, seed=seed, count=count)
