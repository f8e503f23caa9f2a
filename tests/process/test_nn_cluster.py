"""Modules on real servers, with rows in shared memory or through a socket, train as torch's do."""

import pytest
import torch

import shoal
from shoal.nn import Embedding, EmbeddingBag, EmbeddingCollection

pytestmark = pytest.mark.process
ROWS, DIM, LR = 50, 8, 0.1


def model_of(first: torch.nn.Module, second: torch.nn.Module) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"user": first, "tags": second})


def loss_of(user: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    return (torch.relu_(user) * tags).sum(1).sub(1).square().mean()


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_tables_on_servers_train_as_torch_does(lane: str) -> None:
    theirs = model_of(torch.nn.Embedding(ROWS, DIM), torch.nn.EmbeddingBag(ROWS, DIM, mode="mean"))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR)
    sgd = shoal.optim.SGD(lr=LR)
    ours = EmbeddingCollection(
        {"user": Embedding("users", DIM), "tags": EmbeddingBag("tags", DIM, mode="mean")}
    )
    with shoal.LocalCluster(servers=2) as cluster, cluster.connect(lane=lane) as client:
        ours.bind(client, sgd)
        ours.load_state_dict(theirs.state_dict())
        for _ in range(20):
            users, tags = torch.randint(0, ROWS, (16,)), torch.randint(0, ROWS, (16, 5))
            optimizer.zero_grad()
            loss_of(theirs["user"](users), theirs["tags"](tags)).backward()
            optimizer.step()
            ours.zero_grad()
            loss_of(**ours({"user": users, "tags": tags})).backward()
            for name in ours:
                ours[name].table.push(*ours[name].gradients())
        state = ours.state_dict()
    for name, module in theirs.items():
        torch.testing.assert_close(state[f"{name}.weight.values"], module.weight.data, rtol=1e-4, atol=1e-6)
