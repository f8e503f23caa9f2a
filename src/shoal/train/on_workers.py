"""Dense parameters on the workers, exchanged among them: allreduce, gossip, hogwild. Rows go to the
servers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal import optim
from shoal.collective.group import Broken
from shoal.store.many import PushItem
from shoal.store.tensor import Tensor
from shoal.sync import Parameters, mixing
from shoal.train.clip import clip_factor
from shoal.train.parameters import Dense, Stepped
from shoal.train.shared_memory import share_memory
from shoal.train.strategy import Strategy

if TYPE_CHECKING:
    from shoal.store.rounds import Advanced
    from shoal.sync.policy import Policy
    from shoal.train.share import Share
    from shoal.train.worker import Worker


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    at = 0
    for tensor in tensors:
        tensor.copy_(packed[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()


class _Local(Strategy):
    """Parameters begin as rank 0's; the user's optimizer runs here; rows are pushed with every step."""

    alone = True

    def attach(self, stepped: Sequence[Stepped]) -> None:
        group, before = self.worker.group, len(self.stepped)
        parameters = [dense.parameter.data for one in stepped for dense in one.dense]
        while len(group.given) <= before:  # else a worker that has them gave them to this one
            packed = _packed(parameters)
            try:
                group.copy_from_(packed, 0)
                _unpack(packed, parameters)
                break
            except Broken:
                group.reform()
        self.stepped.extend(stepped)
        for one, state in zip(stepped, group.given[before:], strict=False):
            one.take(state)
        if len(group.given) <= len(self.stepped):
            group.given = ()

    def finish(self, one: Stepped, share: Share) -> None:
        """Rows up, and the step is over."""
        self.push_rows(one, share)
        self.worker.advance(weight=self.policy.commit_weight(share.weight))


@dataclass
class _Step:
    """A worker's part of a step, as its gradients were before anything was made of them."""

    share: Share
    dense: list[Dense]
    touched: list[float]  # 1 where there is a gradient
    sparse: list[Dense]
    norm: float | None = None  # of the dense part, as it went up with the rows


@dataclass
class _Sum:
    """What all have of a step: the mean gradient of the parameters that somebody touched."""

    active: list[Dense]
    packed: torch.Tensor
    samples: float
    max_norm: float
    norm: float


