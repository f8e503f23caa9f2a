"""The click model as a user of Shoal trains it: `python train_shoal.py` or `shoal run ... train_shoal.py`."""

import argparse
import json
import os
from pathlib import Path

import torch

import shoal
from bench.click.model import BATCH, DIM, FIELDS, IDS, LR, Batch, Clicks, Stamps, Tower, first_rows, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--optimizer", choices=["Adagrad", "RowwiseAdagrad"], default="Adagrad")
parser.add_argument("--tables", type=int, choices=[1, FIELDS], default=1)
parser.add_argument("--prefetch", type=int, default=0)
parser.add_argument("--threads", type=int, default=1)
options = parser.parse_args()


class ClickModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = {"dim": DIM, "optimizer": getattr(shoal.optim, options.optimizer)(lr=LR)}
        self.fields = shoal.nn.EmbeddingCollection(
            {f"field{i}": shoal.nn.Embedding(f"field{i}", **rows) for i in range(options.tables)}
        )
        self.tower = Tower()

    def forward(self, ids: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        rows = list(self.fields(by_table(ids)).values())
        # The peers have one table; what joins 26 of them is not theirs to pay, and not Shoal's with one.
        return self.tower(rows[0] if len(rows) == 1 else torch.cat(rows, dim=1), inputs)


def by_table(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    each = ids.split(FIELDS // options.tables, dim=1)
    return {f"field{i}": part.contiguous() for i, part in enumerate(each)}


def bear_rows() -> None:
    """All rows are there before the first step, as in the systems that Shoal is compared with."""
    keys, rows = torch.arange(IDS), first_rows()
    for i in range(options.tables):
        low, high = i * (IDS // FIELDS), (i + 1) * (IDS // FIELDS)
        mine = slice(None) if options.tables == 1 else slice(low, high)
        for some, values in zip(keys[mine].split(65536), rows[mine].split(65536), strict=True):
            model.fields[f"field{i}"].table.assign(some, values)


def keys_of(batch: Batch) -> dict[str, torch.Tensor]:
    return by_table(batch[0])


torch.set_num_threads(options.threads)
if "SHOAL_ADDRESS" not in os.environ:  # alone, a process has as many cores as threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
worker = shoal.join()
model = ClickModel()
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
batches = torch.utils.data.DataLoader(Clicks(options.steps * worker.world_size), batch_size=None)
ahead = {"keys": keys_of, "prefetch": 1} if options.prefetch else {}
model, optimizer, batches = worker.prepare(model, optimizer, batches, **ahead)
if worker.rank == 0:
    bear_rows()
worker.barrier()
stamps = Stamps()
for ids, inputs, clicked in batches:
    optimizer.zero_grad()
    loss = loss_of(model(ids, inputs), clicked)
    loss.backward()
    optimizer.step()
    stamps.step()
worker.report(loss=loss)
assert worker.samples == BATCH * len(stamps.ends)
(options.out / f"{worker.rank}.json").write_text(json.dumps(stamps.ends))
