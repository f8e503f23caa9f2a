"""What row optimizers are held against: torch.optim, one instance per row, stepped when the row is touched;
row-wise Adagrad and FTRL, which torch has not, in float64 NumPy written from their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal import _core

Array = NDArray[np.float32]
Step = Callable[[NDArray[np.int64], Array, float], None]

TORCH_CASES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}),
    ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "dampening": 0.5}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.05}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "eps": 1e-6}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01}),
    ("adam", torch.optim.Adam, {"lr": 0.01}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-6}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.3, 0.99)}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.99)}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.05}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0}),
    ("adamw", torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.95)}),
]
TORCH_IDS = [f"{kind}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for kind, _, options in TORCH_CASES]


def make_spec(kind: str, **fields: Any) -> _core.OptimizerSpec:
    spec = _core.OptimizerSpec(kind)
    for name, value in fields.items():
        setattr(spec, name, value)
    _core.update.check(spec)
    return spec


class TorchRows:
    """The same rows, each a Parameter of its own with an optimizer of its own."""

    def __init__(self, make: type[torch.optim.Optimizer], options: dict[str, Any], values: Array) -> None:
        self.params = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in values]
        self.optimizers = [make([p], foreach=False, **options) for p in self.params]

    @property
    def values(self) -> Array:
        return np.stack([p.detach().numpy() for p in self.params])

    def step(self, touched: NDArray[np.int64], grads: Array, lr: float) -> None:
        for row, grad in zip(touched, grads, strict=True):
            self.params[row].grad = torch.from_numpy(grad.copy())
            self.optimizers[row].param_groups[0]["lr"] = lr
            self.optimizers[row].step()


def rowwise_step(spec: _core.OptimizerSpec, values: NDArray[np.float64], sums: NDArray[np.float64]) -> Step:
    def step(touched: NDArray[np.int64], grads: Array, lr: float) -> None:
        g = grads.astype(np.float64) + spec.weight_decay * values[touched]
        sums[touched] += (g * g).mean(axis=1)
        values[touched] -= lr * g / (np.sqrt(sums[touched]) + spec.eps)[:, None]

    return step


class PaperFtrl:
    """Algorithm 1 of McMahan et al. 2013 in float64, as printed: w is made from z and n before each use."""

    def __init__(self, spec: _core.OptimizerSpec, shape: tuple[int, int]) -> None:
        self.spec, self.z, self.n = spec, np.zeros(shape), np.full(shape, float(spec.initial))
        self.values = np.zeros(shape)

    def step(self, touched: NDArray[np.int64], grads: Array, lr: float) -> None:
        g, n, w = grads.astype(np.float64), self.n[touched], self.values[touched]
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / lr
        self.z[touched] += g - sigma * w
        self.n[touched] += g * g
        z, n = self.z[touched], self.n[touched]
        w = -(z - np.sign(z) * self.spec.l1) / ((self.spec.beta + np.sqrt(n)) / lr + self.spec.l2)
        self.values[touched] = np.where(np.abs(z) <= self.spec.l1, 0.0, w)
