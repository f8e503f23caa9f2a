"""A user's script whose model counts: the row of a sample grows by one with each time it is trained.

SAMPLES EPOCHS PAUSE_S [FILE]: it ends well as soon as there is such a file.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
import shoal.nn

samples, epochs, pause_s, *files = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]
worker = shoal.join()
model = shoal.nn.Embedding("counts", dim=1, init=shoal.init.Zeros())
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
batches = DataLoader(TensorDataset(torch.arange(samples)), batch_size=8, shuffle=True)
model, optimizer, batches = worker.prepare(model, optimizer, batches, reduction="sum")
for _ in worker.epochs(epochs):
    for (ids,) in batches:
        optimizer.zero_grad()
        (-model(ids)).sum().backward()
        optimizer.step()
        time.sleep(pause_s)  # a step that takes its time
        if any(Path(file).exists() for file in files):
            sys.exit()
