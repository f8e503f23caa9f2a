"""A user's script whose worker 1 is not well: OUT once|always|exploding|slow|well

Each worker counts its own steps in a row, by gradients of -1. At its fourth step worker 1 has one that is NaN
once, or from then on in its first life; or it reports a loss that is far above what it was; or its steps take
far longer. They go on until the test has seen what it wants.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch

import shoal
import shoal.nn

OUT, HOW = Path(sys.argv[1]), sys.argv[2]
BAD_STEP, LESS = 3, 5
worker = shoal.join()
life = OUT / f"life-{worker.rank}"
first_life = not life.exists()
life.touch()
model = shoal.nn.Embedding("steps", dim=1, init=shoal.init.Zeros())
model, optimizer = worker.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
steps = refused = less = 0
counted = 0.0  # what its steps count for, all in all
while not (OUT / "go").exists() or (HOW in ("exploding", "slow") and worker.rank == 1 and less < LESS):
    bad = worker.rank == 1 and HOW in ("once", "always") and first_life
    bad = bad and (steps == BAD_STEP or (HOW == "always" and steps > BAD_STEP))
    optimizer.zero_grad()
    loss = -model(torch.tensor([worker.rank])).sum() * (math.nan if bad else 1.0)
    loss.backward()
    explodes = HOW == "exploding" and worker.rank == 1 and (OUT / "explode").exists()
    worker.report(loss=100.0 if explodes else math.nan if bad else 1.0 + steps % 3 / 10)
    refused += worker.trust == 0.0
    less += worker.trust < 1.0
    counted += worker.trust
    optimizer.step()
    steps += 1
    time.sleep(0.3 if HOW == "slow" and worker.rank == 1 else 0.02)
row = model.table.pull([worker.rank]).item()
found = {"row": row, "steps": steps, "refused": refused, "less": less, "counted": counted}
(OUT / f"{worker.rank}.json").write_text(json.dumps(found))
