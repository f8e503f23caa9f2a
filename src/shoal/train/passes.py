"""Passes over the data: what happens between a loader that hands out units and the job's ledger.

A loop that steps is training: its pass is opened in the ledger, each unit is done with the step that used
it, and the pass ends for all workers together. A loop that never steps (evaluation) just reads: nobody waits
for anybody, and the pass is still to be made. Which of both it is can be seen

1. when it begins, if gradients are off: it reads, beside whatever runs;
2. else when it ends: were there steps, or, where there were some before, gradients at least? In eval mode,
   and where the word has it so, the units of such a pass are everybody's own and not leased: it can be run
   again (not where contributions can be dropped: units come back only to those who lease);
3. on a worker whose parts are all empty by nothing: it does as worker 0 does, which never has an empty one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from shoal.config import counted
from shoal.data.handed import NO_UNIT
from shoal.data.ledger import LeasedLedger, Ledger, StaticLedger
from shoal.data.loader import ShardedLoader
from shoal.data.plan import Cuts, Plan, own_ranges
from shoal.data.samples import samples_in
from shoal.errors import BadInput, Fenced, Timeout
from shoal.sync import First
from shoal.train.agreement import TOPICS, Agreement
from shoal.train.lives import Revoked
from shoal.train.loader_state import LoaderState
from shoal.train.parameters import versions
from shoal.train.progress import BETWEEN_PASSES, PASSES_A_LOADER
from shoal.train.share import UNKNOWN, Drawn

if TYPE_CHECKING:
    from shoal.train.batch_rows import BatchRows
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.data")
# Of the notices about loaders; models have those below.
_TOPICS, _LOADERS = 1 << 15, 6_500
# What is only read has numbers of its own: by part of the script, and counted in it.
_READS, _READS_A_PART = PASSES_A_LOADER >> 1, 1 << 10
_OVER = 1 << 40  # behind all batches
_LOOK_EVERY_S = 0.002


class Passes:
    """The passes of one loader on one worker. `rows` are pulled as the loop gets batches, or one ahead."""

    def __init__(
        self, worker: Worker, loader: Any, number: int, rows: BatchRows | None = None, prefetch: int = 0
    ) -> None:
        self._worker, self._rows = worker, rows
        self._first = number * PASSES_A_LOADER
        self._topic = _TOPICS + TOPICS * (number % _LOADERS)
        self._name = "" if number == 0 else f" of loader {number}"
        self.agreement = Agreement(worker, self._topic, self._name)
        self._place: tuple[int, int] | None = None  # of what was drawn, if others have parts of the batch
        self._batches, self._plan = 0, Plan(worker.world_size)
        self._steps = 0  # made by the worker before this pass
        self._got = self._units = 0  # batches of this pass, and units, of which some are empty
        # How often a loop over this loader was handed what is not its own in fixed order, or not all of that;
        # and how often loops over any had been before this pass.
        self.disturbed = self._disturbed_before = 0
        self._gradients: list[tuple[torch.Tensor | None, int]] = []  # before this pass
        self._last: Drawn | None = None  # that no step has used
        # What others are told of: a batch, the steps made with it, whose was the last.
        self._tells: tuple[int, int, int] | None = None
        self._told = ""  # by worker 0
        self._again = -1  # the pass that was read and not leased, and so cannot be leased any more
        self._runs = (-1, 0)  # of which pass, and how many before this one
        self._reads = (-1, 0)  # in which part of the script, and how many in it
        self._counts = True
        self._used = self._broken = -1  # the last pass that was stepped with, and the last that was left
        self._overdue = False  # whether what others hold has become late
        self._patient = False  # there was nothing to take over: they are busy with something else
        self._handed_out = False  # whether leases went to a loop that only read
        self.uncounted: BadInput | None = None  # why a batch of UNKNOWN samples has so many
        self._trains = False  # whether a pass over this loader was one of training
        rank, n = worker.rank, worker.world_size
        self._fixed = StaticLedger(rank, n, begin=self._begin, lease=self._lease, end=self._end)
        self.by_word: Ledger = self._fixed
        self._drops = isinstance(worker.policy.take, First)
        if worker.policy.order(n) == "leased":
            self.by_word = LeasedLedger(rank, n, self._lease, begin=self._begin, end=self._end)
        self.state = LoaderState(self, worker, self._first)
        self.loader = ShardedLoader(
            loader,
            rank,
            n,
            self.by_word,
            batch="each" if worker.batch == "each" else "split",
            on_unit=self._on_unit,
            on_pass=self._on_pass,
            on_over=self._on_over,
            on_break=self._on_break,
            on_batch=self._on_batch,
            ahead=rows.see if rows is not None and prefetch else None,
            on_left=None if rows is None else rows.forget,
            reading=self._reading,
            on_load=self.state.loaded,
            seed=worker.seed,
            count=self._samples_in,
        )
        # Who replaces a worker that died does not train again what is done.
        self.loader.set_start(*self.begins_at(0))
        for epoch in range(self.loader.begins):
            worker.usage.ends(self._first + epoch, self.loader.samples)

    def begins_at(self, epoch: int) -> tuple[int, list[int]]:
        """The first pass from `epoch` on that is not over, and what is done of it."""
        rounds = self._worker.rounds
        first, done = rounds.go_on(self._first + epoch)
        # Units of that pass that were done in this rank: what came back of its own is in `done`, too.
        self.done = rounds.report(first)["by_rank"].get(rounds.rank, 0)
        return first - self._first, done

    # A loop begins.

    def _reading(self) -> Ledger | None:
        worker = self._worker
        if torch.is_grad_enabled():
            fixed = not self._drops and (not worker.trains() or self.loader.epoch == self._again)
            self.loader.ledger = self._fixed if fixed else self.by_word
            return None
        part, before = self._reads
        self._reads = (worker.part, before + 1 if part == worker.part else 0)
        # Who has come since the pass was cut reads nothing of it.
        workers = max(worker.world_size, worker.rank + 1)
        return StaticLedger(worker.rank, workers, begin=self._begin_reading)

    def _begin_reading(self, _: int, batches: int) -> Cuts:
        part, before = self._reads
        number = self._first + _READS + part * _READS_A_PART + before
        worker = self._worker
        ((_, cut),) = worker.lives.again(
            lambda: worker.rounds.open_pass(number, batches, split=self._split, fixed=True)
        )
        return ((0, min(cut, worker.world_size)),)  # new workers read once they have a part of the pass

    @property
    def _split(self) -> bool:
        return self._worker.batch != "each" and not self.loader.whole

    @property
    def _static(self) -> bool:
        return self.loader.ledger is self._fixed

    def _begin(self, epoch: int, batches: int) -> Cuts:
        worker = self._worker
        last, before = self._runs
        self._runs = (epoch, before + 1 if epoch == last else 0)
        self._steps, self._got, self._gradients = worker.steps_made, 0, worker.gradients()
        self._units, self._disturbed_before, self._versions = 0, self._disturbances(), versions(worker.models)
        self._last, self._tells, self._told, self._counts, self._batches = None, None, "", True, batches

        def open_pass() -> Cuts:
            self.agreement.order(epoch, self._run, self.loader.order)
            return self._open(epoch, trains=self._trains or worker.trains())

        cuts = worker.lives.again(open_pass)
        self.state.tell(epoch, batches)
        cut, few = self._plan.workers, self.loader.samples
        if few is not None and few < cut and worker.rank == 0 and not self._trains:
            _log.warning(
                "the loader%s has %s for %s: some train nothing; take fewer workers, or more data",
                self._name,
                counted(few, "sample"),
                counted(cut, "worker"),
            )
        if worker.taken_back is not None:  # what the script has drawn since is drawn anew
            worker.taken_back.random()
            worker.taken_back = None
        number, trains = self._first // PASSES_A_LOADER, self._trains or worker.trains()
        worker.schedules.begins(number, epoch, first=self.loader.begins, done=self.done, trains=trains)
        worker.between_steps()
        return cuts

    def _open(self, epoch: int, *, trains: bool) -> Cuts:
        """How the pass is cut. One that `trains` is followed from here on; one that is only read stays as it
        was cut when it was read first.
        """
        number = self._first + epoch
        worker, several = self._worker, len(self._worker.optimizers) > 1
        cuts = worker.rounds.open_pass(
            number, self._batches, split=self._split, fixed=self._static, several_steps=several
        )
        self._plan = Plan.of(cuts, "split" if self._split else "each")
        if trains:
            worker.resized(self._plan.workers)
        return cuts

    def _on_batch(self, batch: Any) -> None:
        place, self._place = self._place, None
        if self.agreement.is_due() and self._static and self._worker.policy.clock.meets:  # a round is over
            self._compare_keys(self.loader.epoch)
        self.agreement.sees(batch, place)
        if self._rows is not None:
            self._rows.hand(batch)

    def _compare_keys(self, epoch: int) -> None:
        self.agreement.compare_keys(self._first + epoch, self._plan.parts, fixed=self._static)

    def _lease(self, rank: int, epoch: int, want: int) -> list[tuple[int, int]]:
        overdue, self._overdue = self._overdue, False
        try:
            ranges = self._worker.rounds.lease(self._first + epoch, want, overdue=overdue)
        except Fenced:
            self._worker.lives.rejoin()
            return []
        self._patient = overdue and not ranges
        self.disturbed += bool(ranges)
        return ranges

    def anew(self) -> None:
        """The pass has grown, or the worker was evicted, and is back: what it has is what the job's ledger
        says; nothing that was drawn and not stepped with.
        """
        self.disturbed += 1
        epoch = self.loader.epoch
        number, cuts = self._first + epoch, self._fixed.cuts
        now, done = self._worker.rounds.resume(number)
        if now == number and self._static and self._batches and self._runs[0] == epoch:
            cuts = self._open(epoch, trains=self._trains or self._used == epoch)
        # Where the pass is over there is nothing left in it.
        self._fixed.anew(cuts, done if now == number else range(self._plan.units(self._batches)))
        if isinstance(self.by_word, LeasedLedger):
            self.by_word.rejoined()

    # A loop runs.

    def _samples_in(self, batch: Any) -> int:
        try:
            return samples_in(batch)
        except BadInput as error:
            self.uncounted = error
            return UNKNOWN

    def _on_unit(self, epoch: int, unit: int, samples: int) -> None:
        try:
            self._hand(epoch, unit, samples)
        except Fenced:
            self._worker.lives.rejoin()
            self._worker.lives.void = True  # the loop gets the batch, but its unit is another's

    def _hand(self, epoch: int, unit: int, samples: int) -> None:
        worker = self._worker
        self._is_done()
        if worker.cut_state is not None:
            worker.cut_state.draws()
        if worker.world_size > 1 and not worker.optimizers and versions(worker.models) != self._versions:
            raise BadInput(
                "the model is trained, and prepare was given no optimizer: every worker would train a model "
                "of its own. Give prepare the optimizer that was built from model.parameters()"
            )
        if unit != NO_UNIT:
            drawn = Drawn(self, self._first + epoch, unit, samples, self.loader.global_samples)
            worker.drew(drawn)
            self._last, self._units = drawn, self._units + 1
            shared = self._split and self._row_of_few(drawn) is None
            self._place = self._plan.place(unit) if shared else None
        if not self.loader.empty:
            self._got += 1
        else:
            self._does_as_others(unit if unit != NO_UNIT else self._batches)

    def steps(self, drawn: Sequence[Drawn]) -> None:
        """Units of the pass are stepped with for the first time; Revoked: another has them by now."""
        self._check_leases()
        self._keep(drawn)
        self._worker.progress.trains()
        self._gradients, self._last = [], None
        self._used = drawn[-1].epoch - self._first
        if self._used == self._broken:  # the step comes behind the loop
            self._on_over(self._used)
        row = self._row_of_few(drawn[-1])
        self._tells = None if row is None else (row, 0, 0)

    def _keep(self, drawn: Sequence[Drawn]) -> None:
        worker, ledger = self._worker, self.loader.ledger
        if not isinstance(ledger, LeasedLedger) or worker.policy.dense_home == "peers":
            return  # neighbours wait for the step, whatever it is made of
        late = [one for one in drawn if ledger.uses(one.unit, worker.waits.seconds / 2)]
        for epoch in {one.epoch for one in late}:
            units = [one.unit for one in late if one.epoch == epoch]
            if len(kept := worker.rounds.keep(epoch, units)) < len(units):
                lost = ", ".join(str(unit) for unit in units if unit not in kept)
                raise Revoked(
                    f"unit {lost} of pass {self.loader.epoch}{self._name} was held for so long that another "
                    f"worker has taken it over: the step with it counts nothing"
                )

    def stepping(self, optimizer: int) -> None:
        """This optimizer steps with what was drawn last, now or before."""
        if self._tells:
            row, made, _ = self._tells
            self._tells = (row, made + 1, optimizer)
            self._post(row, "steps", made + 1, optimizer)

    def _is_done(self) -> None:
        """No more steps are made with what was drawn last."""
        if self._tells:
            row, made, optimizer = self._tells
            self._post(row, "rests", made, optimizer)
            self._tells = None

    def _check_leases(self) -> None:
        if self._handed_out:
            raise BadInput(
                f"pass {self.loader.epoch}{self._name}: the loader is trained, and was read without a step. "
                f"Under {self._worker.policy} what a loop reads is handed out for good: "
                f"evaluate under torch.no_grad(){'' if self._drops else ', or in model.eval()'}"
            )

    def _does_as_others(self, unit: int) -> None:
        """Takes part in the steps with a batch of which this worker has nothing."""
        worker = self._worker
        if self._static and self.loader.stream_batches is None and worker.board is not None:
            made = 0
            while (optimizer := self._asks(unit, made)) is not None:
                worker.abstain([optimizer], anew=made == 0)
                made += 1
        # Where units are leased nobody waits for it: what it has accumulated goes with a later step.
        elif self._training and (self._static or not worker.accumulates):
            worker.abstain(range(len(worker.optimizers)))

    def _row_of_few(self, last: Drawn) -> int | None:
        """The number of a batch, if others have nothing of it."""
        row, cut = self._plan.row(last.unit), self._plan.at(self._plan.place(last.unit)[0]).workers
        few = last.global_samples < cut if self._split else row == self._plan.row(self._batches)
        return row if few else None

    def _post(self, row: int, does: str, made: int = 0, optimizer: int = 0) -> None:
        asked = self._static and self.loader.stream_batches is None
        if asked and self._worker.rank == 0 and self._worker.board is not None:
            self._worker.board.post(self._topic + TOPICS - 1, f"{self._run} {row} {does} {made} {optimizer}")

    @property
    def _run(self) -> int:
        """A number that grows with every loop over this loader."""
        epoch, before = self._runs
        return (epoch << 20) + before

    def _asks(self, unit: int, made: int) -> int | None:
        """What worker 0 does with the batch of this unit after so many steps: the number of the optimizer
        that steps next; None once it rests, or only reads, or has gone on.
        """
        worker, row = self._worker, self._plan.row(unit)

        def ask(seconds: float) -> int | None:
            until = monotonic() + seconds
            while True:
                assert worker.board is not None
                said = (worker.board.note(0, self._topic + TOPICS - 1) or "-1 0 nothing 0 0").split()
                does, (run, at, steps, optimizer) = said[2], (int(said[i]) for i in (0, 1, 3, 4))
                here = (run, at) == (self._run, row)
                if here and steps > made:
                    self._told = does
                    return optimizer
                if (here and does != "steps") or (run, at) > (self._run, row):
                    self._told = does if run == self._run else "reads"
                    return None
                if monotonic() > until:
                    raise Timeout(f"worker 0 has not said what it does with batch {row}")
                sleep(_LOOK_EVERY_S)

        with worker.waiting():
            return worker.waits.until(f"what becomes of batch {row}{self._name}", ask, lambda state: [0])

    # A loop ends.

    @property
    def _training(self) -> bool:
        worker = self._worker
        if worker.steps_made > self._steps:
            return True
        if self._got == 0:  # others had all of the pass
            return self._told != "reads" if self._told else self._trains or worker.trains()
        if self._static or not self._trains:
            return False
        # It accumulates, and had less of the pass than a step takes.
        now = worker.gradients()
        return any(
            is_now is not None and (is_now is not was or version != before)
            for (was, before), (is_now, version) in zip(self._gradients, now, strict=False)
        )

    def _end(self, rank: int, epoch: int) -> bool:
        """All that is this worker's, or can be leased now, is trained."""
        try:
            return self._come_to_end(epoch)
        except Fenced:
            self._worker.lives.rejoin()
            return False

    def _come_to_end(self, epoch: int) -> bool:
        training = self._training
        if self._last is not None and (row := self._row_of_few(self._last)) is not None:
            self._post(row, "rests" if training else "reads")
        elif self._got == 0:  # an earlier life of it had all: whoever asks asks for what is over
            self._post(_OVER, "rests")
        self._is_done()
        if training:
            return self._finish(epoch)
        self._worker.forget(self._first + epoch)
        self._counts, self._handed_out = not self._static, not self._static
        self._again = epoch
        if self._trains:
            self._check_leases()
        return True

    def _on_pass(self, epoch: int) -> bool:
        self._worker.schedules.ends(self._first // PASSES_A_LOADER)
        if self.loader.stream_batches is not None:  # nothing of it is in the ledger
            while not self._end(self._worker.rank, epoch):
                pass
        if self._counts and self._trains:  # what is only read is no epoch
            self._worker.epoch = max(self._worker.epoch, epoch + 1)
        return self._counts

    def _on_break(self, epoch: int) -> None:
        self._broken = epoch
        self._worker.schedules.ends(self._first // PASSES_A_LOADER)
        self._worker.usage.breaks(self._first + epoch)
        self._is_done()
        self._worker.leaves_loop()
        self._worker.progress.update(state=BETWEEN_PASSES)
        if self._used == epoch:
            self._on_over(epoch)

    def _on_over(self, epoch: int) -> None:
        self._worker.resumed.trains()
        self._worker.epoch = max(self._worker.epoch, epoch + 1)

    def _finish(self, epoch: int) -> bool:
        worker, number = self._worker, self._first + epoch
        assert worker.strategy is not None
        self._trains = True
        worker.strategy.end_pass()
        worker.finish_share()
        worker.fixed.hand_in()
        streamed = self.loader.stream_batches
        if streamed is not None:
            worker.ledger.streamed(number, streamed, self._got - worker.lost[number])
        shares = self._batches // (1 if self._split else self._plan.workers) if self._static else 0
        ledger, patience_s = self.loader.ledger, math.inf
        if isinstance(ledger, LeasedLedger) and not self._patient:
            patience_s = ledger.patience_s(worker.waits.seconds / 2)
        late = monotonic() + patience_s
        name, made = f"pass {epoch}{self._name}", worker.steps_made - self._steps
        if comparable := self._had_its_own:
            self.agreement.tell_steps(self._run, made)
        with worker.waiting():
            ended = worker.waits.end_of_pass(number, name, shares=shares, made=made, patience_s=patience_s)
        if ended is None or not ended[1]:
            self._overdue = monotonic() >= late
            if ended is not None and self._static:
                self._goes_on(ended[0])
            return False
        worker.goes_on(ended[0])
        worker.strategy.refresh()
        worker.fixed.refresh()
        worker.usage.ends(number, self.loader.samples)
        if worker.history is not None:
            worker.history.add()
        worker.between_steps()
        self._compare_keys(epoch)
        if comparable:
            self.agreement.compare_steps(epoch, self._run, made)
        worker.progress.update(state=BETWEEN_PASSES)
        return True

    @property
    def _had_its_own(self) -> bool:
        """Whether it has had all that is its own of the pass, in fixed order, and of no pass anything else:
        then it makes as many steps as others of whom that can be said.
        """
        if not self._static or self.loader.stream_batches is not None:
            return False
        own = own_ranges(self._fixed.cuts, self._worker.rank, self._plan.units(self._batches))
        whole = 0 < self._units == sum(map(len, own))
        return whole and self._disturbances() == self._disturbed_before

    def _disturbances(self) -> int:
        return sum(one.disturbed for one in self._worker.passes)

    def _goes_on(self, step: int) -> None:
        """Others have made steps while this worker waited at the end, and it takes part again."""
        worker = self._worker
        assert worker.strategy is not None
        worker.schedules.rested(step - worker.step)
        worker.goes_on(step)
        worker.strategy.rested()
        worker.lives.follow_growth()
