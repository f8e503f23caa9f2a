"""A user's script with all that lies on workers: dropout, running means, Adam, a schedule. It ends by writing
a digest of what it has, to a file of its rank."""

import hashlib
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
worker = shoal.join()
for seed in (torch.manual_seed, np.random.seed, random.seed):
    seed(worker.rank)
embedding = shoal.nn.EmbeddingBag("items", dim=4, mode="sum", seed=3)
dense = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)]
model = torch.nn.Sequential(embedding, *dense)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
data = TensorDataset(torch.arange(120).reshape(60, 2) % 17, torch.linspace(-1, 1, 60))
batches = DataLoader(data, batch_size=6, shuffle=True)
model, optimizer, schedule, batches = worker.prepare(model, optimizer, schedule, batches)
for _ in worker.epochs(epochs):
    for ids, y in batches:
        optimizer.zero_grad()
        noise = 0.01 * (np.random.rand() + random.random())
        torch.nn.functional.mse_loss(model(ids).squeeze(1) + noise, y).backward()
        optimizer.step()
        schedule.step()
        time.sleep(pause_s)  # a step that takes its time
digest = hashlib.sha256()
for one in [*model[1:].parameters(), *model.buffers(), embedding(torch.arange(17).reshape(17, 1))]:
    digest.update(one.detach().numpy().tobytes())
numbers = [worker.steps_made, optimizer.param_groups[0]["lr"], random.random(), np.random.rand()]
out.mkdir(exist_ok=True)
(out / str(worker.rank)).write_text(f"{digest.hexdigest()} {numbers} {torch.rand(1).item()}")
