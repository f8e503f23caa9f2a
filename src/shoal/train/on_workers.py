"""Dense parameters on the workers, exchanged among them: allreduce, gossip, hogwild. Rows go to the
servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal import optim
from shoal.store.many import PushItem
from shoal.store.tensor import Tensor
from shoal.sync.mixing import mixing
from shoal.train.clip import clip_factor
from shoal.train.parameters import Dense, Stepped
from shoal.train.shared_memory import share_memory
from shoal.train.strategy import Strategy

if TYPE_CHECKING:
    from shoal.sync.policy import Policy
    from shoal.train.share import Share
    from shoal.train.worker import Worker

__all__ = ["AllReduce", "Gossip", "Hogwild"]


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    at = 0
    for tensor in tensors:
        tensor.copy_(packed[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()


class _Local(Strategy):
    """Parameters begin as rank 0's; the user's optimizer runs here; rows are pushed with every step."""

    def attach(self, stepped: Sequence[Stepped]) -> None:
        parameters = [dense.parameter.data for one in stepped for dense in one.dense]
        packed = _packed(parameters)
        self.worker.group.copy_from_(packed, 0)
        _unpack(packed, parameters)
        self.stepped.extend(stepped)

    def finish(self, one: Stepped, share: Share) -> None:
        """Rows up, and the step is over."""
        self.push_rows(one, share)
        self.worker.advance(weight=self.policy.commit_weight(share.weight))


class AllReduce(_Local):
    """The mean gradient by samples, on every worker; then the user's own optimizer, the same everywhere."""

    clips_rounds = True

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._rates: list[Any] = []  # of this worker, while it steps with rank 0's
        self._norm: Tensor | None = None

    def before(self, one: Stepped) -> None:
        worker, share = self.worker, self.begin(one)
        dense = [entry for entry in one.dense if entry.parameter.requires_grad]
        counts, total, max_norm = self._agree(one, dense, share)
        # A parameter that nobody touched is left alone, as torch leaves one without gradient.
        active = [entry for entry, count in zip(dense, counts, strict=True) if count > 0]
        sparse = [
            entry for entry in active if entry.parameter.grad is not None and entry.parameter.grad.is_sparse
        ]
        grads = [_gradient(entry) for entry in active]
        packed = _packed(grads) * share.weight
        worker.group.sum_(packed)
        if total > 0:
            packed /= total
        norm = float(packed.double().norm())
        rows = self.policy.rows_policy
        whole = max_norm > 0 and rows.meets and bool(one.tables)  # rows are in the round's norm
        self.push_rows(one, share, [self._part_of_norm(norm)] if whole and share.weight else [])
        weight = self.policy.commit_weight(share.weight)
        done = worker.advance(weight=weight, clip=max_norm if whole else 0.0)
        if max_norm > 0:
            norm = done.norm if whole else norm
            packed *= clip_factor(max_norm, norm)
        one.clip.done(norm)
        _unpack(packed, grads)
        for entry in sparse:  # its optimizer may know no others
            entry.parameter.grad = _gradient(entry).to_sparse(1)
        if total == 0:
            one.hide_gradients()

    def after(self, one: Stepped) -> None:
        for group, rate in zip(one.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def _agree(self, one: Stepped, dense: Sequence[Dense], share: Share) -> tuple[list[float], float, float]:
        """How many touched each parameter, the samples in all, the norm to clip by. Learning rates become
        rank 0's: a worker whose parts are empty does not run its schedulers.
        """
        groups, clip = one.optimizer.param_groups, one.clip
        self._rates = [group["lr"] for group in groups]
        touched = [float(entry.parameter.grad is not None) for entry in dense]
        rates = [float(rate) if self.worker.rank == 0 else 0.0 for rate in self._rates]
        told = torch.tensor(
            [*touched, *rates, share.weight, share.weight * clip.max_norm], dtype=torch.float64
        )
        with self.worker.waiting():  # small: what it takes is the others' time
            self.worker.group.sum_(told)
        numbers = told.tolist()
        for group, rate in zip(groups, numbers[len(dense) :], strict=False):
            group["lr"] = rate
        total = numbers[-2]
        return numbers[: len(dense)], total, numbers[-1] / total if total else 0.0

    def _part_of_norm(self, norm: float) -> PushItem:
        """The dense part's norm, staged beside the rows: the round's norm is then that of both."""
        if self._norm is None:
            value = np.zeros(1, np.float32)
            self._norm = self.worker.client.tensor("shoal.norm", value, optimizer=optim.SGD(lr=0.0))
        return self._norm, None, np.array([norm], np.float32), 0.0


class Gossip(_Local):
    """D-PSGD: mix with the neighbours on a ring, then step with the gradient of before the mixing."""

    def before(self, one: Stepped) -> None:
        share = self.begin(one)
        self._mix()
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

    def refresh(self) -> None:
        """All workers end a pass with the mean, so that they evaluate one model."""
        parameters = [dense.parameter.data for dense in self.dense]
        packed = _packed(parameters)
        self.worker.group.sum_(packed)
        _unpack(packed / self.worker.group.size, parameters)


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


def _gradient(entry: Dense) -> torch.Tensor:
    """A dense one, made where there is none."""
    parameter = entry.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad
