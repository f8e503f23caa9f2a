"""A task small enough for NumPy: worker r has loss |A_r w - b_r|^2 / 2 of one vector of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.train.worker import Worker

SIZE = 5
Floats = npt.NDArray[np.float64]


def start() -> Floats:
    return np.linspace(-1.0, 1.0, SIZE)


def task(rank: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(rank + 17)
    return rng.normal(size=(4, SIZE)) * 0.5, rng.normal(size=4)


def gradient(rank: int, w: Floats) -> Floats:
    matrix, target = task(rank)
    return matrix.T @ (matrix @ w - target)


class Vector(torch.nn.Module):
    """The parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(start(), dtype=torch.float32))

    @property
    def values(self) -> Floats:
        return self.w.detach().numpy().astype(np.float64)


def steps(
    worker: Worker, count: int, make: Callable[[Any], torch.optim.Optimizer], rank: int | None = None
) -> tuple[Vector, torch.optim.Optimizer, Callable[[], None]]:
    """A prepared model, its optimizer, and what makes `count` steps."""
    model = Vector()
    optimizer = make(model.parameters())
    worker.prepare(model, optimizer)
    matrix, target = (
        torch.tensor(part, dtype=torch.float32) for part in task(worker.rank if rank is None else rank)
    )

    def run() -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (((matrix @ model.w - target) ** 2).sum() / 2).backward()
            optimizer.step()

    return model, optimizer, run
