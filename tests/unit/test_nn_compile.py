"""torch.compile: the same values, and no compilation per batch."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import shoal
from shoal.nn import Embedding, EmbeddingBag, EmbeddingCollection

SGD = shoal.optim.SGD(lr=0.5)


class Model(torch.nn.Module):
    """A module alone, and two in a collection, under dense layers."""

    def __init__(self, client: shoal.Client) -> None:
        super().__init__()
        init = shoal.init.Uniform(1.0)
        self.first = Embedding("first", dim=4, init=init, padding_idx=0)
        fields = {
            "a": Embedding("a", dim=4, init=init),
            "b": EmbeddingBag("b", dim=4, mode="mean", init=init),
        }
        self.fields = EmbeddingCollection(fields)
        self.dense = torch.nn.Linear(12, 1)
        for module in (self.first, *fields.values()):
            module.bind(client, SGD)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        fields = self.fields({"a": ids, "b": (ids, offsets)})
        together = torch.cat([torch.relu(self.first(ids)), fields["a"], fields["b"]], 1)
        return self.dense(together).square()


def train(model: Model, forward: torch.nn.Module, sizes: list[int]) -> list[float]:
    """One step for each size of a batch; returns the losses."""
    random = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for size in sizes:
        ids = torch.randint(0, 20, (size,), generator=random)
        optimizer.zero_grad()
        loss = forward(ids, torch.arange(size)).mean()
        loss.backward()
        optimizer.step()
        for module in (model.first, model.fields["a"], model.fields["b"]):
            module.table.push(*module.gradients())
        losses.append(loss.item())
    return losses


@pytest.fixture
def client() -> Iterator[shoal.Client]:
    with shoal.connect("memory://") as client:
        yield client


# What torch.compile itself does to the outputs of any module that breaks the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_to_the_same_values(client: shoal.Client, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    plain = Model(client)
    with shoal.connect("memory://") as other:
        compiled = Model(other)
        compiled.dense.load_state_dict(plain.dense.state_dict())
        counter = CompileCounterWithBackend(backend)
        forward = torch.compile(compiled, backend=counter)
        first, rest = [6, 6, 4, 5], [6, 3, 7, 7, 6, 9, 6, 5]
        losses = train(compiled, forward, first)
        after_warmup = counter.frame_count
        losses += train(compiled, forward, rest)
        assert after_warmup > 0
        assert counter.frame_count == after_warmup
        assert losses == pytest.approx(train(plain, plain, first) + train(plain, plain, rest), rel=1e-5)
        ids = torch.arange(20)
        torch.testing.assert_close(compiled.first(ids), plain.first(ids))
