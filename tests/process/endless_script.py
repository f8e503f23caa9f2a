"""A user's script that counts until it is told to stop: OUT [MS]; `stop` in OUT ends it after a pass.

The gradient of a row is -1/batch for each sample of the batch that has it, that of the weight is -1: with
SGD(lr=1) a row counts passes in eighths, and the weight counts batches, exactly. MS: how long a step takes.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
import shoal.nn

SAMPLES, BATCH = 256, 8
OUT = Path(sys.argv[1])
STEP_S = float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0.0


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = shoal.nn.Embedding("counts", dim=1, init=shoal.init.Zeros())
        self.batches = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return -(self.rows(ids).sum() / len(ids)) - self.batches.sum()


worker = shoal.join()
model = Counts()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH)
model, optimizer, loader = worker.prepare(model, optimizer, data)
passes = 0
for epoch in worker.epochs(1_000_000):
    for (ids,) in loader:
        time.sleep(STEP_S)
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
    passes = epoch + 1
    (OUT / f"pass-{passes}").touch()
    if worker.mean(float((OUT / "stop").exists())) > 0:
        break
rows = model.rows.table.pull(list(range(SAMPLES)))[:, 0].tolist()
found = {"rows": rows, "batches": float(model.batches), "passes": passes}
worker.mean(1.0)
(OUT / f"{worker.rank}.json").write_text(json.dumps(found))
