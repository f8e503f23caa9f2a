"""The gradient of a handle: an empty tensor that carries the gradients of rows.

A table's handle is a Parameter of shape (0, dim), and so is its `grad`. What torch does to gradients it
does to this object, and thereby to the rows:

1. accumulating (a second use in a forward, a second backward) adds the parts of one to the other;
2. `zero_` and `_foreach_zero_`, and setting `grad` to None, drop them;
3. `GradScaler.unscale_` divides them and looks for inf and NaN in them;
4. multiplying by a number scales them, and so does dividing by a number or by a tensor with one element;
5. everything else (norms, clipping, an optimizer's step) sees the empty tensor that it is. torch's clipping
   multiplies by a tensor: its factor is that of the dense part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from shoal.types import KeyArray

_aten = torch.ops.aten


class Owner:
    """Whose rows they are. Not the module itself: through torch that would be a cycle no collector sees."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where


class Part(NamedTuple):
    """What one backward gave: float32 gradients of shape (n, dim) for n keys, which may repeat."""

    owner: Owner
    keys: KeyArray
    grads: torch.Tensor


class RowGradient(torch.Tensor):
    """A gradient of shape (0, dim) with its rows in `parts`. Detached ones share them, as memory."""

    parts: list[Part]

    # Subclassing by dispatch alone: torch's Python layer has nothing to add.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, dim: int, dtype: torch.dtype, device: torch.device, parts: list[Part]) -> RowGradient:
        made: RowGradient = torch.Tensor._make_wrapper_subclass(cls, (0, dim), dtype=dtype, device=device)
        made.parts = parts
        return made

    def plain(self) -> torch.Tensor:
        """The empty tensor that it is to everybody else."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        rows = sum(len(part.keys) for part in self.parts)
        return f"<gradient of a table: {rows} rows of {self.shape[1]}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGradient:
        return _with_parts(self, list(self.parts))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its C function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        compute = _SCALINGS.get(func)
        if compute is not None and (by := _number(compute, *args)) is not None:
            return _scale(compute, args[0], by, in_place=func._schema.is_mutable)
        plain_args, plain_kwargs = tree_map_only(RowGradient, RowGradient.plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        # In place on this one: `grad /= 2` must not put another tensor where the rows are.
        if func._schema.is_mutable and args and isinstance(args[0], RowGradient):
            return args[0]
        return result


def _with_parts(like: RowGradient, parts: list[Part]) -> RowGradient:
    return RowGradient(like.shape[1], like.dtype, like.device, parts)


def _detach(grad: RowGradient) -> RowGradient:
    return _with_parts(grad, grad.parts)


def _add(one: Any, other: Any, **_: Any) -> RowGradient:
    parts = [part for term in (one, other) if isinstance(term, RowGradient) for part in term.parts]
    return _with_parts(one if isinstance(one, RowGradient) else other, parts)


def _add_in_place(one: Any, other: Any, **_: Any) -> Any:
    # Where `one` is an optimizer's own tensor there is nothing to add to it.
    if isinstance(one, RowGradient) and isinstance(other, RowGradient):
        one.parts.extend(other.parts)
    return one


def _copy_in_place(one: Any, other: Any, *_: Any, **__: Any) -> Any:
    if isinstance(one, RowGradient) and isinstance(other, RowGradient):
        one.parts[:] = other.parts
    return one


def _new_empty_strided(grad: RowGradient, *_: Any, **__: Any) -> RowGradient:
    return _with_parts(grad, [])


def _zero_in_place(grad: RowGradient) -> RowGradient:
    grad.parts.clear()
    return grad


def _foreach_zero_in_place(grads: list[torch.Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Case 3. The parts may be shared with other gradients, so they are replaced and not written to."""
    dense = [grad for grad in grads if not isinstance(grad, RowGradient)]
    if dense:
        _aten._amp_foreach_non_finite_check_and_unscale_(dense, found_inf, inv_scale)
    for grad in grads:
        if isinstance(grad, RowGradient) and grad.parts:
            scaled = [part.grads.clone(memory_format=torch.contiguous_format) for part in grad.parts]
            found = found_inf.to("cpu", copy=True)
            _aten._amp_foreach_non_finite_check_and_unscale_(scaled, found, inv_scale.cpu())
            found_inf.copy_(found)
            grad.parts[:] = [part._replace(grads=rows) for part, rows in zip(grad.parts, scaled, strict=True)]


def _number(compute: Any, grad: Any, by: Any) -> float | None:
    """What case 4 computes with; None where it is another case."""
    if not isinstance(grad, RowGradient):
        return None
    if isinstance(by, torch.Tensor):
        return by.item() if compute is torch.div and by.numel() == 1 else None
    return float(by)


def _scale(compute: Any, grad: RowGradient, by: float, *, in_place: bool) -> RowGradient:
    # Replaced and not written to, as in case 3.
    parts = [part._replace(grads=compute(part.grads, by)) for part in grad.parts]
    if not in_place:
        return _with_parts(grad, parts)
    grad.parts[:] = parts
    return grad


def _foreach_mul_in_place(grads: list[torch.Tensor], by: float) -> None:
    for grad in grads:
        grad.mul_(by)


def _foreach_div_in_place(grads: list[torch.Tensor], by: float) -> None:
    for grad in grads:
        grad.div_(by)


_SCALINGS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.mul.Tensor: torch.mul,
    _aten.mul_.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.div_.Tensor: torch.div,
}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_in_place,
    _aten.copy_.default: _copy_in_place,
    _aten.new_empty_strided.default: _new_empty_strided,
    _aten.zero_.default: _zero_in_place,
    _aten._foreach_zero_.default: _foreach_zero_in_place,
    _aten._foreach_mul_.Scalar: _foreach_mul_in_place,
    _aten._foreach_div_.Scalar: _foreach_div_in_place,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
