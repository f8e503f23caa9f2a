"""The click model that all systems train: what they have in common besides the rows.

26 categorical fields of 16 over 1M ids in total, 13 dense inputs, an MLP 64-32-1, batches of 4096 for each
worker. Ids of different fields are different ids, so one table holds all of them, in every system alike.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

FIELDS, DIM, IDS, INPUTS, BATCH = 26, 16, 1_000_000, 13, 4096
LR = 0.05
_BATCHES = 24  # Different ones in turn; made beforehand, as reading data is not what is measured.
_WARM_STEPS = 8
_IDS_A_FIELD = IDS // FIELDS

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Clicks(torch.utils.data.Dataset[Batch]):
    """Synthetic clicks in memory, in whole batches: ids are skewed, 80 % of a batch's are distinct."""

    def __init__(self, batches: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        first = np.arange(FIELDS) * _IDS_A_FIELD
        self._batches = batches
        self._made: list[Batch] = []
        for _ in range(min(batches, _BATCHES)):
            ids = np.floor(_IDS_A_FIELD * rng.random((BATCH, FIELDS)) ** 3).astype(np.int64) + first
            inputs = rng.standard_normal((BATCH, INPUTS), dtype=np.float32)
            clicked = (rng.random(BATCH) < 0.3).astype(np.float32)
            self._made.append((torch.from_numpy(ids), torch.from_numpy(inputs), torch.from_numpy(clicked)))

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, batch: int) -> Batch:
        if batch >= self._batches:
            raise IndexError(batch)
        return self._made[batch % len(self._made)]


class Tower(torch.nn.Module):
    """What is above the rows: (batch, 26, 16) of them and the dense inputs in, a logit each out."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(FIELDS * DIM + INPUTS, 64),
                torch.nn.ReLU(),
                torch.nn.Linear(64, 32),
                torch.nn.ReLU(),
                torch.nn.Linear(32, 1),
            )

    def forward(self, rows: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([rows.reshape(len(inputs), FIELDS * DIM), inputs], dim=1)
        logits: torch.Tensor = self.layers(whole).squeeze(1)
        return logits


def loss_of(logits: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)


def first_rows() -> torch.Tensor:
    """What all tables begin with."""
    rows = np.random.default_rng(7).random((IDS, DIM), dtype=np.float32)
    return torch.from_numpy((rows - np.float32(0.5)) * np.float32(0.02))


class Stamps:
    """When each step of one worker ended, by the clock that all processes of the machine share."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self) -> None:
        self.ends.append(time.monotonic())


def samples_per_s(workers: Sequence[Sequence[float]]) -> float:
    """Of all workers together, while all of them were at work, without their first steps."""
    begin = max(ends[_WARM_STEPS] for ends in workers)
    end = min(ends[-1] for ends in workers)
    steps = 0.0
    for ends in workers:
        times = np.asarray(ends)
        # Steps that the window cuts count as their share in it.
        steps += float(np.interp(end, times, np.arange(len(times))))
        steps -= float(np.interp(begin, times, np.arange(len(times))))
    return steps * BATCH / (end - begin)
