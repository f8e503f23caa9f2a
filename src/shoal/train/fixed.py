"""What no optimizer steps, and is still part of the model: frozen parameters and persistent buffers.

They begin on every worker with what the first to prepare had, as all parameters do. Buffers change while a
model trains (running means), on each worker by its own batches: when a pass ends all get worker 0's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from shoal import optim
from shoal.checkpoint.export import FIXED
from shoal.errors import BadInput
from shoal.store.tensor import Tensor
from shoal.train.parameters import FlatFloats, Stepped, flat, uncompiled

if TYPE_CHECKING:
    from shoal.train.worker import Worker

_Kind: TypeAlias = tuple[torch.Size, torch.dtype]


class Fixed:
    """Those of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._models: dict[str, torch.nn.Module] = {}
        self._buffers: dict[str, tuple[Tensor, _Kind]] = {}  # at the servers, and what they began as
        self._frozen: dict[int, tuple[torch.Tensor, Tensor, bool]] = {}  # there, and whether as bytes

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """All buffers, as they are now: `self.ema = 0.9 * self.ema + x` puts another in the place of one."""
        return {lead + name: one for lead, model in self._models.items() for name, one in _buffers(model)}

    def take(self, models: Mapping[str, torch.nn.Module], stepped: list[Stepped]) -> None:
        """Make these models equal in it; on return they hold what all workers have."""
        self._models.update(models)
        if self._worker.has_own_store:
            return
        moving = {id(parameter) for one in stepped for parameter in one.named.values()}
        for prefix, model in models.items():
            for name, parameter in model.named_parameters():
                # Without any optimizer one is to come, and what it steps is not to lie there twice.
                rests = id(parameter) not in moving and (stepped or not parameter.requires_grad)
                if rests and parameter.numel():
                    as_bytes = not _is_plain(parameter)
                    tensor = self._open(prefix + uncompiled(name), parameter.data, as_bytes=as_bytes)
                    self._frozen[id(parameter)] = parameter, tensor, as_bytes
            for name, buffer in _buffers(model):
                # Whether it is finite may change.
                tensor = self._open(prefix + name, buffer, as_bytes=True)
                self._buffers[prefix + name] = tensor, (buffer.shape, buffer.dtype)

    @property
    def restored(self) -> list[torch.Tensor]:
        """Buffers that are what the servers have."""
        named = self.named
        return [named[name] for name in self._buffers if name in named]

    def loaded(self, module: torch.nn.Module) -> None:
        """`load_state_dict` gave it other values: worker 0's frozen ones are those of who comes later."""
        if self._worker.rank != 0:
            return
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in self._frozen:
                continue
            _, tensor, as_bytes = self._frozen[id(parameter)]
            if as_bytes or _is_plain(parameter):
                tensor.assign(_bytes(parameter.data) if as_bytes else flat(parameter.data))

    def hand_in(self) -> None:
        """Worker 0 has come to the end of a pass."""
        if self._worker.rank == 0:
            for ticket in [tensor.assign_async(_bytes(buffer)) for tensor, buffer in self._now()]:
                ticket.wait()

    def refresh(self) -> None:
        """The pass is over everywhere."""
        if self._worker.rank != 0:
            for tensor, buffer in self._now():
                _write(tensor.pull(), buffer, as_bytes=True)

    def _now(self) -> Iterator[tuple[Tensor, torch.Tensor]]:
        named = self.named
        for name, (tensor, (shape, dtype)) in self._buffers.items():
            if (buffer := named.get(name)) is None:  # the model has it no more
                continue
            if (buffer.shape, buffer.dtype) != (shape, dtype):
                raise BadInput(
                    f"buffer {name} is {buffer.dtype} of shape {tuple(buffer.shape)}; when it was given to "
                    f"prepare it was {dtype} of {tuple(shape)}, and workers share it as that. Give it its "
                    f"shape before prepare, or register it with persistent=False"
                )
            yield tensor, buffer

    def _open(self, name: str, value: torch.Tensor, *, as_bytes: bool) -> Tensor:
        at, packed = f"{FIXED}{name}", flat(value).reshape(value.shape)
        if as_bytes:
            at, packed = f"shoal.packed.{name}", _bytes(value)
        tensor = self._worker.client.tensor(at, packed, optimizer=optim.SGD(lr=0.0))._flat()
        _write(tensor.pull(), value, as_bytes=as_bytes)
        return tensor


def _buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that a state_dict holds; others are caches of what the model is."""
    return [
        (uncompiled(f"{prefix}.{name}" if prefix else name), buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set
    ]


def _is_plain(value: torch.Tensor) -> bool:
    return value.dtype == torch.float32 and bool(value.isfinite().all())


def _bytes(value: torch.Tensor) -> FlatFloats:
    """Whatever it is (whole numbers, masks of -inf) as bytes, one or two in each float."""
    return flat(value.detach().cpu().contiguous().reshape(-1).view(_unit(value)))


def _unit(value: torch.Tensor) -> torch.dtype:
    return torch.int16 if value.element_size() % 2 == 0 else torch.uint8


def _write(packed: FlatFloats, value: torch.Tensor, *, as_bytes: bool) -> None:
    found = torch.from_numpy(packed)
    if as_bytes:
        found = found.to(_unit(value)).view(value.dtype)
    with torch.no_grad():
        value.copy_(found.view(value.shape))
