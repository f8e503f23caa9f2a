"""Dense parameters on the workers, exchanged among them: allreduce, gossip, hogwild. Rows go to the
servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.sync.mixing import mixing
from shoal.train.parameters import Dense, Stepped
from shoal.train.shared_memory import share
from shoal.train.strategy import Strategy

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

    def push_rows(self, one: Stepped, samples: float, global_samples: float) -> None:
        """The rows' own policy: staged for a round, or applied at once."""
        rows = self.policy.rows_policy
        factor = rows.contribution_scale(samples, global_samples)
        self.push(
            self.row_pushes(one.tables, factor),
            step=self.worker.step,
            staged=rows.staged,
            by_staleness=rows.by_staleness,
        )
        self.worker.advance(weight=samples)


class AllReduce(_Local):
    """The mean gradient by samples, on every worker; then the user's own optimizer, the same everywhere."""

    def before(self, one: Stepped) -> None:
        share_of_step = self.worker.take_share()
        dense = [entry for entry in one.dense if entry.parameter.requires_grad]
        touched = torch.tensor(
            [float(entry.parameter.grad is not None) for entry in dense] + [share_of_step.samples]
        )
        with self.worker.waiting():  # small: what it takes is the others' time
            self.worker.group.sum_(touched)
        total = float(touched[-1])
        # A parameter that nobody touched is left alone, as torch leaves one without gradient.
        active = [entry for entry, count in zip(dense, touched.tolist(), strict=False) if count > 0]
        grads = [_gradient(entry) for entry in active]
        packed = _packed(grads) * share_of_step.samples
        self.worker.group.sum_(packed)
        if total > 0:
            packed /= total
        _unpack(packed, grads)
        self.push_rows(one, share_of_step.samples, share_of_step.global_samples)


class Gossip(_Local):
    """D-PSGD: mix with the neighbours on a ring, then step with the gradient of before the mixing."""

    def before(self, one: Stepped) -> None:
        share_of_step = self.worker.take_share()
        self._mix()
        self.push_rows(one, share_of_step.samples, share_of_step.global_samples)

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

    def attach(self, stepped: Sequence[Stepped]) -> None:
        super().attach(stepped)
        share(self.worker, [dense for one in stepped for dense in one.dense])

    def before(self, one: Stepped) -> None:
        share_of_step = self.worker.take_share()
        self.push_rows(one, share_of_step.samples, share_of_step.global_samples)


def _gradient(entry: Dense) -> torch.Tensor:
    if entry.parameter.grad is None:
        entry.parameter.grad = torch.zeros_like(entry.parameter)
    return entry.parameter.grad
