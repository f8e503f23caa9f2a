"""Binding, copies, state dicts and offers of modules; and what they refuse."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import shoal
from shoal.errors import BadInput, Closed, Mismatch, Unbound
from shoal.nn import Embedding, EmbeddingBag, TableModule, table_modules

SGD = shoal.optim.SGD(lr=1.0)
IDS = torch.tensor([3, -1, 3])


@pytest.fixture
def client() -> Iterator[shoal.Client]:
    with shoal.connect("memory://") as client:
        yield client


@pytest.fixture
def emb(client: shoal.Client) -> Embedding:
    module = Embedding("items", dim=2, optimizer=SGD, init=shoal.init.Uniform(1.0))
    module.bind(client)
    return module


def new(client: shoal.Client, name: str, **settings: object) -> Embedding:
    module = Embedding(name, dim=2, optimizer=SGD, **settings)
    module.bind(client)
    return module


# Binding


@pytest.mark.parametrize("module", [Embedding("items", dim=2), EmbeddingBag("items", dim=2)])
def test_forward_before_binding_names_both_ways(module: TableModule) -> None:
    assert not module.bound
    with pytest.raises(Unbound, match=r"'items'.*worker.prepare\(\.\.\.\).*module.bind\(client\)"):
        module(torch.tensor([[1]]))
    with pytest.raises(Unbound, match="'items'"):
        _ = module.client


def test_bind_opens_the_table_with_the_settings_of_the_module(client: shoal.Client) -> None:
    module = Embedding("t", dim=3, init=shoal.init.Constant(0.5), seed=7, wire="fp16", optimizer=SGD)
    module.bind(client)
    assert (module.table.dim, module.table.seed, module.table.wire) == (3, 7, "fp16")
    assert module.table.init == shoal.init.Constant(0.5)
    assert module.client is client


def test_the_optimizer_of_the_module_comes_first(client: shoal.Client) -> None:
    given = shoal.optim.Adagrad(lr=0.5)
    own, without = Embedding("own", dim=2, optimizer=SGD), Embedding("given", dim=2)
    for module in (own, without):
        module.bind(client, given)
    assert (own.table.optimizer, without.table.optimizer) == (SGD, given)


def test_no_optimizer_at_all_is_an_error_that_names_the_table(client: shoal.Client) -> None:
    with pytest.raises(BadInput, match=r"table 'items': no optimizer\. .*optimizer="):
        Embedding("items", dim=2).bind(client)


def test_modules_of_one_name_share_the_table(client: shoal.Client, emb: Embedding) -> None:
    other = EmbeddingBag("items", dim=2, mode="sum")
    other.bind(client, SGD)
    emb.table.assign([3], [[1.0, 2.0]])
    assert other(torch.tensor([[3]])).tolist() == [[1, 2]]


def test_modules_of_one_name_and_different_dim_are_told_apart_by_an_error(
    client: shoal.Client, emb: Embedding
) -> None:
    with pytest.raises(Mismatch, match=r"table 'items' .*dim is 2, asked for 5"):
        Embedding("items", dim=5, optimizer=SGD).bind(client)


def test_binding_again_is_harmless_and_may_change_the_store(client: shoal.Client, emb: Embedding) -> None:
    emb.bind(client)
    with shoal.connect("memory://") as other:
        emb.bind(other)
        emb.table.assign([3], [[9.0, 9.0]])
    assert client.table("items").stats()["rows"] == 0
    with pytest.raises(Closed):
        emb(IDS)


def test_table_modules_are_found_in_order(client: shoal.Client) -> None:
    one = Embedding("a", dim=2)
    model = torch.nn.ModuleDict(
        {"x": one, "y": torch.nn.Linear(2, 2), "z": EmbeddingBag("a", dim=2), "w": one}
    )
    assert [name for name, _ in table_modules(model)] == ["x", "z"]


def test_repr_says_what_it_is(emb: Embedding) -> None:
    assert repr(emb) == "Embedding('items', dim=2, optimizer=SGD(lr=1.0), bound)"
    bag = EmbeddingBag("b", dim=2, mode="max", padding_idx=-1)
    assert repr(bag) == "EmbeddingBag('b', dim=2, padding_idx=-1, not bound, mode='max')"


# What is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dim": 0}, "dim is 0; allowed: a whole number from 1"),
        ({"dim": True}, "dim is True"),
        ({"optimizer": torch.optim.SGD}, "optimizer is .*; allowed: an object of shoal.optim"),
        ({"init": 0.1}, "init is 0.1; allowed: an object of shoal.init"),
        ({"seed": -1}, "seed is -1"),
        ({"wire": "fp8"}, "wire is 'fp8'; allowed: fp32, fp16, bf16, int8"),
        ({"padding_idx": 0.5}, "padding_idx is 0.5"),
        ({"padding_idx": 2**63}, "padding_idx is"),
        ({"name": ""}, "name is ''"),
        ({"mode": "min"}, "mode is 'min'; allowed: sum, mean, max, sqrtn"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        EmbeddingBag(**{"name": "items", "dim": 2, **settings})


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16), [1, 2]]
)
def test_ids_that_are_no_ids(emb: Embedding, ids: object) -> None:
    with pytest.raises(BadInput, match=r"table 'items': (keys|ids) are .*; allowed: "):
        emb(ids)


ONE = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((ONE,), r"ids of shape \(3,\) without offsets; allowed: \(B, L\) without"),
        ((ONE.reshape(1, 3), torch.tensor([0])), r"ids of shape \(1, 3\) with offsets"),
        ((torch.tensor(1), torch.tensor([0])), r"ids of shape \(\) with"),
        ((ONE, [0]), "offsets are list; allowed: a tensor of int64 or int32"),
        ((ONE, torch.tensor([0.0])), "offsets are torch.float32"),
        ((ONE, torch.tensor([[0]])), r"offsets have shape \(1, 1\); they must be one-dimensional"),
        ((ONE, torch.tensor([1, 2])), r"offsets are \[1, 2\] for 3 ids; they must begin with 0"),
        ((ONE, torch.tensor([0, 2, 1])), "not fall"),
        ((ONE, torch.tensor([0] * 9 + [4])), r"offsets are \[0, 0, 0, 0, 0, 0, 0, 0, \.\.\.\] for 3 ids"),
        ((ONE, torch.tensor([0]), torch.ones(2)), r"per_sample_weights have shape \(2,\); expected .*\(3,\)"),
        ((ONE, torch.tensor([0]), torch.ones(3).double()), "per_sample_weights are torch.float64; expected"),
    ],
)
def test_bags_that_are_no_bags(client: shoal.Client, inputs: tuple, said: str) -> None:
    bag = EmbeddingBag("bags", dim=2, mode="sum", optimizer=SGD)
    bag.bind(client)
    with pytest.raises(BadInput, match=rf"table 'bags': .*{said}"):
        bag(*inputs)


def test_the_end_of_the_last_bag_is_asked_for(client: shoal.Client) -> None:
    bag = EmbeddingBag("bags", dim=2, include_last_offset=True, optimizer=SGD)
    bag.bind(client)
    with pytest.raises(BadInput, match="with at least one entry"):
        bag(ONE, torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("mode", ["mean", "max", "sqrtn"])
def test_weights_are_for_sums(client: shoal.Client, mode: str) -> None:
    bag = EmbeddingBag("bags", dim=2, mode=mode, optimizer=SGD)
    bag.bind(client)
    with pytest.raises(BadInput, match=f"per_sample_weights with mode '{mode}'; they are for mode 'sum'"):
        bag(ONE, torch.tensor([0]), torch.ones(3))


# Copies


def through_a_file(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), through_a_file],  # noqa: S301
)
def test_a_copy_keeps_the_name_and_loses_the_binding(client: shoal.Client, duplicate: Callable) -> None:
    model = torch.nn.Sequential(new(client, "items", padding_idx=3), torch.nn.Linear(2, 1))
    model(IDS).sum().backward()
    model[0].offer(IDS, torch.ones(3, 2))
    copied = duplicate(model)[0]
    assert (copied.table_name, copied.dim, copied.padding_idx, copied.optimizer) == ("items", 2, 3, SGD)
    assert not copied.bound
    assert model[0].bound
    copied.bind(client)
    copied.table.assign([-1], [[4.0, 5.0]])
    assert copied(IDS).tolist() == [[0, 0], [4, 5], [0, 0]]


# State


def test_state_holds_keys_and_values(emb: Embedding) -> None:
    emb.table.assign([5, -2], [[1.0, 2.0], [3.0, 4.0]])
    state = torch.nn.Sequential(emb).state_dict()
    assert {name: value.tolist() for name, value in state.items()} == {
        "0.weight.keys": [-2, 5],
        "0.weight.values": [[3, 4], [1, 2]],
    }


def test_state_of_an_empty_table(emb: Embedding) -> None:
    state = emb.state_dict()
    assert [tuple(value.shape) for value in state.values()] == [(0,), (0, 2)]
    emb.load_state_dict(state)


def test_state_of_an_unbound_module_is_the_handle() -> None:
    state = Embedding("items", dim=2).state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {"weight": (0, 2)}
    Embedding("items", dim=2).load_state_dict(state)


def test_state_goes_to_another_store(emb: Embedding) -> None:
    keys = torch.arange(-70_000, 70_000)
    emb.table.assign(keys, torch.randn(len(keys), 2))
    with shoal.connect("memory://") as other:
        copied = copy.deepcopy(emb)
        copied.bind(other)
        copied.load_state_dict(emb.state_dict())
        assert len(copied.table) == len(keys)
        assert torch.equal(copied(keys), emb(keys))


def test_a_table_too_large_for_a_state_dict_names_the_other_way(emb: Embedding) -> None:
    emb.table.assign([1, 2, 3], torch.ones(3, 2))
    assert emb.state_dict_rows_max == 1_000_000
    emb.state_dict_rows_max = 3
    emb.state_dict()
    emb.state_dict_rows_max = 2
    with pytest.raises(BadInput, match=r"table 'items' has 3 rows; .* up to 2 .*worker.save\(url\)"):
        emb.state_dict()


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_weights_of_torch_are_rows_from_0_on(client: shoal.Client, kind: type) -> None:
    theirs = kind(4, 2, padding_idx=1)
    ours = new(client, "items", padding_idx=1)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(ours(torch.arange(4)), theirs.weight)
    assert len(ours.table) == 3  # the padding is never born


def test_rows_of_half_precision_load(emb: Embedding) -> None:
    emb.load_state_dict({"weight": torch.ones(2, 2, dtype=torch.bfloat16)})
    assert emb(torch.tensor([1])).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, r"Missing key\(s\).*weight.keys.*weight.values"),
        ({"weight.keys": torch.arange(2)}, r"Missing key\(s\).*\"weight.values\""),
        ({"weight": torch.ones(2, 2), "more": torch.ones(1)}, r"Unexpected key\(s\).*\"more\""),
        (
            {"weight": torch.ones(0, 2), "weight.keys": torch.arange(0), "weight.values": torch.ones(0, 2)},
            r"Unexpected key\(s\).*\"weight\"",
        ),
        ({"weight": torch.ones(2, 3)}, r"size mismatch for weight: .*\(2, 3\); expected .*\(N, 2\)"),
        ({"weight": torch.ones(())}, "size mismatch for weight"),
        ({"weight.keys": torch.ones(2), "weight.values": torch.ones(2, 2)}, "keys are torch.float32"),
    ],
)
def test_states_that_do_not_fit_fail_as_in_torch(emb: Embedding, state: dict, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        emb.load_state_dict(state)


def test_a_load_that_is_not_strict_says_what_it_left(emb: Embedding) -> None:
    result = emb.load_state_dict({"weight.keys": torch.arange(2), "more": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["weight.values"], ["more"])


def test_rows_for_an_unbound_module_name_the_ways_to_bind() -> None:
    with pytest.raises(
        RuntimeError, match=r"2 rows .*worker.prepare\(\.\.\.\), or after module.bind\(client\)"
    ):
        Embedding("items", dim=2).load_state_dict({"weight": torch.ones(2, 2)})


def test_hooks_before_a_load_are_called(emb: Embedding) -> None:
    emb.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(weight=state.pop("old")))
    emb.load_state_dict({"old": torch.ones(1, 2)})
    assert emb(torch.tensor([0])).tolist() == [[1, 1]]


# Offers


def pulls(emb: Embedding) -> int:
    return emb.table.stats()["pulls"]


@pytest.mark.parametrize("keys", [[3, -1, 3], [-1, 3], [3, -1], [9, 3, 4, -1]])
def test_offered_rows_are_used_instead_of_a_pull(emb: Embedding, keys: list[int]) -> None:
    before = pulls(emb)
    emb.offer(keys, np.array([[key, 10 * key] for key in keys], np.float32))
    output = emb(IDS)
    assert output.tolist() == [[3, 30], [-1, -10], [3, 30]]
    assert pulls(emb) == before
    output.sum().backward()
    assert emb.gradients()[0].tolist() == [3, -1, 3]


@pytest.mark.parametrize("keys", [[], [3], [3, 4], [-1, 2]])
def test_an_offer_that_lacks_an_id_is_no_use(emb: Embedding, keys: list[int]) -> None:
    expected = emb(IDS)
    emb.offer(keys, np.ones((len(keys), 2), np.float32))
    assert torch.equal(emb(IDS), expected)


def test_an_offer_is_for_one_forward(emb: Embedding) -> None:
    expected = emb(IDS)
    emb.offer(IDS, torch.ones(3, 2))
    assert emb(IDS).tolist() == [[1, 1]] * 3
    assert torch.equal(emb(IDS), expected)
    emb.offer([3], torch.ones(1, 2))
    assert torch.equal(emb(IDS), expected)
    assert torch.equal(emb(torch.tensor([3])), expected[:1])


def test_an_offer_need_not_hold_padding(client: shoal.Client) -> None:
    emb = new(client, "padded", padding_idx=-1)
    emb.offer([3], torch.ones(1, 2))
    assert emb(IDS).tolist() == [[1, 1], [0, 0], [1, 1]]


def test_offers_serve_bags_and_nothing(client: shoal.Client) -> None:
    bag = EmbeddingBag("bags", dim=2, mode="sum", optimizer=SGD)
    bag.bind(client)
    bag.offer(torch.tensor([[3, -1]]), torch.ones(1, 2, 2))
    assert bag(IDS, torch.tensor([0, 2])).tolist() == [[2, 2], [1, 1]]
    bag.offer([], np.empty((0, 2), np.float32))
    assert bag(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 2)
    bag.offer([1], np.ones((1, 2), np.float32))
    assert bag(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 2)


def test_rows_that_cannot_be_written_are_copied(emb: Embedding) -> None:
    rows = np.ones((3, 2), np.float32)
    rows.flags.writeable = False
    emb.offer(IDS, rows)
    emb(IDS).detach().zero_()
    assert rows.all()


def test_an_offer_of_the_wrong_shape_is_refused(emb: Embedding) -> None:
    with pytest.raises(BadInput, match=r"table 'items': rows have shape \(1, 2\); expected \(3, 2\)"):
        emb.offer(IDS, torch.ones(1, 2))
