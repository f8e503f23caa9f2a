"""A user's script with all that lies on workers: dropout, running means, Adam, a schedule. It ends by writing
a digest of what it has, to a file of its rank.

OUT EPOCHS PAUSE_S [FILE]: while there is such a file it waits where that says: before it joins (join), before
it has a model (model), before its first batch (batch); and that it does so is told by FILE.PID.
With OPTIMIZERS=2 in the environment rows and dense parameters have one each, with a pause between the two.
"""

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
import shoal.nn

out, epochs, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)


def loads(where: str) -> None:
    for file in map(Path, sys.argv[4:]):
        while file.exists() and file.read_text() == where:
            file.with_suffix(f".{os.getpid()}").touch()
            time.sleep(0.05)


loads("join")
worker = shoal.join()
loads("model")
torch.manual_seed(0)  # the model of whoever comes first is everybody's: it must not matter who that is
embedding = shoal.nn.EmbeddingBag("items", dim=4, mode="sum", seed=3)
dense = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)]
model = torch.nn.Sequential(embedding, *dense)
for seed in (torch.manual_seed, np.random.seed, random.seed):
    seed(worker.rank)
parameters = list(model.parameters())
parts = [parameters[:1], parameters[1:]] if os.environ.get("OPTIMIZERS") == "2" else [parameters]
optimizers = [torch.optim.Adam(part, lr=0.02) for part in parts]
schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for optimizer in optimizers]
data = TensorDataset(torch.arange(120).reshape(60, 2) % 17, torch.linspace(-1, 1, 60))
batches = DataLoader(data, batch_size=6, shuffle=True)
model, batches, *_ = worker.prepare(model, batches, *optimizers, *schedules)
random.random()  # what is drawn here is drawn anew by who goes on
loads("batch")
for _ in worker.epochs(epochs):
    for ids, y in batches:
        model.zero_grad()
        noise = 0.01 * (np.random.rand() + random.random())
        torch.nn.functional.mse_loss(model(ids).squeeze(1) + noise, y).backward()
        for optimizer in optimizers:
            optimizer.step()
            time.sleep(pause_s)  # a step that takes its time
        for schedule in schedules:
            schedule.step()
digest = hashlib.sha256()
for one in [*model[1:].parameters(), *model.buffers(), embedding(torch.arange(17).reshape(17, 1))]:
    digest.update(one.detach().numpy().tobytes())
rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
numbers = [worker.steps_made, *rates, random.random(), np.random.rand()]
out.mkdir(exist_ok=True)
(out / str(worker.rank)).write_text(f"{digest.hexdigest()} {numbers} {torch.rand(1).item()}")
