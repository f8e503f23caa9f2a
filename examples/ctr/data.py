"""Clicks: 13 counts and 26 categories of an advertisement, and whether it was clicked, as Criteo has them.

From a file in Criteo's format, or made up: by a factorisation machine whose weights are drawn here, and which
therefore knows as much of the clicks as can be known.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

COUNTS, FIELDS = 13, 26
ROWS = 1 << 18  # of the table; a category's row is a hash of field and category
MISSING = 1 << 32  # the category of an empty field: above all that eight hex digits can be


def load(path: Path | None, limit: int) -> tuple[TensorDataset, TensorDataset, str]:
    """Ids, counts and clicks: to train on, the last tenth, held out, and what to say about them."""
    if path is None:
        categories, counts, clicks, logits = make_up(limit)
        ceiling = auc(clicks[-limit // 10 :], logits[-limit // 10 :])
        about = f"SYNTHETIC data; the model that made it has held-out AUC {ceiling:.4f}, the best there is"
    else:
        categories, counts, clicks = read(path, limit)
        about = f"{path}: {len(clicks):,} lines"
    ids = torch.from_numpy(row_ids(categories))
    tensors = ids, counts.clamp(min=0).log1p(), clicks
    held_out = max(len(clicks) // 10, 1)
    return (
        TensorDataset(*(tensor[:-held_out] for tensor in tensors)),
        TensorDataset(*(tensor[-held_out:] for tensor in tensors)),
        f"{about}; {clicks.mean():.1%} are clicks",
    )


def row_ids(categories: np.ndarray) -> np.ndarray:
    """The table's row of each category: the upper bits of a multiplicative hash."""
    fields = np.arange(FIELDS, dtype=np.uint64) << np.uint64(40)
    mixed = (fields | categories) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(64 - 18)).astype(np.int64)


def make_up(size: int) -> tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Categories by a power law, counts, clicks, and the logits that the clicks were drawn with."""
    draw, plant = np.random.default_rng(1), np.random.default_rng(0)  # the weights are the same for any size
    categories = np.empty((size, FIELDS), np.uint64)
    logits = np.full(size, -1.5)
    vectors = np.zeros((size, FIELDS, 4))
    for field, kinds in enumerate(np.geomspace(4, 4000, FIELDS).astype(int)):
        law = np.arange(1.0, kinds + 1) ** -1.5
        chosen = draw.choice(kinds, size, p=law / law.sum())
        categories[:, field] = chosen
        logits += plant.normal(0, 0.25, kinds)[chosen]
        vectors[:, field] = plant.normal(0, 0.12, (kinds, 4))[chosen]
    counts = draw.poisson(draw.exponential(5, (size, COUNTS))).astype(np.float32)
    logits += (np.log1p(counts) - 1.4) @ plant.normal(0, 0.15, COUNTS)
    logits += (np.square(vectors.sum(1)) - np.square(vectors).sum(1)).sum(1) / 2
    clicks = draw.random(size) < 1 / (1 + np.exp(-logits))
    return categories, torch.from_numpy(counts), torch.from_numpy(clicks).float(), torch.from_numpy(logits)


def read(path: Path, limit: int) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """The first lines of Criteo's file: label, 13 counts, 26 categories in hex; some are empty."""
    categories, counts, clicks = [], [], []
    with path.open() as file:
        for number, line in zip(range(1, limit + 1), file, strict=False):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 1 + COUNTS + FIELDS:
                sys.exit(f"{path}, line {number}: {len(fields)} fields; Criteo has {1 + COUNTS + FIELDS}")
            clicks.append(int(fields[0]))
            counts.append([int(field or 0) for field in fields[1 : 1 + COUNTS]])
            categories.append([int(field, 16) if field else MISSING for field in fields[1 + COUNTS :]])
    if len(clicks) < 20:
        sys.exit(f"{path}: {len(clicks)} lines; at least 20 are needed")
    return (
        np.array(categories, np.uint64),
        torch.tensor(counts, dtype=torch.float32),
        torch.tensor(clicks, dtype=torch.float32),
    )


def auc(clicks: torch.Tensor, scores: torch.Tensor) -> float:
    """How often a click has a higher score than what was not clicked; 0.5 is chance."""
    others = scores[clicks == 0].sort().values
    chosen = scores[clicks == 1]
    below = torch.searchsorted(others, chosen) + torch.searchsorted(others, chosen, right=True)
    return float(below.double().mean() / (2 * len(others))) if len(others) else float("nan")
