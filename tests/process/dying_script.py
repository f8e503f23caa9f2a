"""A user's script that counts, and whose workers die: OUT LOOP RANK:STEP:PLACE... hold:EPOCH pace:S late

The gradient of a row is -1 for each sample of the batch that has it, that of the weight is -1: with SGD(lr=1)
rows count how much of a round each sample was, and the weight counts rounds. So does a dense parameter with
an element for each sample: a contribution counts in both or in none. A worker kills itself once, in
its first life, at these steps and places. Others do not run away meanwhile: after that step they wait until
the next life of that rank has a batch (not where it comes to life by what they do). At the first batch of an
epoch to hold at they wait for a file.
A step takes `pace` at least, so that others can choose a moment. `late`: who is started again comes when the
others are done with all of it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
import shoal.nn
from shoal.collective.group import GlooGroup
from shoal.train import strategy
from shoal.train.on_workers import AllReduce
from shoal.train.worker import Worker

SAMPLES, BATCH, DEADLINE_S = 64, 8, 120.0
OUT, LOOP = Path(sys.argv[1]), sys.argv[2]
HOLDS = {int(text[5:]) for text in sys.argv[3:] if text.startswith("hold:")}
PACE_S = sum(float(text[5:]) for text in sys.argv[3:] if text.startswith("pace:"))
SAID = [text.split(":") for text in sys.argv[3:] if text[:5] not in ("hold:", "pace:", "late")]
DEATHS = {int(rank): (int(step), place) for rank, step, place in SAID}
PASSES = 4 if HOLDS or PACE_S else 3
SUM = GlooGroup.sum_


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(push_many, client, pushes, **how):  # type: ignore[no-untyped-def]
    push_many(client, pushes[:1], **how)
    die()


def prepare_to_die(worker: Worker, place: str) -> None:
    if place == "computing":
        die()
    elif place == "stop":
        (OUT / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    elif place == "summing":  # the others have heard of the step
        GlooGroup.sum_ = lambda group, values: die() if values.dtype == torch.float32 else SUM(group, values)
    elif place == "summed":  # the others have the sum, and do not know that all have
        GlooGroup.meet = die
    elif place == "finished":  # it counts, and was not applied here
        AllReduce._apply = die
    elif place == "swapping":
        GlooGroup.swap = die
    elif place == "half":  # the weight is there, the rows are not
        whole = strategy.push_many
        strategy.push_many = lambda *args, **how: die_half_way(whole, *args, **how)
    else:  # all is sent, and the step is not finished
        worker.advance = die


def until(name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (OUT / name).exists():
        assert time.monotonic() < deadline, f"{name} does not come"
        time.sleep(0.01)


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = shoal.nn.Embedding("counts", dim=1, init=shoal.init.Zeros())
        self.rounds = torch.nn.Parameter(torch.zeros(1))
        self.dense = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return -(self.rows(ids).sum() / len(ids)) - self.rounds.sum() - self.dense[ids].sum() / len(ids)


if "late" in sys.argv and (OUT / f"life-{os.environ['RANK']}").exists():
    for other in {*range(int(os.environ["WORLD_SIZE"]))} - {int(os.environ["RANK"])}:
        until(f"{other}.json")
worker = shoal.join()
AMONG_THEMSELVES = worker.policy.dense_home == "peers"
first_life = not (OUT / f"life-{worker.rank}").exists()
(OUT / f"life-{worker.rank}").touch()
model = Counts()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH)
model, optimizer, loader = worker.prepare(model, optimizer, data)
passes, sizes, steps = [], [], 0
for epoch in worker.epochs(PASSES) if LOOP == "epochs" else range(PASSES):
    before = steps
    for (ids,) in loader:
        (OUT / f"{'life' if first_life else 'back'}-{worker.rank}").touch()
        if epoch in HOLDS and steps == before:
            (OUT / f"hold-{epoch}").touch()
            until(f"go-{epoch}")
        for rank, (step, place) in DEATHS.items():
            if steps == step and rank == worker.rank and first_life:
                prepare_to_die(worker, place)
            elif first_life and rank != worker.rank and steps == step + 1 and not AMONG_THEMSELVES:
                until(f"back-{rank}")
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
        steps += 1
        if epoch > 0:  # all tables are open by then, that of `mean` too: no step needs the coordinator
            (OUT / f"stepped-{worker.rank}").touch()
        time.sleep(PACE_S)
    passes.append((epoch, steps - before))
    sizes.append(worker.world_size)
    worker.mean(float(epoch))
if first_life and DEATHS.get(worker.rank) == (-1, "over"):
    die()
counted = model.rows.table.pull(list(range(SAMPLES)))[:, 0].tolist()
used = [worker.ledger.report(epoch).used for epoch in range(PASSES)]
found = {"rows": counted, "rounds": model.rounds.item(), "passes": passes, "used": used, "sizes": sizes}
found["dense"] = model.dense.tolist()
found["mean"] = worker.mean(1.0)
(OUT / f"{worker.rank}.json").write_text(json.dumps(found))