class AllReduce(_Local):
    """The mean gradient by samples, on every worker; then the user's own optimizer, the same everywhere.

    A step counts for all or for nobody. Nobody applies a sum before the servers have closed the round, and
    nobody finishes a step there before all have the sum. So of one that dies the servers know whether its
    contribution counts: if not, the others sum again without it, from the gradients that they still have.
    """

    clips_rounds = together = True

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._rates: list[Any] = []  # of this worker, while it steps with the group's
        self._norm: Tensor | None = None

    def before(self, one: Stepped) -> None:
        worker, group, mine = self.worker, self.worker.group, self._mine(one)
        self._rates = [settings["lr"] for settings in one.optimizer.param_groups]
        group.ready()
        step, version = worker.step, group.version
        found: _Sum | None = None
        done: Advanced | None = None
        group.stepping = True
        try:
            while True:
                try:
                    over = group.version != version  # the others have made the step: what they have is here
                    found = _NOTHING if over else found or self._sum(one, mine)
                    group.summed = True
                    done = done or self._hand_in(one, mine, found)
                    if over or group.finished(step):
                        break
                    raise Broken("one of those whose gradients were summed has died before it finished")
                except Broken:
                    group.reform()
                found, group.summed = None, done is not None
        finally:
            group.stepping = group.summed = False
        group.version = version + 1
        self._apply(one, mine, found, done)

    def _mine(self, one: Stepped) -> _Step:
        share = self.begin(one)
        dense = [entry for entry in one.dense if entry.parameter.requires_grad]
        grads = [entry.parameter.grad for entry in dense]
        sparse = [
            entry for entry, grad in zip(dense, grads, strict=True) if grad is not None and grad.is_sparse
        ]
        return _Step(share, dense, [float(grad is not None) for grad in grads], sparse)

    def _sum(self, one: Stepped, mine: _Step) -> _Sum:
        group = self.worker.group
        counts, total, max_norm = self._agree(one, mine)
        # A parameter that nobody touched is left alone, as torch leaves one without gradient.
        active = [entry for entry, count in zip(mine.dense, counts, strict=True) if count > 0]
        packed = _packed([_gradient(entry) for entry in active]) * mine.share.weight
        group.sum_(packed)
        if total > 0:
            packed /= total
        with suppress(Broken):  # whoever dies from here on has given all it had
            group.meet()
        return _Sum(active, packed, total, max_norm, float(packed.double().norm()))

    def _hand_in(self, one: Stepped, mine: _Step, found: _Sum) -> Advanced:
        """Rows up, and wait for the round."""
        share, whole = mine.share, self._clips_rows(one, found.max_norm)
        if mine.norm is None:
            self.push_rows(one, share, [self._part_of_norm(found.norm)] if whole and share.weight else [])
        elif whole and share.weight:  # what went up before was of a sum that does not count
            self.push([self._part_of_norm(found.norm - mine.norm)], self.policy.rows_policy)
        mine.norm = found.norm
        weight = self.policy.commit_weight(share.weight)
        return self.worker.advance(weight=weight, clip=found.max_norm if whole else 0.0)

    def _clips_rows(self, one: Stepped, max_norm: float) -> bool:
        """Whether rows are in the norm: it is then the round's."""
        return max_norm > 0 and self.policy.rows_policy.meets and bool(one.tables)

    def _apply(self, one: Stepped, mine: _Step, found: _Sum, done: Advanced) -> None:
        """Let the optimizer see the mean gradient."""
        norm = done.norm if self._clips_rows(one, found.max_norm) else found.norm
        if found.max_norm > 0:
            found.packed *= clip_factor(found.max_norm, norm)
        one.clip.done(norm)
        _unpack(found.packed, [_gradient(entry) for entry in found.active])
        for entry in mine.sparse:  # its optimizer may know no others
            entry.parameter.grad = _gradient(entry).to_sparse(1)
        if found.samples == 0:
            one.hide_gradients()

    def after(self, one: Stepped) -> None:
        for group, rate in zip(one.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def _agree(self, one: Stepped, mine: _Step) -> tuple[list[float], float, float]:
        """How many touched each parameter, the samples in all, the norm to clip by. Learning rates become
        the first's: a worker whose parts are empty does not run its schedulers.
        """
        group, weight = self.worker.group, mine.share.weight
        rates = [float(rate) if group.rank == 0 else 0.0 for rate in self._rates]
        told = torch.tensor([*mine.touched, *rates, weight, weight * one.clip.max_norm], dtype=torch.float64)
        with self.worker.waiting():  # small: what it takes is the others' time
            group.sum_(told)
        numbers, dense = told.tolist(), len(mine.dense)
        for settings, rate in zip(one.optimizer.param_groups, numbers[dense:], strict=False):
            settings["lr"] = rate
        total = numbers[-2]
        return numbers[:dense], total, numbers[-1] / total if total else 0.0

    def refresh(self) -> None:
        """Those who rested while others made the last steps of the pass get what came of them."""
        if self.worker.group.partial:
            self.worker.group.reform()

    def _part_of_norm(self, norm: float) -> PushItem:
        """The dense part's norm, staged beside the rows: the round's norm is then that of both."""
        if self._norm is None:
            value = np.zeros(1, np.float32)
            self._norm = self.worker.client.tensor("shoal.norm", value, optimizer=optim.SGD(lr=0.0))
        return self._norm, None, np.array([norm], np.float32), 0.0


class Gossip(_Local):
    """D-PSGD: mix with the neighbours on a ring, then step with the gradient of before the mixing. With a
    period, that is every so many steps; the others are made alone.
    """

    def before(self, one: Stepped) -> None:
        assert isinstance(self.policy.payload, Parameters)
        share = self.begin(one)
        self.worker.group.ready()
        while one.steps + 1 >= self.policy.payload.period:
            try:
                self._mix()
                one.steps = -1
            except Broken:  # with whoever lives
                self.worker.group.reform()
        one.steps += 1
        self.finish(one, share)

    def _mix(self) -> None:
        group = self.worker.group
        weights = mixing(group.size, group.rank)
        peers = [peer for peer in weights if peer != group.rank]
        parameters = [dense.parameter.data for dense in self.dense]
        own = _packed(parameters)
        mixed = own * weights[group.rank]
        with self.worker.waiting():
            swapped = group.swap(own, peers)
        for peer, theirs in zip(peers, swapped, strict=True):
            mixed += weights[peer] * theirs
        _unpack(mixed, parameters)

    def rested(self) -> None:
        """It copies a neighbour's model when it mixes."""

    def refresh(self) -> None:
        """All workers end a pass with the mean, so that they evaluate one model."""
        group = self.worker.group
        parameters, version = [dense.parameter.data for dense in self.dense], group.version
        group.summed = True  # whoever joins now would not know that this is the end of a pass
        if group.partial:
            group.reform()
        while group.version == version:  # else the others have the mean, and this worker has their state
            packed = _packed(parameters)
            try:
                group.sum_(packed)
                group.meet()
            except Broken:
                group.reform()
            else:
                _unpack(packed / group.size, parameters)
                group.version += 1
        group.summed = False
        for one in self.stepped:
            one.steps = 0


class Hogwild(_Local):
    """Parameters in memory that all workers of this host write without locks; optimizer state is private."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._memories = 0

    def attach(self, stepped: Sequence[Stepped]) -> None:
        share_memory(self.worker, [dense for one in stepped for dense in one.dense], self._memories)
        self._memories += 1
        self.stepped.extend(stepped)

    def before(self, one: Stepped) -> None:
        self.finish(one, self.begin(one))

    def take(self, states: Sequence[Any], since: int = 0) -> None:
        if self.worker.rank != 0:  # what lies in the memory is not written by all
            here = [one.state()["values"] for one in self.stepped]
            states = [{**state, "values": own} for state, own in zip(states, here, strict=False)]
        super().take(states, since)


def _gradient(entry: Dense) -> torch.Tensor:
    """A dense one, made where there is none."""
    parameter = entry.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


# Of a step that the others have made.
_NOTHING = _Sum([], torch.empty(0), 0.0, 0.0, 0.0)
