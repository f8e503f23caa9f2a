"""A user's script whose model counts: the row of a sample grows by one with each time it is trained."""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
import shoal.nn

samples, epochs, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
worker = shoal.join()
model = shoal.nn.Embedding("counts", dim=1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
batches = DataLoader(TensorDataset(torch.arange(samples)), batch_size=8, shuffle=True)
model, optimizer, batches = worker.prepare(model, optimizer, batches, reduction="sum")
for _ in worker.epochs(epochs):
    for (ids,) in batches:
        optimizer.zero_grad()
        (-model(ids)).sum().backward()
        optimizer.step()
        time.sleep(pause_s)  # a step that takes its time
