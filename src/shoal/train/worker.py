"""A worker: one process's (or thread's) part in a job."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal import optim
from shoal.errors import BadInput
from shoal.store.client import Client
from shoal.store.rounds import Rounds
from shoal.sync.policy import Policy
from shoal.train.clip import LocalClip
from shoal.train.history import History
from shoal.train.ledger_report import LedgerReport
from shoal.train.progress import ProgressReport
from shoal.train.straggler import Straggler

if TYPE_CHECKING:
    from shoal.collective.group import Group
    from shoal.train.strategy import Strategy

__all__ = ["Share", "Worker"]

# Passes above this number are no passes over data: they are the barriers that scripts ask for.
_BARRIERS = 1 << 40


@dataclass
class Share:
    """What the batches since the last step were: samples here, samples of the whole batch, units done."""

    samples: float = 0.0
    global_samples: float = 0.0
    units: list[tuple[int, int]] = field(default_factory=list)


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
        threads: object | None = None,
        straggler: str | None = None,
        history: bool = False,
    ) -> None:
        self.client = client
        self.policy = policy.with_whole_batches() if batch == "each" else policy
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.job = job
        self.batch = batch
        self.seed = seed
        self.threads = threads
        self.rounds = Rounds(client, rank, world_size)
        self.step = self.rounds.open(**policy.core_spec(world_size))
        self.epoch = 0
        self.state: dict[str, Any] = {}
        self.progress = ProgressReport(job, rank=rank)
        self.ledger = LedgerReport(self.rounds)
        self.dropped = 0
        self.waited_s = 0.0
        self.straggler = None if straggler is None else Straggler(straggler, lambda: self.waited_s)
        self.history = History(self, job) if history and job is not None else None
        self.samples = 0.0
        self.strategy: Strategy | None = None
        self.steps_made = 0
        self.models: list[torch.nn.Module] = []
        self.loaders = 0
        self._share = Share()
        self._units: list[tuple[int, int]] = []
        self._weight: float | None = None
        self._barriers = 0
        self._clip_norm = 0.0
        self._norm_wanted: torch.Tensor | None = None

    # What scripts call.

    def prepare(self, *objects: Any, split: bool = True) -> Any:
        """Connect models, optimizers, loaders and schedulers with the job; returns them in the same order.

        Model and optimizer stay the same objects; loaders are wrapped, unless `split` is False: then this
        worker reads all of them. Twice is harmless.
        """
        from shoal.train.prepare import prepare

        prepared = prepare(self, objects, split=split)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def epochs(self, count: int) -> Iterator[int]:
        """The passes that are still to be made: a worker that is started again does not train one twice."""
        while self.epoch < count:
            now = self.epoch
            yield now
            if self.epoch == now:
                self.epoch += 1

    def report(self, **metrics: Any) -> None:
        """Show figures of this worker: loss, accuracy, whatever has a name. A loss that is not a number "
        "raises."""
        values = {
            name: float(value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in metrics.items()
        }
        loss = values.get("loss")
        if loss is not None and not math.isfinite(loss):
            raise BadInput(
                f"worker {self.rank}: the loss is {loss} at step {self.step}; lower the learning rate, or "
                f"look at the "
                f"batch of this step"
            )
        self.progress.update(loss=loss, metrics=values)
        if self.history is not None:
            self.history.add(values)

    def weight(self, samples: float) -> None:
        """Say how many samples the gradient of the next step stands for, where Shoal cannot see it."""
        if not samples >= 0:
            raise BadInput(f"worker.weight: samples is {samples!r}; it must be a number, at least 0")
        self._weight = float(samples)

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The mean of `value` over all workers, weighted. Every worker must call it."""
        if self.world_size == 1:
            return float(value)
        table = self.client.table("shoal.means", dim=2, optimizer=optim.SGD(lr=1.0))
        key = np.array([self._barriers], np.int64)
        if weight:
            table.push(key, -np.array([[value * weight, weight]], np.float32))
        self.barrier()
        total, weights = (float(number) for number in table.pull(key)[0])
        return total / weights if weights else math.nan

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here."""
        self._barriers += 1
        if self.world_size == 1:
            return
        epoch = _BARRIERS + self._barriers
        self.rounds.open_pass(epoch, 0)
        with self.waiting():
            step = self.rounds.end_pass(epoch, timeout)
        assert step is not None, "a barrier has no units that could come back"
        self.step = step

    def clip_grad_norm_(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradient of the next step, dense parameters and rows together.

        In words with rounds it is the round's mean gradient that is clipped, by all workers alike; its norm
        is
        known when `optimizer.step()` has returned, and then stands in the tensor that this gives. Elsewhere
        the
        worker's own gradient is clipped at once.
        """
        if not max_norm > 0:
            raise BadInput(f"clip_grad_norm_: max_norm is {max_norm!r}; it must be a number above 0")
        if self.policy.staged and self.world_size > 1:
            self._clip_norm = float(max_norm)
            self._norm_wanted = torch.tensor(math.nan)
            return self._norm_wanted
        return LocalClip(model).clip(float(max_norm))

    def close(self) -> None:
        """Leave the job: others wait no more for this worker."""
        if not self.client.closed:
            if self.history is not None:
                self.history.close()
            self.rounds.leave()
            self.progress.close()
            self.client.close()

    # What the parts of a job call.

    def drew(self, epoch: int, unit: int, samples: int, global_samples: int) -> None:
        """A batch was handed to the loop, or an empty part was passed over."""
        self._share.samples += samples
        self._share.global_samples += global_samples
        self._share.units.append((epoch, unit))

    def take_share(self) -> Share:
        """What the step that now ends was made of; the next begins."""
        share, self._share = self._share, Share()
        self._units += share.units
        if self._weight is not None:
            share.samples, self._weight = self._weight, None
        elif not share.units:
            share.samples = share.global_samples = 1.0
        return share

    def forget_share(self) -> None:
        """The batches since the last step were only read."""
        self._share = Share()

    def trains(self) -> bool:
        """Whether a prepared model is in training mode."""
        return any(model.training for model in self.models)

    def abstain(self) -> None:
        """Take part in a step with nothing: this worker's part of the batch was empty."""
        assert self.strategy is not None
        for one in self.strategy.stepped:
            one.optimizer.zero_grad()
            one.optimizer.step()

    def advance(self, weight: float, lr: float = math.nan) -> None:
        """End the step: wait until the next may begin."""
        units, self._units = self._units, []
        done = self.rounds.advance(self.step, weight=weight, lr=lr, clip=self._clip_norm, units=units)
        if self._norm_wanted is not None:
            self._norm_wanted.fill_(done.norm)
        self._clip_norm, self._norm_wanted = 0.0, None
        self.dropped += done.dropped
        self.waited_s += done.waited_s
        self.samples += weight
        self.step = done.step
        self.progress.update(
            step=self.step, clock=self.step, samples=int(self.samples), epoch=self.epoch, state="training"
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens within is waiting for others."""
        since = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - since

    def begin(self) -> None:
        """A model is prepared: what follows is training."""
        if self.history is not None:
            self.history.begin()
        if self.straggler is not None:
            self.straggler.begin()

    def stepped(self) -> None:
        """An optimizer has stepped; not every word asks the servers then."""
        self.steps_made += 1
        if self.history is not None:
            self.history.beat()
        if self.straggler is not None:
            self.straggler.begin()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Worker {self.rank} of {self.world_size}: sync={self.policy}, step={self.step}>"
