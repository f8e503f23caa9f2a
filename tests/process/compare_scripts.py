"""What the jobs of test_compare_jobs.py run: `compare_scripts.py CASE`."""

import os
import sys
import time
from pathlib import Path

from shoal.sync import parse
from shoal.sync.plain import to_plain
from shoal.train.environment import WorkerEnvironment, read_worker_environment
from shoal.train.history import Moment, open_history, write_moment
from shoal.train.progress import ProgressReport


def join(sync: str | None = None) -> tuple[WorkerEnvironment, ProgressReport]:
    """What `shoal.join()` does as far as a supervisor sees it; needs no torch."""
    here = read_worker_environment()
    policy = parse(sync or here.sync or "bsp")
    return here, ProgressReport(here.job, rank=here.rank, policy=to_plain(policy))


def silent() -> None:
    join()


def pretend() -> None:
    """A history as a job would leave it; the loss is that of the seed."""
    here, _ = join()
    if here.sync == "asp":
        raise ValueError("only this one fails")
    assert here.job is not None
    history = open_history(here.job, here.rank)
    for step in range(3):
        metrics = {"loss": 1.0 / (step + 1) + (here.seed or 0), "auc": 0.5}
        write_moment(history, Moment(time=time.time(), steps=step, samples=step, metrics=metrics))


def own() -> None:
    join("ssp:2")


def broken() -> None:
    join()
    raise ValueError("a mistake in the script")


def stay() -> None:
    here, _ = join()
    assert here.job is not None
    write_moment(open_history(here.job, here.rank), Moment(time=time.time(), metrics={"loss": 0.5}))
    Path(here.job, f"ready-{here.rank}").write_text(str(os.getpid()))
    time.sleep(120)


def train(seed: str) -> None:
    """A real one: 24 steps under bsp."""
    import torch

    import shoal

    worker = shoal.join()
    assert worker.seed == int(seed)
    torch.manual_seed(worker.seed)
    x = torch.randn(96, 4)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=8)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, batches = worker.prepare(model, optimizer, batches)
    for _ in worker.epochs(2):
        for inputs, wanted in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), wanted)
            loss.backward()
            optimizer.step()
            worker.report(loss=loss)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
