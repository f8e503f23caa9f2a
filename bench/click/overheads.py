"""What the ledger and rounds cost: the same steps with and without, taken in turn within one process.

Differences of a few per cent drown in the noise of separate runs. So one process trains two models on two
servers of their own, a step of one after a step of the other, and medians of their steps are compared.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from bench.click.model import DIM, LR, Batch, Clicks, Tower, loss_of
from bench.processes import Child, children
from bench.subject import missing_shoal

LEDGER = "E2E cost of the ledger, of a step"
ROUNDS = "E2E cost of bsp over asp, one process, of a step"
# Shown beside it: where a worker can die and its servers live on, a round's gradients wait for its end.
ROUNDS_SERVER = "E2E cost of bsp over asp, 1 worker + 1 server, of a step"
_WARM_STEPS = 8


class Overheads:
    name = "shoal"

    def missing(self) -> str | None:
        return missing_shoal()

    def percents(self, steps: int) -> dict[str, float]:
        with children([lambda: Child("shoal overheads", int)]) as [child]:
            return {
                LEDGER: child.call(compare, steps, True, ("asp", True), ("asp", False)),
                ROUNDS: child.call(compare, steps, False, ("bsp", True), ("asp", True)),
                ROUNDS_SERVER: child.call(compare, steps, True, ("bsp", True), ("asp", True)),
            }


def compare(_: int, steps: int, server: bool, *kinds: tuple[str, bool]) -> float:
    """By how many per cent a step of the first kind (sync word, with the ledger) is slower than the other."""
    with ExitStack() as stack:
        loops = [training(stack, server, word, ledger, steps) for word, ledger in kinds]
        times: list[list[float]] = [[] for _ in loops]
        for step in range(steps):
            # Each goes first every other time.
            for i in (0, 1) if step % 2 else (1, 0):
                begin = time.perf_counter()
                next(loops[i])
                times[i].append(time.perf_counter() - begin)
        first, second = (statistics.median(one[_WARM_STEPS:]) for one in times)
        return 100 * (first / second - 1)


def training(stack: ExitStack, server: bool, word: str, ledger: bool, steps: int) -> Iterator[None]:
    """Trains on a server of its own, or on an embedded store; each `next` is a step, its batch included."""
    import torch

    import shoal
    from shoal.collective.group import Lone
    from shoal.sync.words import as_policy
    from shoal.train.worker import Worker

    if server:
        client = stack.enter_context(shoal.LocalCluster(servers=1)).connect()
    else:
        client = shoal.connect("memory://")
    worker = stack.enter_context(
        Worker(client, as_policy(word), rank=0, world_size=1, group=Lone(), batch="each")
    )

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Most rows are not born yet when they are pulled: making other first values is no part of this.
            adagrad, zeros = shoal.optim.Adagrad(lr=LR), shoal.init.Zeros()
            self.rows = shoal.nn.Embedding("fields", dim=DIM, optimizer=adagrad, init=zeros)
            self.tower = Tower()

        def forward(self, ids: Any, inputs: Any) -> Any:
            return self.tower(self.rows(ids), inputs)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    worker.prepare(model, optimizer)
    batches: Any = torch.utils.data.DataLoader(Clicks(steps + 1), batch_size=None)
    batches = worker.prepare(batches, split=ledger)

    def loop() -> Iterator[None]:
        batch: Batch
        for batch in batches:
            ids, inputs, clicked = batch
            optimizer.zero_grad()
            loss_of(model(ids, inputs), clicked).backward()
            optimizer.step()
            yield

    return loop()
