"""Embedding and EmbeddingBag give what torch's modules give on the same values, forward and backward."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.nn import Embedding, EmbeddingBag, TableModule

SGD = shoal.optim.SGD(lr=1.0)
# Where torch has row i, the table has the key POOL[i]: near zero, negative, and at both ends of int64.
POOL = torch.tensor([0, 1, 2, -1, -7, 2**31 - 1, -(2**31), 2**62 + 3, 2**63 - 1, -(2**63)])
SMALL = POOL[:7]
DIM = 3
PADDING = 2  # an index of the pool
EXACT = settings(max_examples=60, deadline=None)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def client() -> Iterator[shoal.Client]:
    with shoal.connect("memory://") as client:
        client.table("pool", dim=DIM, optimizer=SGD).assign(POOL, weights())
        yield client


def weights() -> torch.Tensor:
    return torch.randn(len(POOL), DIM, generator=torch.Generator().manual_seed(1))


def bound(client: shoal.Client, kind: type[TableModule], padded: bool, **settings: object) -> TableModule:
    module = kind("pool", DIM, padding_idx=int(POOL[PADDING]) if padded else None, **settings)
    module.bind(client, SGD)
    return module


def reference(kind: type[torch.nn.Module], padded: bool, **settings: object) -> torch.nn.Module:
    module = kind(len(POOL), DIM, padding_idx=PADDING if padded else None, **settings)
    with torch.no_grad():
        module.weight.copy_(weights())
        if padded:
            module.weight[PADDING] = 0
    return module


def merged(module: TableModule) -> torch.Tensor:
    """The recorded gradients as torch would have them: a row for each of the pool."""
    result = np.zeros((len(POOL), DIM), np.float32)
    recorded = module.gradients()
    if recorded is not None:
        keys, grads = recorded
        assert keys.dtype == np.int64
        assert grads.dtype == np.float32
        assert grads.flags.c_contiguous
        assert grads.shape == (len(keys), DIM)
        assert module.padding_idx not in keys.tolist()
        np.add.at(result, [POOL.tolist().index(key) for key in keys.tolist()], grads)
    return torch.from_numpy(result)


def check(module: TableModule, torchs: torch.nn.Module, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, **CLOSE)
    slope = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    module.zero_grad()
    for output in (ours, theirs):
        (output * slope).sum().backward()
    expected = torch.zeros(len(POOL), DIM) if torchs.weight.grad is None else torchs.weight.grad
    torch.testing.assert_close(merged(module), expected, **CLOSE)


def indices(shape: tuple[int, ...], of: int = len(POOL)) -> st.SearchStrategy[torch.Tensor]:
    count = int(np.prod(shape))
    numbers = st.lists(st.integers(0, of - 1), min_size=count, max_size=count)
    return numbers.map(lambda flat: torch.tensor(flat, dtype=torch.int64).reshape(shape))


@EXACT
@given(st.data(), st.lists(st.integers(0, 4), max_size=3), st.booleans(), st.booleans())
def test_embedding(
    client: shoal.Client, data: st.DataObject, shape: list[int], narrow: bool, padded: bool
) -> None:
    places = data.draw(indices(tuple(shape), len(SMALL) if narrow else len(POOL)))
    ids = SMALL.int()[places] if narrow else POOL[places]
    ours, theirs = bound(client, Embedding, padded), reference(torch.nn.Embedding, padded)
    check(ours, theirs, ours(ids), theirs(places))


@st.composite
def bags(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Indices, offsets (None for indices of two dimensions), and whether the last offset is the end."""
    if draw(st.booleans()):
        # Bags of no ids at all are refused by torch in this form, and zeros here.
        return draw(indices((draw(st.integers(0, 4)), draw(st.integers(1, 4))))), None, False
    lengths = draw(st.lists(st.integers(0, 4), max_size=6))
    last = draw(st.booleans())
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int64)
    return draw(indices((sum(lengths),))), ends if last else ends[:-1], last


@EXACT
@given(bags(), st.sampled_from(["sum", "mean", "max"]), st.booleans(), st.booleans())
def test_bags(
    client: shoal.Client,
    drawn: tuple[torch.Tensor, torch.Tensor | None, bool],
    mode: str,
    padded: bool,
    weighted: bool,
) -> None:
    places, offsets, last = drawn
    weighted = weighted and mode == "sum"
    ours = bound(client, EmbeddingBag, padded, mode=mode, include_last_offset=last)
    theirs = reference(torch.nn.EmbeddingBag, padded, mode=mode, include_last_offset=last)
    by = [torch.linspace(-1, 2, places.numel()).reshape(places.shape).requires_grad_() for _ in range(2)]
    given = [(offsets, by[i]) if weighted else (offsets,) for i in range(2)]
    check(ours, theirs, ours(POOL[places], *given[0]), theirs(places, *given[1]))
    if weighted:
        torch.testing.assert_close(by[0].grad, by[1].grad, **CLOSE)


