"""Collections, and several tables at once in the store."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import shoal
from shoal.errors import BadInput, Unbound
from shoal.nn import Embedding, EmbeddingBag, EmbeddingCollection
from shoal.store.many import pull_many, push_many

SGD = shoal.optim.SGD(lr=1.0)
IDS = torch.tensor([3, -1, 3])
OFFSETS = torch.tensor([0, 2])


@pytest.fixture
def client() -> Iterator[shoal.Client]:
    with shoal.connect("memory://") as client:
        yield client


@pytest.fixture
def both(client: shoal.Client) -> EmbeddingCollection:
    init = shoal.init.Uniform(1.0)
    modules = {
        "user": Embedding("users", dim=2, init=init),
        "items": EmbeddingBag("items", dim=3, mode="sum", init=init),
    }
    collection = EmbeddingCollection(modules)
    collection.bind(client, SGD)
    return collection


def test_vectors_are_those_of_the_modules(both: EmbeddingCollection) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    output = both({"user": IDS, "items": (IDS, OFFSETS, weights)})
    assert list(output) == ["user", "items"]
    assert torch.equal(output["user"], both["user"](IDS))
    assert torch.equal(output["items"], both["items"](IDS, OFFSETS, weights))
    assert torch.equal(both({"items": IDS.reshape(1, 3)})["items"], both["items"](IDS.reshape(1, 3)))
    assert both({}) == {}


def test_gradients_reach_each_table(both: EmbeddingCollection) -> None:
    output = both({"user": IDS, "items": (IDS, OFFSETS)})
    (output["user"].sum() + 2 * output["items"].sum()).backward()
    assert both["user"].gradients()[1].tolist() == [[1, 1]] * 3
    assert both["items"].gradients()[1].tolist() == [[2, 2, 2]] * 3


def test_outputs_may_be_used_one_by_one(both: EmbeddingCollection) -> None:
    output = both({"user": IDS, "items": (IDS, OFFSETS)})
    output["user"].sum().backward()
    assert both["items"].gradients() is None
    output["items"].sum().backward()
    assert len(both["user"].gradients()[0]) == len(both["items"].gradients()[0]) == 3


def test_a_frozen_table_stays_so_in_a_collection(both: EmbeddingCollection) -> None:
    both["user"].requires_grad_(False)
    output = both({"user": IDS, "items": (IDS, OFFSETS)})
    assert [vectors.requires_grad for vectors in output.values()] == [False, True]


def test_one_table_under_two_names(client: shoal.Client) -> None:
    one, two = Embedding("t", dim=2), Embedding("t", dim=2)
    both = EmbeddingCollection({"one": one, "two": two})
    both.bind(client, SGD)
    sum(vectors.sum() for vectors in both({"one": IDS, "two": IDS[:1]}).values()).backward()
    assert (len(one.gradients()[0]), len(two.gradients()[0])) == (3, 1)


def test_offers_are_used_in_a_collection(both: EmbeddingCollection) -> None:
    both["user"].offer([3, -1], torch.ones(2, 2))
    output = both({"user": IDS, "items": (IDS, OFFSETS)})
    assert output["user"].tolist() == [[1, 1]] * 3
    assert both["user"].table.stats()["pulls"] == 0


def test_parameters_and_state_are_called_as_the_modules(both: EmbeddingCollection) -> None:
    assert [name for name, _ in both.named_parameters()] == ["user.weight", "items.weight"]
    both["items"].table.assign([1], np.ones((1, 3), np.float32))
    state = both.state_dict()
    assert sorted(state) == [
        "items.weight.keys",
        "items.weight.values",
        "user.weight.keys",
        "user.weight.values",
    ]
    both.load_state_dict(state)


def test_a_collection_reads_as_a_dict(both: EmbeddingCollection) -> None:
    assert list(both) == ["user", "items"]
    assert len(both) == 2
    assert "user" in both


@pytest.mark.parametrize("name", ["type", "items", "forward"])
def test_any_name_of_a_field_will_do(client: shoal.Client, name: str) -> None:
    collection = EmbeddingCollection({name: Embedding("t", dim=2)})
    collection.bind(client, SGD)
    assert collection({name: IDS})[name].shape == (3, 2)


def test_what_a_collection_refuses(both: EmbeddingCollection) -> None:
    with pytest.raises(BadInput, match="no 'film' in the collection; it has: 'user', 'items'"):
        both({"film": IDS})
    with pytest.raises(BadInput, match=r"name in the collection is 'a\.b'"):
        EmbeddingCollection({"a.b": Embedding("t", dim=2)})
    with pytest.raises(BadInput, match=r"'a' in the collection is a Embedding; allowed: shoal.nn"):
        EmbeddingCollection({"a": torch.nn.Embedding(2, 2)})
    with pytest.raises(Unbound, match="'t'"):
        EmbeddingCollection({"a": Embedding("t", dim=2)})({"a": IDS})


def test_tables_of_two_clients_cannot_be_pulled_at_once(both: EmbeddingCollection) -> None:
    with shoal.connect("memory://") as other:
        both["items"].bind(other, SGD)
        with pytest.raises(BadInput, match=r"tables 'items' were opened by another client than <Client"):
            both({"user": IDS, "items": (IDS, OFFSETS)})


def test_many_tables_are_pulled_and_pushed_in_order(client: shoal.Client) -> None:
    one, two = (client.table(name, dim=dim, optimizer=SGD) for name, dim in (("a", 1), ("b", 2)))
    grads = np.ones((2, 1), np.float32), np.ones((1, 2), np.float32)
    push_many(client, [(one, [1, 1], grads[0], None), (two, [2], grads[1], 0.5)], step=3)
    rows = pull_many(client, [(two, torch.tensor([2])), (one, [1]), (one, [7])])
    assert [row.tolist() for row in rows] == [[[-0.5, -0.5]], [[-2]], [[0]]]
    assert isinstance(rows[0], torch.Tensor)
    assert pull_many(client, []) == []
