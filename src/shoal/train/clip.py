"""Clipping by norm, dense parameters and rows together: of one worker's gradient, or of a whole round's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.errors import BadInput
from shoal.nn.module import TableModule, row_gradients, table_modules

if TYPE_CHECKING:
    from shoal.train.parameters import Stepped


def clip_factor(max_norm: float, norm: float) -> float:
    """What a gradient of this norm is multiplied by, as torch has it."""
    return min(1.0, max_norm / (norm + 1e-6))


def scale_gradients(
    dense: Iterable[torch.nn.Parameter], tables: Iterable[TableModule], factor: float
) -> None:
    """Multiply gradients; a handle that several modules share is one."""
    if factor == 1.0:
        return
    for parameter in {*dense, *(module.weight for module in tables)}:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class LocalClip:
    """The gradients of one model as one vector."""

    def __init__(self, model: torch.nn.Module) -> None:
        _check_model(model)
        self._tables = [module for _, module in table_modules(model)]
        handles = {id(module.weight) for module in self._tables}
        self._dense = [p for p in model.parameters() if id(p) not in handles and p.grad is not None]

    def norm(self) -> float:
        """The Euclidean norm; equal keys of a table count as their sum."""
        square = sum(
            float(p.grad.to_dense().double().square().sum()) for p in self._dense if p.grad is not None
        )
        for module, keys, grads in row_gradients(self._tables):
            _, where = np.unique(keys, return_inverse=True)
            sums = np.zeros((int(where.max(initial=-1)) + 1, module.dim))
            np.add.at(sums, where, grads)
            square += float((sums**2).sum())
        return math.sqrt(square)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale everything down where the norm is above `max_norm`, as torch does; gives the norm."""
        total = self.norm()
        scale_gradients(self._dense, self._tables, clip_factor(max_norm, total))
        return torch.tensor(total)


class RoundClip:
    """A wish to clip the next round's mean gradient, whose norm is known when the round is closed."""

    def __init__(self) -> None:
        self.max_norm = 0.0  # 0: no wish
        self._norm = torch.tensor(math.nan)

    def wish(self, max_norm: float) -> torch.Tensor:
        """The tensor that the norm will stand in."""
        self.max_norm, self._norm = max_norm, torch.tensor(math.nan)
        return self._norm

    def done(self, norm: float) -> None:
        """The round is closed."""
        if self.max_norm:
            self._norm.fill_(norm)
        self.max_norm = 0.0


def round_clip(model: torch.nn.Module, stepped: Sequence[Stepped]) -> RoundClip:
    """That of the optimizer whose step has just the gradients of `model`: the norm is a round's, whole."""
    _check_model(model)
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [one for one in stepped if any(id(parameter) in own for parameter in one.named.values())]
    if len(found) == 1:
        known = {id(parameter) for parameter in found[0].named.values()}
        missing = [n for n, p in found[0].named.items() if id(p) not in own and p.requires_grad]
        others = [(n, p) for n, p in model.named_parameters() if id(p) not in known and p.numel()]
        loose = [n for n, p in others if p.grad is not None]
        if not missing and not loose:
            return found[0].clip
        seen = (
            f"{missing[0]} is stepped with them" if missing else f"{loose[0]} has a gradient and no optimizer"
        )
    else:
        seen = f"{len(found)} optimizers step them"
    raise BadInput(
        f"worker.clip_grad_norm_({type(model).__name__}): in this sync word it clips the mean gradient of a "
        f"round, which is all that one optimizer steps, and not just the parameters of this model: {seen}. "
        f"Give it the whole of what one optimizer steps, before that one's step(); torch's own "
        f"torch.nn.utils.clip_grad_norm_ clips what this worker has"
    )


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise BadInput(
            f"worker.clip_grad_norm_: {type(model).__name__} is no model; pass the model itself, as "
            f"worker.clip_grad_norm_(model, 1.0), and not its parameters: rows of tables are clipped, too"
        )
