"""What no optimizer steps, and is still part of the model: frozen parameters and persistent buffers.

They begin on every worker with what the first to prepare had, as all parameters do. Buffers change while a
model trains (running means), on each worker by its own batches: when a pass ends all get worker 0's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from shoal import optim
from shoal.store.tensor import Tensor
from shoal.train.parameters import FlatFloats, Stepped, flat

if TYPE_CHECKING:
    from shoal.train.worker import Worker

__all__ = ["Fixed"]


class Fixed:
    """Those of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._buffers: list[tuple[torch.Tensor, Tensor]] = []
        self.named: dict[str, torch.Tensor] = {}  # all buffers

    def take(self, models: Mapping[str, torch.nn.Module], stepped: list[Stepped]) -> None:
        """Make these models equal in it; on return they hold what all workers have."""
        self.named |= {lead + name: one for lead, model in models.items() for name, one in _buffers(model)}
        if self._worker.has_own_store:
            return
        moving = {id(parameter) for one in stepped for parameter in one.named.values()}
        for prefix, model in models.items():
            for name, parameter in model.named_parameters():
                # Without any optimizer one is to come, and what it steps is not to lie there twice.
                rests = id(parameter) not in moving and (stepped or not parameter.requires_grad)
                if rests and parameter.numel():
                    self._open(prefix + name, parameter.data)
            for name, buffer in _buffers(model):
                self._buffers.append((buffer, self._open(prefix + name, buffer)))

    def hand_in(self) -> None:
        """Worker 0 has come to the end of a pass."""
        if self._worker.rank == 0:
            for ticket in [tensor.assign_async(_packed(buffer)) for buffer, tensor in self._buffers]:
                ticket.wait()

    def refresh(self) -> None:
        """The pass is over everywhere."""
        if self._worker.rank != 0:
            for buffer, tensor in self._buffers:
                _unpack(tensor.pull(), buffer)

    def _open(self, name: str, value: torch.Tensor) -> Tensor:
        nothing = optim.SGD(lr=0.0)
        tensor = self._worker.client.tensor(f"shoal.fixed.{name}", _packed(value), optimizer=nothing)
        _unpack(tensor.pull(), value)
        return tensor


def _buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that a state_dict holds; others are caches of what the model is."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set
    ]


def _packed(value: torch.Tensor) -> FlatFloats:
    """Floats as they are; whatever else it is (whole numbers, masks of -inf) as bytes, one in each float."""
    if value.dtype == torch.float32 and bool(value.isfinite().all()):
        return flat(value)
    return flat(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8))


def _unpack(packed: FlatFloats, value: torch.Tensor) -> None:
    found = torch.from_numpy(packed)
    if found.numel() != value.numel() or value.dtype != torch.float32:
        found = found.to(torch.uint8).view(value.dtype)
    with torch.no_grad():
        value.copy_(found.view(value.shape))
