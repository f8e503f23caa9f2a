"""The models of the suite: one with tables for Shoal, and its twin in plain torch with the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
import shoal.nn

IDS, DIM, INPUTS = 23, 3, 4


class ShoalModel(torch.nn.Module):
    """Two fields of ids and some dense inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = shoal.nn.Embedding("items", dim=DIM, init=shoal.init.Uniform(0.5), seed=3)
        self.linear = torch.nn.Linear(DIM + INPUTS, 5)
        self.out = torch.nn.Linear(5, 1)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = self.emb(ids)
        hidden = torch.tanh(self.linear(torch.cat([rows, x], dim=1)))
        return self.out(hidden).squeeze(1)


class TorchModel(torch.nn.Module):
    """The same with `nn.Embedding(sparse=True)`: equal for SGD and Adagrad."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(IDS, DIM, sparse=True, _weight=rows.clone())
        self.linear = torch.nn.Linear(DIM + INPUTS, 5)
        self.out = torch.nn.Linear(5, 1)

    forward = ShoalModel.forward


def initial_rows() -> torch.Tensor:
    """What the table's rows begin as."""
    with shoal.connect("memory://") as client:
        table = client.table(
            "items", dim=DIM, optimizer=shoal.optim.SGD(), init=shoal.init.Uniform(0.5), seed=3
        )
        return torch.from_numpy(table.pull(list(range(IDS))).copy())


def dense_values(model: torch.nn.Module) -> None:
    """The same dense values in every model, without touching global random state."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("emb"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, IDS, (samples,), generator=generator)
    x = torch.randn(samples, INPUTS, generator=generator)
    y = torch.randn(samples, generator=generator)
    return TensorDataset(ids, x, y)


def loader(samples: int, batch: int, shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2) if shuffle else None
    return DataLoader(dataset(samples), batch_size=batch, shuffle=shuffle, generator=generator)


def steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    epochs: int,
    clip: Callable[[], Any] | None = None,
    scheduler: Any = None,
) -> Iterator[float]:
    """The loop of a user; gives the losses."""
    for _ in range(epochs):
        for ids, x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(ids, x), y)
            loss.backward()
            if clip is not None:
                clip()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            yield float(loss.detach())
