"""torch.compile before and after `prepare`: the values of plain torch, and no compilation per batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.crew import run_workers
from tests.train.models import IDS, ShoalModel, TorchModel, dense_values, initial_rows, loader, steps
from torch._dynamo.testing import CompileCounterWithBackend

from shoal.train.worker import Worker

EPOCHS, SAMPLES, BATCH = 3, 46, 8  # the last batch is smaller


def plain() -> list[torch.Tensor]:
    model = TorchModel(initial_rows())
    dense_values(model)
    list(steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(SAMPLES, BATCH, False), EPOCHS))
    return [model.emb.weight.detach(), *(p.detach() for p in model.parameters() if p.shape[0] != IDS)]


# What torch.compile itself does to the outputs of any module that breaks the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("first", ["compile", "prepare"])
def test_a_compiled_model_trains_as_in_plain_torch(first: str) -> None:
    torch.compile(TorchModel(initial_rows()), backend="eager")(*next(iter(loader(4, 4, False)))[:2])
    torch._dynamo.reset()  # what the first compilation of a process takes is in nobody's deadline
    counter = CompileCounterWithBackend("eager")

    def script(worker: Worker) -> tuple[list[torch.Tensor], set[int]]:
        model: Any = ShoalModel()
        dense_values(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = torch.compile(model, backend=counter)
        prepared, optimizer, batches = worker.prepare(
            forward if first == "compile" else model, optimizer, loader(SAMPLES, BATCH, False)
        )
        assert prepared is (forward if first == "compile" else model)
        frames = [counter.frame_count for _ in steps(forward, optimizer, batches, EPOCHS)]
        worker.barrier()
        rows = torch.from_numpy(model.emb.table.pull(list(range(IDS))).copy())
        values = [rows, *(p.detach() for p in model.parameters() if p.numel())]
        return values, set(frames[len(frames) // EPOCHS :])

    (one, frames), (other, frames_there) = run_workers(2, script)
    torch.testing.assert_close(one, plain(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(other, one)
    assert 0 not in frames
    assert len(frames | frames_there) == 1  # none after the first epoch
