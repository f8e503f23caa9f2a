"""A worker: one process's (or thread's) part in a job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from shoal.collective.group import Broken
from shoal.errors import BadInput, Fenced
from shoal.store.client import Client
from shoal.store.rounds import Advanced, Rounds
from shoal.sync.plain import to_plain
from shoal.sync.policy import Policy
from shoal.train.alike import enter, said_of
from shoal.train.clip import LocalClip, round_clip
from shoal.train.cut_state import CutState
from shoal.train.fixed import Fixed
from shoal.train.history import History
from shoal.train.kept_state import KeptState
from shoal.train.ledger_report import LedgerReport, Usage
from shoal.train.lives import Lives
from shoal.train.loading import Resumed
from shoal.train.means import Means
from shoal.train.noticeboard import Noticeboard
from shoal.train.progress import ProgressReport, read_trust
from shoal.train.schedules import Schedules
from shoal.train.share import UNKNOWN, Drawn, Share
from shoal.train.straggler import Straggler
from shoal.train.taken_back import goes_on_from, load, read_state, save
from shoal.train.waits import WAIT_S, Waits

if TYPE_CHECKING:
    from shoal.collective.group import Group
    from shoal.train.batch_rows import BatchKeys
    from shoal.train.passes import Passes
    from shoal.train.strategy import Strategy

# Passes above this number are no passes over data: they are the barriers that scripts ask for, by epoch.
_BARRIERS, _BARRIERS_AN_EPOCH = 1 << 60, 1 << 20
_STALENESS_EVERY_S = 1.0


class Worker:
    """Made by `shoal.join`. `prepare` connects a model, its optimizers and its loaders with the job."""

    def __init__(
        self,
        client: Client,
        policy: Policy,
        *,
        rank: int,
        world_size: int,
        group: Group,
        job: Path | None = None,
        batch: str = "split",
        seed: int = 0,
        threads: dict[int, torch.Tensor] | None = None,  # memories that they share
        wait_s: float = WAIT_S,
        straggler: str | None = None,
        history: bool = False,
    ) -> None:
        self.client = client
        self.policy = policy.with_whole_batches() if batch == "each" else policy
        self.rank, self.world_size = rank, world_size
        self.group, self.threads = group, threads
        self.job, self.batch, self.seed = job, batch, seed
        # First: who sees this worker in the rounds shall find its notes; one that is alone may get company.
        self.board = self.notes if world_size > 1 or job is not None else None
        self.rounds = Rounds(client, rank, world_size)
        self.step = enter(self.rounds, policy, self.board, back=job is not None)
        self.clock = self.step  # as the servers have it: of the steps that are finished
        self.epoch, self.state = 0, KeptState(self)
        self.resumed = Resumed(goes_on_from(self) if self.step else "", tells=rank == 0)
        self.taken_back = read_state(self, self.resumed.checkpoint)
        self.cut_state: CutState | None = None
        if self.step:  # in the place of another, or from a checkpoint
            self.state.bring_back()
        self.progress = ProgressReport(job, rank=rank, policy=to_plain(policy), batch=batch, client=client)
        self.waits = Waits(self.rounds, self.progress, wait_s)
        self.ledger = LedgerReport(self.rounds, client)
        self.usage = Usage(self.ledger, self.progress, tells=job is not None and rank == 0)
        self.lost: Counter[int] = Counter()  # units whose contribution was dropped, by pass
        self.bears_nan = False  # it abstains from what is not finite, and does not raise
        self.trust = 1.0  # what its contributions count for: the supervisor may say less
        self.dropped, self.waited_s = 0, 0.0
        self.straggler = Straggler(straggler, lambda: self.waited_s, f"{seed} {rank}") if straggler else None
        self.history = History(self, job) if history and job is not None else None
        self.samples = float(self.progress.value.samples)  # of earlier lives, too
        self.strategy: Strategy | None = None
        self.fixed = Fixed(self)
        self.steps_made = self.progress.value.step
        self.models: list[torch.nn.Module] = []
        self.model_names: list[str] = []  # what leads the names of each one's parameters
        self.optimizers: list[torch.optim.Optimizer] = []
        self.passes: list[Passes] = []
        self.prepared = 0
        self.divides = False  # the script divides the data itself, or has each worker read all of it
        self._drawn: list[Drawn] = []  # since the last step
        self._units: list[tuple[int, int]] = []
        self._weight: float | None = None
        self._abstains = False
        self._loops = 0  # over passes that were made: what follows one is no part of its last epoch
        self._barriers = (0, 0)  # of which part of the script, and how many in it
        self._means = Means(self)
        self._taken: Share | None = None  # by the last step, if anything is known of it
        self._sources: set[Passes] = set()  # of what it was made of
        self._steps_again = False  # one optimizer made several with one batch
        self._left = False  # whether the loop that drew was left by a `break`
        self.schedules = Schedules()
        if self.taken_back is not None:
            self.steps_made, self.schedules = self.taken_back.made_before(self.steps_made)
        self.schedules.joins(self)
        self._steps_before = self.steps_made - self.progress.value.step  # of the job before: not told of
        self._staleness_at, self.lives = monotonic(), Lives(self)

    # What scripts call.

    def prepare(
        self,
        *objects: Any,
        split: bool = True,
        keys: BatchKeys | None = None,
        prefetch: int = 0,
        reduction: str = "mean",
    ) -> Any:
        """Connect models, optimizers, loaders and schedulers with the job; returns them in the same order.

        Model and optimizer stay the same objects; loaders are wrapped, unless `split` is False: then this
        worker reads all of them. Twice is harmless. `keys(batch)` gives the ids that a batch needs, by table:
        they are pulled by one request per server; with `prefetch=1` while the batch before computes.
        `reduction` is what the loss is over its samples: "mean" or "sum".
        """
        from shoal.train.prepare import prepare

        prepared = prepare(self, objects, split=split, keys=keys, prefetch=prefetch, reduction=reduction)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def epochs(self, count: int) -> Iterator[int]:
        """The passes that are still to be made: a worker that is started again does not train one twice."""
        self.resumed.trains()
        self.epoch = max([self.epoch, *(passes.loader.begins for passes in self.passes)])
        for passes in self.passes:
            passes.loader.set_epoch(max(self.epoch, passes.loader.epoch))
        if self.epoch >= count:  # all are made: schedulers are where they ended
            self.schedules.gives(self.epoch)
        while self.epoch < count:
            now = self.epoch
            self.schedules.gives(now)
            yield now
            if self.epoch == now:
                self.epoch += 1
        self._loops += 1

    def report(self, **metrics: Any) -> None:
        """Show figures of this worker: loss, accuracy, any name; others than these stay as they are.

        A loss that is not finite raises, unless the job says otherwise (`--on-trouble nan=refuse`).
        """
        values = {
            name: float(value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in metrics.items()
        }
        before = self.progress.value
        loss, reports = values.get("loss", before.loss), before.reports + ("loss" in values)
        if loss is not None and not math.isfinite(loss):
            if not self.bears_nan:
                raise BadInput(
                    f"worker {self.rank}, step {self.steps_made}: the loss is {loss}; lower the learning "
                    f"rate, clip the gradient (worker.clip_grad_norm_), or look at the batch of this step"
                )
            loss, reports = before.loss, before.reports
            self.progress.update(nan_step=self.steps_made)
        self.progress.update(loss=loss, reports=reports, metrics=before.metrics | values)
        if self.history is not None:
            self.history.add(values)

    def weight(self, samples: float) -> None:
        """Say how many samples the gradient of the next step stands for, where Shoal cannot see it."""
        if not samples >= 0:
            raise BadInput(f"worker.weight: samples is {samples!r}; it must be a number, at least 0")
        self._weight, self.divides = float(samples), True
        self.lives.void = False

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The mean of `value` over all workers, weighted (NaN if by nothing). Every worker must call it."""
        return self._means.mean(value, weight, (self.part, self._barriers_before))

    def barrier(self) -> None:
        """Wait until every worker is here."""
        # Counted in each epoch, so that a worker that is started again meets the others.
        number, name = self._next_barrier, f"barrier {self._barriers_before + 1} of epoch {self.epoch}"
        self._barriers = (self.part, self._barriers_before + 1)
        self.lives.again(self.state.keep)
        if self.has_own_store:
            return
        with self.waiting():
            ended = self.lives.again(lambda: self.waits.end_of_pass(number, name))
        assert ended is not None, "a barrier has no units that could be late"
        self.goes_on(ended[0])
        self.between_steps()

    @property
    def _barriers_before(self) -> int:
        """In this part of the script."""
        part, before = self._barriers
        return before if part == self.part else 0

    @property
    def _next_barrier(self) -> int:
        return _BARRIERS + self.part * _BARRIERS_AN_EPOCH + self._barriers_before + 1

    def comes_first(self) -> bool:
        """Whether the next barrier was not passed yet: an earlier life of this worker may have been there."""
        return self.rounds.resume(self._next_barrier)[0] == self._next_barrier

    @property
    def part(self) -> int:
        """Where in the script this worker is, in a number that all have there: growth begins a part."""
        return self.epoch + self._loops + self.rounds.growths

    def clip_grad_norm_(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradient of the next step, dense parameters and rows together.

        In words with rounds, and under allreduce, it is the round's mean gradient that is clipped, by all
        workers alike; its norm is known when `optimizer.step()` has returned, and then stands in the tensor
        that this gives (NaN: the contribution was dropped); `model` must hold all that one optimizer steps,
        and nothing of another's. Elsewhere the worker's own gradient is clipped at once.
        """
        if not max_norm > 0:
            raise BadInput(f"clip_grad_norm_: max_norm is {max_norm!r}; it must be a number above 0")
        if self.strategy is not None and self.strategy.clips_rounds and self.world_size > 1:
            return round_clip(model, self.strategy.stepped).wish(float(max_norm))
        return LocalClip(model).clip(float(max_norm))

    def save(self, url: str) -> str:
        """Write a checkpoint of the job and give its name. One worker calls it; others train, or rest."""
        return save(self, url)

    def load(self, url: str) -> str:
        """Make the job what a checkpoint is; every worker must call it. Returns its name.

        After `prepare`: what differs from the model is then listed, and dense parameters follow at once.
        """
        return load(self, url)

    def close(self, *, tells: bool = True) -> None:
        """Leave the job, under `allreduce` and `gossip` with the others; nobody waits for who `tells` so."""
        if not self.client.closed:
            if tells:
                self.group.stay()
            for one in (self.history, self.cut_state):
                if one is not None:
                    one.close()
            self.progress.close()  # first: whoever fails for its sake has then left later
            with suppress(Fenced):  # then another has its place
                if tells:
                    self.rounds.leave()
            self.group.close()
            self.client.close()

    # What the parts of a job call.

    def drew(self, drawn: Drawn) -> None:
        """A batch was handed to the loop, or an empty part was passed over."""
        if self._left:
            self._drawn, self._left = [], False
        self.lives.drew()
        self.schedules.drew()
        self._drawn.append(drawn)

    def leaves_loop(self) -> None:
        """By a `break`: what was drawn is for a step that follows it, and if there is none, for nobody."""
        self._left = True

    def take_share(self, optimizer: torch.optim.Optimizer) -> Share:
        """What a step is made of; all steps with the same batches have the same."""
        share = self._taken
        if share is None or self._drawn or self._weight is not None:
            if self._drawn:
                self._sources = {one.passes for one in self._drawn}
            for passes in self._sources if self._drawn else ():
                passes.steps([one for one in self._drawn if one.passes is passes])
            known = bool(self._drawn) or self._weight is not None or self._abstains
            share = self._end_share(self._weight)
            share.weight, self._weight = share.samples if self._weight is None else self._weight, None
            self._taken = share if known else None
        else:
            self._steps_again = True
        for passes in self._sources:
            passes.stepping(self.optimizers.index(optimizer))
        return replace(share)

    def _end_share(self, said: float | None) -> Share:
        """What was drawn is done. `said`: how many samples that was, where nothing else says it."""
        # Without any no loader says what it was, or nobody had anything.
        share = Share(0.0 if self._abstains else 1.0, 1.0)
        if unknown := [one for one in self._drawn if one.samples == UNKNOWN]:
            if said is None:
                assert unknown[0].passes.uncounted is not None
                raise unknown[0].passes.uncounted
            share = Share(said, said)
        elif self._drawn:
            known = [(one.samples, one.global_samples) for one in self._drawn]
            share = Share(sum(mine for mine, _ in known), sum(whole for _, whole in known))
        self._units += [(one.epoch, one.unit) for one in self._drawn]
        self.usage.drew(self._drawn)
        self._drawn = []
        self.samples += share.samples
        return share

    def finish_share(self) -> None:
        """The pass ends behind batches that no step used: they are done, and make no update of their own."""
        if self._drawn:
            share = self._end_share(said=0.0)
            # A step behind the loop may still be made of them.
            self._taken = replace(share, weight=share.samples) if share.global_samples else None
            self.advance(weight=0.0)

    @property
    def draws(self) -> bool:
        """Whether its steps are made of what loaders hand out."""
        return bool(self._drawn or self._sources)

    @property
    def several_steps(self) -> bool:
        """Whether the end of a step need not be that of a batch."""
        return self.draws and (self._steps_again or len(self.optimizers) > 1)

    def lose_share(self) -> None:
        """What was drawn, or not handed in yet, is of an earlier life."""
        self.lost.update([*(one.epoch for one in self._drawn), *(epoch for epoch, _ in self._units)])
        self._drawn, self._units, self._taken = [], [], None

    def forget(self, epoch: int) -> None:
        """The batches of this pass were only read."""
        self._drawn = [one for one in self._drawn if one.epoch != epoch]

    @property
    def has_own_store(self) -> bool:
        """Whether it is the only worker of a store in its own process."""
        return self.world_size == 1 and self.client.address == "memory://"

    @property
    def sets_settings(self) -> bool:
        """Whether hyper-parameters begin as its script says: as worker 0's, unless it took over from one."""
        return self.rank == 0 and self.client.incarnation == 1

    def gradients(self) -> list[tuple[torch.Tensor | None, int]]:
        """Every gradient as it is now, with a number that changes when it does."""
        stepped = [] if self.strategy is None else self.strategy.stepped
        parameters = [p for one in stepped for group in one.optimizer.param_groups for p in group["params"]]
        grads = [parameter.grad for parameter in parameters]
        return [(g, 0 if g is None else g._version + len(getattr(g, "parts", ()))) for g in grads]

    def trains(self) -> bool:
        """Whether a prepared model is in training mode."""
        return any(model.training for model in self.models)

    @property
    def accumulates(self) -> bool:
        """Whether there were batches since the last step."""
        return any(one.samples for one in self._drawn)

    def abstain(self, numbers: Iterable[int], *, anew: bool = True) -> None:
        """Take part in steps of these optimizers without their batch, of which this worker's part was empty:
        with what was accumulated before it, or else with nothing. `anew`: they are the first with it.
        """
        has_some = self.accumulates or not (anew or self._taken is None or self._taken.samples == 0)
        self._abstains = True
        if anew:
            self._taken = None
        optimizers = [self.optimizers[number] for number in numbers]
        try:
            for optimizer in optimizers:
                if not has_some:
                    optimizer.zero_grad()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()  # as the body of the loop would, which does not run
        finally:
            self._abstains = False
        self.schedules.catch_up()

    def advance(self, weight: float, lr: float = math.nan, clip: float = 0.0) -> Advanced:
        """End the step: wait until the next may begin."""
        self.state.keep()
        units, self._units = self._units, []
        try:
            done = self.waits.step(self.step, weight=weight, lr=lr, clip=clip, units=units)
        except Broken:  # it will be said again
            self._units = units
            raise
        self.dropped += done.dropped
        if done.dropped:
            self.lost.update(epoch for epoch, _ in units)
        self.waited_s += done.waited_s
        self.goes_on(done.step, self.step + 1)
        self.lives.follow_growth()
        return done

    def goes_on(self, step: int, clock: int | None = None) -> None:
        """Others are waited for no more: this worker is at `step`."""
        self.step, self.clock = step, step if clock is None else clock
        made = self.steps_made - self._steps_before
        known: dict[str, Any] = {"step": made, "clock": step, "samples": int(self.samples)}
        now = monotonic()
        if self.job is not None and now >= self._staleness_at + _STALENESS_EVERY_S:
            self._staleness_at = now
            self.heed()
            seen = self.rounds.state()["staleness"]
            known["staleness"] = seen["sum"] / seen["count"] if seen["count"] else None
        known.update(self.usage.known, waited_s=self.waited_s, epoch=self.epoch)
        self.progress.update(**known, state="training", waiting_for=())

    def heed(self) -> None:
        """Learn what the supervisor lets this worker count for by now."""
        if self.job is not None:
            self.trust = read_trust(self.job, self.rank)

    def resized(self, workers: int) -> None:
        """A pass is cut for so many workers from now on: the job has grown or become smaller."""
        if workers != self.world_size:
            self.world_size = self.rounds.workers = workers
            self.board = self.notes

    @cached_property  # an own store has no such table until it is needed
    def notes(self) -> Noticeboard:
        """What it tells others, or its next life; `board` where there are others to be compared with."""
        return Noticeboard(self.client, self.rank, said_of(self.policy, self.batch))

    def agree(self, topic: int, text: str) -> Iterator[tuple[int, str]]:
        """Tell the others `text`; gives those who have said something else on the topic, and what."""
        if self.board is None:
            return iter(())
        self.board.post(topic, text)
        return self.board.differing(topic, text, self.rounds)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens within is waiting for others."""
        since = monotonic()
        try:
            yield
        finally:
            self.waited_s += monotonic() - since

    def begin(self) -> None:
        """A model is prepared: what follows is training."""
        if self.history is not None:
            self.history.begin()
        if self.straggler is not None:
            self.straggler.begin()
        if self.cut_state is None:
            self.cut_state = CutState(self)
        self.between_steps()

    def between_steps(self) -> None:
        """The script's thread is between two steps, and all that it has is of the last."""
        if self.cut_state is not None:
            self.cut_state.boundary()

    def stepping(self) -> None:
        """An optimizer is about to step; not every word asks the servers then."""
        self.steps_made += 1
        self.resumed.trains()
        if self.cut_state is not None:
            self.cut_state.enters()
        if self.straggler is not None:
            self.straggler.slow_down()

    def stepped(self) -> None:
        """An optimizer has stepped."""
        if self.history is not None:
            self.history.beat()
        self.lives.stepped()
        if self.straggler is not None:
            self.straggler.begin()
        if self.cut_state is not None:
            self.cut_state.boundary(ends_batch=not self.several_steps)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Worker {self.rank} of {self.world_size}: sync={self.policy}, step={self.step}>"
