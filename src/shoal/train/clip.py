"""Clipping by norm, dense parameters and rows together: of one worker's gradient, or of a whole round's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from shoal.nn.gradient import RowGradient
from shoal.nn.module import TableModule, table_modules

__all__ = ["LocalClip", "RoundClip", "clip_factor", "scale_gradients"]


def clip_factor(max_norm: float, norm: float) -> float:
    """What a gradient of this norm is multiplied by, as torch has it."""
    return min(1.0, max_norm / (norm + 1e-6))


def scale_gradients(
    dense: Iterable[torch.nn.Parameter], tables: Iterable[TableModule], factor: float
) -> None:
    """Multiply gradients. Those of rows are replaced: two lookups of a sum share one tensor."""
    if factor == 1.0:
        return
    for parameter in dense:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    for module in tables:
        grad = module.weight.grad
        if isinstance(grad, RowGradient):
            grad.parts[:] = [part._replace(grads=part.grads * factor) for part in grad.parts]


class LocalClip:
    """The gradients of one model as one vector."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables = [module for _, module in table_modules(model)]
        handles = {id(module.weight) for module in self._tables}
        self._dense = [p for p in model.parameters() if id(p) not in handles and p.grad is not None]

    def norm(self) -> float:
        """The Euclidean norm; equal keys of a table count as their sum."""
        square = sum(float(p.grad.double().square().sum()) for p in self._dense if p.grad is not None)
        for module in self._tables:
            found = module.gradients()
            if found is not None:
                _, where = np.unique(found[0], return_inverse=True)
                sums = np.zeros((int(where.max(initial=-1)) + 1, module.dim))
                np.add.at(sums, where, found[1])
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
