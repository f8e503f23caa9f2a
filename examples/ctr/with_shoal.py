# Clicks on advertisements by DeepFM, on as many workers as `shoal run` starts. plain.py: without Shoal.

import argparse
from pathlib import Path

import data
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import shoal

parser = argparse.ArgumentParser(description="Train DeepFM on clicks.")
parser.add_argument("--file", type=Path, help="in Criteo's format; without it, data is made up")
parser.add_argument("--limit", type=int, default=100_000, help="take so many lines")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=500)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()


class DeepFM(torch.nn.Module):
    """The click's logit: weights of single categories, products of pairs, and a network over all of it."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.rows = shoal.nn.Embedding("categories", dim + 1, init=shoal.init.Normal(0.03))
        self.deep = torch.nn.Sequential(
            torch.nn.Linear(data.FIELDS * dim + data.COUNTS, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )
        self.linear = torch.nn.Linear(data.COUNTS, 1)

    def forward(self, ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The logit of each sample."""
        rows = self.rows(ids)
        vectors, weights = rows[..., 1:], rows[..., 0]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        deep = self.deep(torch.cat([vectors.flatten(1), counts], 1))
        return (deep + self.linear(counts)).squeeze(1) + weights.sum(1) + pairs


worker = shoal.join()
torch.set_num_threads(1)  # batches are small: more threads are slower
torch.manual_seed(options.seed)
train, test, about = data.load(options.file, options.limit)
print(about)
loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
model = DeepFM()
optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)
model, optimizer, loader = worker.prepare(model, optimizer, loader)

for epoch in range(options.epochs):
    for ids, counts, clicks in loader:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(ids, counts), clicks)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        ids, counts, clicks = test.tensors
        logits = model(ids, counts)
        loss = binary_cross_entropy_with_logits(logits, clicks)
    worker.report(loss=loss, auc=data.auc(clicks, logits))
    print(f"epoch {epoch + 1}: held-out loss {loss:.4f}, AUC {data.auc(clicks, logits):.4f}")
