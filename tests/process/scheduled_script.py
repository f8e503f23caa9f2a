"""A user's script with a schedule: OUT LOOP KIND PASSES [die:RANK:EPOCH:PLACE] [hold:EPOCH] [pace:SECONDS]

Each worker writes the learning rate of each of its steps, with the pass and the clock, and what it has at the
end. One dies in its first life: before the pass ("begins"), at its third batch ("within"), behind it, before
the schedule moves ("behind"). The others then wait, with a batch in their hands, until its next life has come
to a pass. At the first batch of an epoch to hold at all wait for a file.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import shoal

OUT, LOOP, KIND, PASSES = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
SAID = [text.split(":") for text in sys.argv[5:]]
DIES = [(int(said[1]), int(said[2]), said[3]) for said in SAID if said[0] == "die"]
HOLDS = {int(said[1]) for said in SAID if said[0] == "hold"}
PACE_S = sum(float(said[1]) for said in SAID if said[0] == "pace")
DEADLINE_S, THIRD = 120.0, 2


def until(name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (OUT / name).exists():
        assert time.monotonic() < deadline, f"{name} does not come"
        time.sleep(0.01)


def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    if KIND == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
    if KIND == "step":
        return lr_scheduler.ExponentialLR(optimizer, 0.95)
    return lr_scheduler.StepLR(optimizer, 1, 0.7)


def die_at(epoch: int, place: str) -> None:
    if first_life and (worker.rank, epoch, place) in DIES:
        os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
OUT.mkdir(exist_ok=True)
worker = shoal.join()
first_life = not (OUT / f"life-{worker.rank}").exists()
(OUT / f"life-{worker.rank}").touch()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = schedule(optimizer)
data = TensorDataset(
    torch.randn(48, 3, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 48)
)
model, optimizer, scheduler, batches = worker.prepare(
    model, optimizer, scheduler, DataLoader(data, batch_size=6)
)
lines = (OUT / f"{worker.rank}.lines").open("a", buffering=1)
for epoch in worker.epochs(PASSES) if LOOP == "epochs" else range(PASSES):
    if KIND == "early":
        scheduler.step()
    die_at(epoch, "begins")
    for number, (x, y) in enumerate(batches):
        if not first_life:
            (OUT / f"back-{worker.rank}").touch()
        if number == 0 and epoch in HOLDS:
            (OUT / f"hold-{epoch}").touch()
            until(f"go-{epoch}")
        if number == THIRD:
            die_at(epoch, "within")
        for rank, at, place in DIES:
            meets = (at, THIRD + 1) if place == "within" else (at + (place == "behind"), 0)
            if rank != worker.rank and (epoch, number) == meets:
                until(f"back-{rank}")
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        lines.write(json.dumps([epoch, worker.step, optimizer.param_groups[0]["lr"]]) + "\n")
        optimizer.step()
        if KIND == "step":
            scheduler.step()
        time.sleep(PACE_S)
    die_at(epoch, "behind")
    if KIND == "plateau":
        scheduler.step(float(epoch))  # it never becomes better
    elif KIND == "epoch":
        scheduler.step()
found = [value.tolist() for value in model.parameters()]
(OUT / f"{worker.rank}.json").write_text(json.dumps([found, optimizer.param_groups[0]["lr"]]))
