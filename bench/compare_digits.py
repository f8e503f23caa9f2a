"""Digits by a small MLP, for the figures of docs/compare.md; rank 0 judges the model on held-out digits.

    shoal compare --sync bsp,asp --target "accuracy>=0.9" bench/compare_digits.py --lr 0.5

The data is scikit-learn's (pip install scikit-learn). `--step-ms` makes each step longer, as a larger model
would: so several workers on few cores are held up by what is compared, and not by each other.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.3)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--step-ms", type=float, default=10.0)
parser.add_argument("--judge-every", type=int, default=5, help="steps of rank 0")
options = parser.parse_args()

worker = shoal.join()
data = load_digits()
x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))  # the same split for every seed
train, held_out = order[:1437], order[1437:]
torch.manual_seed(worker.seed)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
loader = DataLoader(TensorDataset(x[train], y[train]), options.batch, shuffle=True)
model, optimizer, loader = worker.prepare(model, optimizer, loader)


def judge() -> None:
    with torch.no_grad():
        scores = model(x[held_out])
    hits = (scores.argmax(1) == y[held_out]).float().mean()
    worker.report(loss=cross_entropy(scores, y[held_out]), accuracy=hits)


steps = 0
for _ in worker.epochs(options.epochs):
    for inputs, labels in loader:
        time.sleep(options.step_ms / 1000)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        steps += 1
        if worker.rank == 0 and steps % options.judge_every == 0:
            judge()
if worker.rank == 0:
    judge()
