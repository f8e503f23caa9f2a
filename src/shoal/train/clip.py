"""Clipping of one worker's own gradient, dense parameters and rows together."""

from __future__ import annotations

import math

import numpy as np
import torch

from shoal.nn.gradient import RowGradient
from shoal.nn.module import table_modules

__all__ = ["LocalClip"]


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
        factor = min(1.0, max_norm / (total + 1e-6))
        if factor < 1.0:
            for parameter in self._dense:
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
            for module in self._tables:
                if isinstance(module.weight.grad, RowGradient):
                    for part in module.weight.grad.parts:
                        part.grads.mul_(factor)
        return torch.tensor(total)
