"""`shoal ckpt export`: what it writes is what `load_state_dict` of the same model takes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.train.crew import run_workers
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.checkpoint.export import export
from shoal.checkpoint.manifest import latest
from shoal.checkpoint.place import Place
from shoal.train.worker import Worker


class Mixed(torch.nn.Module):
    """Rows, dense parameters of several shapes, one that has two names, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = shoal.nn.Embedding("items", dim=4, init=shoal.init.Normal(0.5))
        self.norm = self.same = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Parameter(torch.randn(4, 2), requires_grad=False)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.first(self.norm(self.emb(ids)))))
        return (hidden @ self.frozen).sum(1) * self.scale


def output(model: Mixed) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12))


WORDS = ["bsp", "asp", "average:1", "hogwild", pytest.param("allreduce", marks=pytest.mark.gloo)]
ALONE = ["easgd:1", "downpour:3,3"]  # the job's model is not a worker's, if there are several


@pytest.mark.parametrize("word", [*WORDS, *ALONE])
def test_a_model_takes_what_was_exported(tmp_path: Path, word: str) -> None:
    def train(worker: Worker) -> torch.Tensor:
        torch.manual_seed(1)
        model = Mixed()
        optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
        data = DataLoader(TensorDataset(torch.arange(10)), batch_size=5)
        model, optimizer, batches = worker.prepare(model, optimizer, data)
        for (ids,) in batches:
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
        worker.barrier()
        if worker.rank == 0:
            worker.save(str(tmp_path / "saved"))
        worker.barrier()
        return output(model)

    def take(worker: Worker) -> torch.Tensor:
        torch.manual_seed(1 if word in ALONE else 2)  # a store of one's own has no frozen parameters
        model = Mixed()
        worker.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
        unlike = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=word not in ALONE)
        assert (unlike.missing_keys, unlike.unexpected_keys) == (["frozen"] if word in ALONE else [], [])
        return output(model)

    trained = run_workers(1 if word in ALONE else 2, train, word)[0]
    place = Place(str(tmp_path / "saved"))
    export(place, latest(place), tmp_path / "model.safetensors")
    shapes = {name: tuple(one.shape) for name, one in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["first.weight"] == shapes["second.weight"] == (4, 4)
    assert (shapes["scale"], shapes["emb.weight.values"], shapes["norm.running_mean"]) == ((), (10, 4), (4,))
    (taken,) = run_workers(1, take)
    torch.testing.assert_close(taken, trained, rtol=0, atol=1e-6)
