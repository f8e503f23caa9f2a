"""torch.compile before and after `prepare`: the values of plain torch, and no compilation per batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.train.crew import run_workers
from tests.train.models import IDS, ShoalModel, TorchModel, dense_values, initial_rows, loader, steps
from torch._dynamo.testing import CompileCounterWithBackend

from shoal.checkpoint.export import export
from shoal.checkpoint.manifest import find, names
from shoal.checkpoint.place import Place
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


class Normed(ShoalModel):
    """With buffers, and a parameter that nobody steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5)
        self.frozen = torch.nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(torch.cat([self.emb(ids), x], dim=1))
        return self.out(self.norm(hidden) * self.frozen).squeeze(1)


def prepared(worker: Worker, how: str) -> tuple[Normed, Any, Any]:
    """A model that is plain, or compiled as a whole or in a part; in the loop it is called plainly."""
    model = Normed()
    dense_values(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    given: Any = model
    if how == "whole":
        given = torch.compile(model, backend="eager")
    if how == "part":
        model.linear = torch.compile(model.linear, backend="eager")  # type: ignore[assignment]
    _, _, batches = worker.prepare(given, optimizer, loader(16, 8, False))
    return model, optimizer, batches


def values(model: Normed) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): one.clone() for name, one in model.state_dict().items()}


@pytest.mark.parametrize(("saved", "loaded"), [("whole", "plain"), ("part", "plain"), ("plain", "whole")])
@pytest.mark.parametrize("word", ["bsp", "average:1", "hogwild"])
def test_a_model_that_is_saved_compiled_goes_on_plain_and_the_reverse(
    saved: str, loaded: str, word: str, tmp_path: Path
) -> None:
    url = str(tmp_path / "saved")

    def train(worker: Worker) -> dict[str, torch.Tensor]:
        model, optimizer, batches = prepared(worker, saved)
        torch.compiler.set_stance("force_eager")
        list(steps(model, optimizer, batches, 1))
        worker.barrier()
        if worker.rank == 0:
            worker.save(url)
        worker.barrier()
        return values(model)

    def go_on(worker: Worker) -> dict[str, torch.Tensor]:
        return values(prepared(worker, loaded)[0])

    try:
        trained = run_workers(2, train, word)[0]
    finally:
        torch.compiler.set_stance("default")
    place = Place(url)
    manifest = find(place, names(place)[-1])
    assert not any("_orig_mod" in entry.name for entry in manifest.tables)
    for taken in run_workers(2, go_on, word, resume=url):
        torch.testing.assert_close(taken, trained)
    export(place, manifest, tmp_path / "model.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), trained)


def test_workers_that_compile_train_with_those_that_do_not() -> None:
    def script(worker: Worker) -> list[str]:
        model, optimizer, batches = prepared(worker, "whole" if worker.rank else "plain")
        list(steps(model, optimizer, batches, 1))
        return list(model.state_dict())

    one, other = run_workers(2, script)
    assert one == other
    assert "linear.weight" in one


def test_the_state_dict_of_a_compiled_model_stays_that_of_torch() -> None:
    def script(worker: Worker) -> None:
        compiled: Any = torch.compile(ShoalModel(), backend="eager")
        before = [name for name, _ in compiled.named_parameters()]
        worker.prepare(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
        assert [name for name, _ in compiled.named_parameters()] == before
        assert "_orig_mod.linear.weight" in compiled.state_dict()

    run_workers(1, script)
