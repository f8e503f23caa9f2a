"""The handle's gradient carries the rows: whatever torch does to gradients, it does to them."""

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import shoal
from shoal.nn import Embedding, EmbeddingBag
from shoal.nn.gradient import RowGradient

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


def backward(emb: Embedding, factor: float = 1.0) -> None:
    (factor * emb(IDS)).sum().backward()


def keys_of(emb: Embedding) -> list[int]:
    recorded = emb.gradients()
    return [] if recorded is None else recorded[0].tolist()


def test_the_handle_is_one_empty_parameter(emb: Embedding) -> None:
    assert [(name, tuple(p.shape)) for name, p in emb.named_parameters()] == [("weight", (0, 2))]
    assert emb.gradients() is None


def test_backward_records_each_occurrence(emb: Embedding) -> None:
    backward(emb, 2.0)
    keys, grads = emb.gradients()
    assert keys.tolist() == [3, -1, 3]
    assert grads.tolist() == [[2, 2]] * 3


def test_backward_accumulates(emb: Embedding) -> None:
    backward(emb)
    backward(emb, 2.0)
    keys, grads = emb.gradients()
    assert keys.tolist() == [3, -1, 3, 3, -1, 3]
    assert grads[:, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_a_module_used_twice_accumulates(emb: Embedding) -> None:
    (emb(torch.tensor([1])) * emb(torch.tensor([2]))).sum().backward()
    assert sorted(keys_of(emb)) == [1, 2]


def test_recorded_rows_can_be_pushed(emb: Embedding) -> None:
    before = emb.table.pull([3, -1])
    backward(emb)
    emb.table.push(*emb.gradients())
    np.testing.assert_allclose(emb.table.pull([3, -1]) - before, [[-2, -2], [-1, -1]], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_an_optimizer_drops_them(emb: Embedding, options: dict, set_to_none: bool) -> None:
    optimizer = torch.optim.Adam([*emb.parameters(), torch.nn.Parameter(torch.ones(2))], **options)
    backward(emb)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert emb.gradients() is None
    backward(emb)
    assert keys_of(emb) == [3, -1, 3]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_a_model_drops_them(emb: Embedding, set_to_none: bool) -> None:
    model = torch.nn.Sequential(emb, torch.nn.Linear(2, 1))
    model(IDS).sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    assert emb.gradients() is None


def test_old_ways_to_zero_drop_them(emb: Embedding) -> None:
    backward(emb)
    emb.weight.grad.data.zero_()
    assert emb.gradients() is None
    backward(emb)
    emb.weight.grad = None
    assert emb.gradients() is None


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    (torch.optim.Adagrad, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adadelta, {"foreach": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_step_of_torch_leaves_them_alone(emb: Embedding, kind: type, options: dict) -> None:
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([*emb.parameters(), other], lr=0.1, **options)
    for _ in range(3):
        ((emb(IDS) * other).sum()).backward()
        optimizer.step()
    assert keys_of(emb) == [3, -1, 3] * 3
    assert other.tolist() != [1, 1]
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert not any(isinstance(value, RowGradient) for value in kept)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_by_torch_sees_the_dense_part_only(emb: Embedding, foreach: bool | None) -> None:
    other = torch.nn.Parameter(torch.ones(2))
    (emb(IDS).sum() + (3 * other).sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_([*emb.parameters(), other], 1.0, foreach=foreach)
    torch.nn.utils.clip_grad_value_([*emb.parameters(), other], 0.5, foreach=foreach)
    assert norm.item() == pytest.approx(18**0.5)
    assert other.grad.tolist() == [0.5, 0.5]
    assert emb.gradients()[1].tolist() == [[1, 1]] * 3


def test_arithmetic_on_the_gradient_keeps_the_rows(emb: Embedding) -> None:
    backward(emb)
    emb.weight.grad += 0.0
    emb.weight.grad.clamp_(-0.5, 0.5)
    assert keys_of(emb) == [3, -1, 3]
    assert emb.gradients()[1].tolist() == [[1, 1]] * 3
    assert emb.weight.grad.norm().item() == 0
    assert "3 rows of 2" in repr(emb.weight.grad)


def divide(grad: torch.Tensor) -> torch.Tensor:
    grad /= 3
    return grad


@pytest.mark.parametrize(
    "scale",
    [
        divide,
        lambda grad: grad.div_(torch.tensor(3)),
        lambda grad: grad.mul_(0.3),
        lambda grad: grad.data.mul_(0.3),
        lambda grad: 0.3 * grad,
        lambda grad: grad / 3,
        lambda grad: torch._foreach_mul_([grad], 0.3)[0],
        lambda grad: torch._foreach_div_([grad], 3)[0],
    ],
)
def test_scaling_by_a_number_scales_the_rows_as_it_does_torchs(
    emb: Embedding, scale: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    backward(emb)
    plain = torch.nn.Parameter(torch.zeros(3, 2))
    plain.sum().backward()
    for parameter in (emb.weight, plain):
        parameter.grad = scale(parameter.grad)
    assert plain.grad[0, 0] < 0.34
    assert emb.gradients()[1].tolist() == plain.grad.tolist()


def test_torchs_own_clipping_leaves_the_rows(emb: Embedding) -> None:
    backward(emb)
    for foreach in (False, True):
        torch.nn.utils.clip_grad_norm_([emb.weight, torch.nn.Parameter(torch.ones(1))], 0.1, foreach=foreach)
    torch.nn.utils.clip_grad_value_(emb.parameters(), 0.1)
    assert emb.gradients()[1].tolist() == [[1, 1]] * 3


def test_grad_scaler_unscales_rows(emb: Embedding) -> None:
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*emb.parameters(), other], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((emb(IDS) * other).sum()).backward()
    assert emb.gradients()[1].tolist() == [[1024, 1024]] * 3
    scaler.unscale_(optimizer)
    assert emb.gradients()[1].tolist() == [[1, 1]] * 3
    scaler.step(optimizer)
    assert other.tolist() != [1, 1]


def test_grad_scaler_finds_what_is_not_finite_in_rows(emb: Embedding) -> None:
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*emb.parameters(), other], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    factor = torch.tensor([1.0, float("inf"), 1.0]).unsqueeze(1)
    scaler.scale((emb(IDS) * factor).sum() + other.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert other.tolist() == [1, 1]
    assert scaler.get_scale() == 512


def test_unscaling_does_not_touch_a_gradient_that_two_tables_share(client: shoal.Client) -> None:
    one, two = (Embedding(name, dim=2, optimizer=SGD) for name in "ab")
    for module in (one, two):
        module.bind(client)
    optimizer = torch.optim.SGD([one.weight, two.weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((one(IDS) + two(IDS)).sum()).backward()
    scaler.unscale_(optimizer)
    assert one.gradients()[1].tolist() == two.gradients()[1].tolist() == [[1, 1]] * 3


def test_a_frozen_table_records_nothing(emb: Embedding) -> None:
    emb.requires_grad_(False)
    assert not emb(IDS).requires_grad
    emb.requires_grad_(True)
    assert emb(IDS).requires_grad


def test_weights_of_a_frozen_bag_have_a_gradient(client: shoal.Client) -> None:
    bag = EmbeddingBag("bags", dim=2, mode="sum", optimizer=SGD, init=shoal.init.Constant(0.5))
    bag.bind(client)
    bag.requires_grad_(False)
    by = torch.ones(3).requires_grad_()
    bag(IDS, torch.tensor([0]), by).sum().backward()
    assert by.grad.tolist() == [1, 1, 1]
    assert bag.gradients() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_grad(emb: Embedding, mode: type) -> None:
    with mode():
        assert not emb(IDS).requires_grad


def test_pulls_store_nothing(emb: Embedding) -> None:
    backward(emb)
    emb.eval()(IDS)
    assert len(emb.table) == 0


def test_outputs_may_be_changed_in_place(emb: Embedding) -> None:
    output = emb(torch.tensor([[1, 2]]))
    torch.relu_(output).sum().backward()
    slopes = (emb(torch.tensor([1, 2])) > 0).float()
    assert emb.gradients()[1].tolist() == slopes.tolist()


def test_ids_changed_before_backward_are_noticed(emb: Embedding) -> None:
    ids = IDS.clone()
    output = emb(ids)
    ids.zero_()
    with pytest.raises(
        RuntimeError, match=r"table 'items': ids were modified by an in-place operation.*ids.clone\(\)"
    ):
        output.sum().backward()


def test_ids_may_be_changed_after_backward(emb: Embedding) -> None:
    ids = IDS.clone()
    emb(ids).sum().backward()
    ids.zero_()
    assert keys_of(emb) == [3, -1, 3]


def test_autograd_grad_gives_the_rows_and_leaves_grad_alone(emb: Embedding) -> None:
    (grad,) = torch.autograd.grad(emb(IDS).sum(), emb.weight)
    assert isinstance(grad, RowGradient)
    assert grad.parts[0].keys.tolist() == [3, -1, 3]
    assert emb.gradients() is None


def test_a_penalty_on_the_gradient_of_outputs_reaches_the_rows(emb: Embedding) -> None:
    output = emb(IDS)
    (slope,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
    slope.sum().backward()
    np.testing.assert_allclose(emb.gradients()[1], 6 * emb(IDS).detach().numpy(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_records_them_too(emb: Embedding) -> None:
    emb(IDS).sum().backward(create_graph=True)
    emb(IDS).sum().backward(create_graph=True)
    assert keys_of(emb) == [3, -1, 3] * 2


def test_modules_that_share_a_handle_hand_out_their_own_rows(client: shoal.Client) -> None:
    one, two = (Embedding("items", dim=2, optimizer=SGD) for _ in range(2))
    two.weight = one.weight
    for module in (one, two):
        module.bind(client)
    (one(torch.tensor([1])) + two(torch.tensor([2]))).sum().backward()
    assert (keys_of(one), keys_of(two)) == ([1], [2])


def test_a_dropped_module_is_gone_with_its_gradients(client: shoal.Client) -> None:
    module = Embedding("items", dim=2, optimizer=SGD)
    module.bind(client)
    backward(module)
    gone = weakref.ref(module), weakref.ref(module.table)
    del module
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_autocast_gives_float32_as_torch_does(emb: Embedding) -> None:
    linear = torch.nn.Linear(2, 1)
    with torch.autocast("cpu", torch.bfloat16):
        rows = emb(IDS)
        linear(rows).sum().backward()
    assert rows.dtype == torch.nn.Embedding(1, 2)(torch.tensor([0])).dtype == torch.float32
    assert emb.gradients()[1].dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_converted_module_gives_its_dtype_and_records_float32(emb: Embedding, dtype: torch.dtype) -> None:
    expected = emb(IDS).to(dtype)
    emb.to(dtype)
    assert torch.equal(emb(IDS), expected)
    backward(emb)
    backward(emb)
    keys, grads = emb.gradients()
    assert keys.tolist() == [3, -1, 3] * 2
    assert (grads.dtype, grads.tolist()) == (np.float32, [[1, 1]] * 6)


def test_moving_and_modes_are_harmless(emb: Embedding) -> None:
    before = emb(IDS)
    emb.to("cpu").eval().train().float().share_memory()
    assert torch.equal(emb(IDS), before)
    assert emb.bound
