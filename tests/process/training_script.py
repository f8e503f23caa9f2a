"""A user's script: trains a small model and leaves what it reached, for test_training.py."""

import json
import sys
from pathlib import Path

import torch
from tests.train.models import IDS, ShoalModel, dense_values, loader, steps

import shoal

worker = shoal.join()
model = ShoalModel()
dense_values(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = worker.prepare(model, optimizer, loader(90, 12, True))
losses = []
for loss in steps(model, optimizer, batches, 6):
    losses.append(loss)
    worker.report(loss=loss)
ids, x, y = next(iter(loader(90, 90, False)))
with torch.no_grad():
    final = float(torch.nn.functional.mse_loss(model(ids, x), y))
mean = worker.mean(final)
report = worker.ledger.report(5)
found = {
    "final": final,
    "mean": mean,
    "steps": len(losses),
    "samples": worker.samples,
    "units": report.units,
    "done": report.done,
    "once": report.exactly_once,
}
Path(sys.argv[1], f"{worker.rank}.json").write_text(json.dumps(found))
values = {name: value.detach() for name, value in model.named_parameters() if not name.startswith("emb")}
values["rows"] = torch.from_numpy(model.emb.table.pull(list(range(IDS))).copy())
torch.save(values, Path(sys.argv[1], f"{worker.rank}.pt"))
print(f"worker {worker.rank}: {final:.4f}")
