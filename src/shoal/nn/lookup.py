"""Rows as torch's autograd sees them: a function of the handles, whose gradient is recorded row by row.

Nothing here talks to a store; rows come in as they were pulled. One node of the graph serves all the tables
of a forward, since with many small tables the nodes would cost more than the rows. There is no second
derivative through the rows: what backward gives for a handle is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shoal.nn.gradient import Owner, Part, RowGradient
from shoal.types import FloatRows


class Pulled(NamedTuple):
    """Rows of shape keys.shape + (dim,), and the handle that stands for them.

    `keys` is int64 in CPU memory. Backward leaves a part of `owner`'s in the handle's `grad`.
    """

    owner: Owner
    handle: torch.nn.Parameter
    keys: torch.Tensor
    rows: FloatRows


class _Recorded(NamedTuple):
    owner: Owner
    keys: torch.Tensor
    version: int
    dim: int
    dtype: torch.dtype
    device: torch.device


def lookup(pulled: Sequence[Pulled]) -> list[torch.Tensor]:
    """The rows as tensors of their handles' dtypes and devices."""
    tensors = [_like(entry.handle, torch.from_numpy(entry.rows)) for entry in pulled]
    if not torch.is_grad_enabled():
        return tensors
    learning = [place for place, entry in enumerate(pulled) if entry.handle.requires_grad]
    if learning:
        chosen = [pulled[place] for place in learning]
        # In a list: a tensor that goes in and comes out would be a view of itself, and relu_ on it an error.
        rows = [tensors[place] for place in learning]
        handles = [entry.handle for entry in chosen]
        outputs = _Lookup.apply(chosen, rows, *handles)  # type: ignore[no-untyped-call]
        for place, output in zip(learning, outputs, strict=True):
            tensors[place] = output
    return tensors


def _like(handle: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    if handle.dtype == torch.float32 and handle.device.type == "cpu":
        return rows
    return rows.to(handle.device, handle.dtype)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pulled: list[Pulled], rows: list[torch.Tensor], *handles: torch.nn.Parameter
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Not save_for_backward: its tensors are gone after one backward, and outputs may be used one by one.
        ctx.recorded = [
            _Recorded(owner, keys, keys._version, handle.shape[1], handle.dtype, handle.device)
            for owner, handle, keys, _ in pulled
        ]
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[RowGradient | None, ...]:
        given = zip(ctx.recorded, grads, strict=True)
        return None, None, *(None if grad is None else _gradient(entry, grad) for entry, grad in given)


def _gradient(entry: _Recorded, grad: torch.Tensor) -> RowGradient:
    if entry.keys._version != entry.version:
        raise RuntimeError(
            f"{entry.owner.where}: ids were modified by an in-place operation between forward and backward; "
            f"hand a copy to the module: ids.clone()"
        )
    # From here on the ids are the caller's again, and loaders reuse their memory.
    keys = entry.keys.reshape(-1).clone().numpy()
    # By torch, whose strided copy (vectors are mostly parts of a wider tensor) is eight times NumPy's.
    rows = grad.detach().reshape(-1, entry.dim).to("cpu", torch.float32).contiguous()
    return RowGradient(entry.dim, entry.dtype, entry.device, [Part(entry.owner, keys, rows)])