@EXACT
@given(bags(), st.booleans())
def test_sqrtn_is_the_sum_over_the_root_of_the_size(
    client: shoal.Client, drawn: tuple[torch.Tensor, torch.Tensor | None, bool], padded: bool
) -> None:
    places, offsets, last = drawn
    ours = bound(client, EmbeddingBag, padded, mode="sqrtn", include_last_offset=last)
    theirs = reference(torch.nn.EmbeddingBag, padded, mode="sum", include_last_offset=last)
    ends = torch.arange(len(places) + 1) * places.shape[1] if offsets is None else offsets
    if offsets is not None and not last:
        ends = torch.cat([offsets, torch.tensor([len(places)])])
    real = places.reshape(-1) != (PADDING if padded else -1)
    sizes = [int(real[start:end].sum()) for start, end in itertools.pairwise(ends.tolist())]
    roots = torch.tensor(sizes, dtype=torch.float32).reshape(-1, 1).clamp(min=1).sqrt()
    check(ours, theirs, ours(POOL[places], offsets), theirs(places, offsets) / roots)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "sqrtn"])
def test_bags_without_ids_are_zeros(client: shoal.Client, mode: str) -> None:
    bag = bound(client, EmbeddingBag, False, mode=mode)
    assert bag(torch.empty(3, 0, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 3
    assert (
        bag(torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).tolist()
        == [[0.0] * DIM] * 2
    )


def test_ids_after_the_last_offset_are_ignored(client: shoal.Client) -> None:
    ours = bound(client, EmbeddingBag, False, mode="sum", include_last_offset=True)
    theirs = reference(torch.nn.EmbeddingBag, False, mode="sum", include_last_offset=True)
    places, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    torch.testing.assert_close(ours(POOL[places], offsets), theirs(places, offsets))
    ours(POOL[places], offsets).sum().backward()
    assert ours.gradients()[0].tolist() == [1, 2]


def test_unsigned_ids_are_the_same_bits(client: shoal.Client) -> None:
    emb = bound(client, Embedding, False)
    assert torch.equal(emb(torch.tensor([-1]).view(torch.uint64)), emb(torch.tensor([-1])))


def test_offsets_may_be_narrow(client: shoal.Client) -> None:
    bag = bound(client, EmbeddingBag, False, mode="sum")
    ids = POOL[:4]
    assert torch.equal(bag(ids, torch.tensor([0, 2], dtype=torch.int32)), bag(ids, torch.tensor([0, 2])))


def test_ids_need_not_be_contiguous(client: shoal.Client) -> None:
    ids = POOL[:6].reshape(2, 3).T
    emb, bag = bound(client, Embedding, True), bound(client, EmbeddingBag, True, mode="sum")
    assert torch.equal(emb(ids), emb(ids.contiguous()))
    assert torch.equal(bag(ids), bag(ids.contiguous()))


def test_a_backward_of_a_bag_may_be_repeated(client: shoal.Client) -> None:
    bag = bound(client, EmbeddingBag, False, mode="sum")
    output = bag(POOL[:4].reshape(2, 2)).sum()
    output.backward(retain_graph=True)
    once = merged(bag)
    (3 * output).backward()
    torch.testing.assert_close(merged(bag), 4 * once)


def test_the_gradient_of_weights_has_a_gradient(client: shoal.Client) -> None:
    bag = bound(client, EmbeddingBag, False, mode="sum")
    by = torch.ones(4, 1).requires_grad_()

    def slope(weights: torch.Tensor) -> torch.Tensor:
        squares = bag(POOL[:4].reshape(4, 1), None, weights).square().sum()
        return torch.autograd.grad(squares, weights, create_graph=True)[0]

    (second,) = torch.autograd.grad(slope(by).sum(), by)
    torch.testing.assert_close(second, 2 * bag(POOL[:4].reshape(4, 1)).square().sum(1, keepdim=True))


def test_rows_begin_as_torchs_embeddings_do(client: shoal.Client) -> None:
    def begins(name: str, optimizer: shoal.optim.Optimizer = SGD) -> torch.Tensor:
        emb = Embedding(name, 8, optimizer=optimizer)
        emb.bind(client)
        with torch.no_grad():
            return emb(torch.arange(5000))

    theirs, ours = torch.nn.Embedding(5000, 8).weight, begins("new")
    torch.testing.assert_close(ours.mean(), theirs.mean(), rtol=0.0, atol=0.03)
    torch.testing.assert_close(ours.std(), theirs.std(), rtol=0.0, atol=0.03)
    assert begins("of ftrl", shoal.optim.FTRL(lr=0.1)).abs().max() == 0.0
    client.table("there", dim=8, optimizer=SGD)
    assert begins("there").abs().max() == 0.0  # a table that is there keeps its own
