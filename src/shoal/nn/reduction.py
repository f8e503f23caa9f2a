"""From rows to bags: which rows make which bag, and sum, mean, sqrtn and max of them.

Rows come in the order of their bags, so a bag is a range of them and torch's kernel is given 0, 1, 2, ... as
indices. The gradient of a row is then that of its bag: one gather, where torch's own backward would sort.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

Mode: TypeAlias = Literal["sum", "mean", "max", "sqrtn"]


def reduce_rows(
    rows: torch.Tensor, ends: torch.Tensor, mode: Mode, weights: torch.Tensor | None
) -> torch.Tensor:
    """Bags of `rows`: bag i is rows ends[i] to ends[i + 1]. An empty bag is zeros. `weights` scale rows."""
    if mode == "max":
        return _kernel(rows, ends, "max", None)
    ends = ends.to(rows.device)
    bags: torch.Tensor = _Reduce.apply(rows, weights, ends, mode)  # type: ignore[no-untyped-call]
    return bags


def _kernel(rows: torch.Tensor, ends: torch.Tensor, mode: str, weights: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(
        torch.arange(len(rows), device=rows.device),
        rows,
        ends.to(rows.device),
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=True,
    )


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor | None, ends: torch.Tensor, mode: Mode
    ) -> torch.Tensor:
        ctx.mode = mode
        # Rows are needed for the gradient of their weights alone. Otherwise their memory, which is touched
        # already, serves for their gradients.
        ctx.save_for_backward(ends, weights, None if weights is None else rows)
        ctx.spare = rows.detach() if weights is None else None
        bags = _kernel(rows, ends, "mean" if mode == "mean" else "sum", weights)
        return bags / _divisor(ends, mode, bags.dtype) if mode == "sqrtn" else bags

    @staticmethod
    def backward(
        ctx: Any, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        ends, weights, rows = ctx.saved_tensors
        grad = outputs[0]
        if ctx.mode != "sum":
            grad = grad / _divisor(ends, ctx.mode, grad.dtype)
        bags = torch.repeat_interleave(ends.diff())
        spare, ctx.spare = ctx.spare, None
        if spare is not None and not torch.is_grad_enabled():
            return torch.index_select(grad, 0, bags, out=spare), None, None, None
        of_rows = grad.index_select(0, bags)
        if weights is None:
            return of_rows, None, None, None
        of_weights = (of_rows * rows).sum(1) if ctx.needs_input_grad[1] else None
        return of_rows * weights.unsqueeze(1), of_weights, None, None


def _divisor(ends: torch.Tensor, mode: Mode, dtype: torch.dtype) -> torch.Tensor:
    lengths = ends.diff().clamp(min=1).to(dtype).unsqueeze(1)
    return lengths.sqrt() if mode == "sqrtn" else lengths
