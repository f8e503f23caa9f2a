"""Row optimizers against torch.optim, one torch instance per row, stepped when the row is touched.

Row-wise Adagrad and FTRL have no twin in torch: they are held against float64 NumPy written from their
formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.unit.optimizer_references import (
    TORCH_CASES,
    TORCH_IDS,
    Array,
    PaperFtrl,
    Step,
    TorchRows,
    make_spec,
    rowwise_step,
)

from shoal import _core

DIMS = [1, 3, 8, 16, 64, 100]
ROWS = 6
STEPS = 40
# One step may differ by a rounding or two: torch fuses multiply and add where the CPU can, Shoal never
# does. Values are about 1, so a rounding is 6e-8 of them, and the path of 24 touches adds such up.
RTOL, ATOL_STEP, ATOL_PATH = 1e-6, 1e-7, 5e-7

# Name of a field in torch -> in OptimizerSpec, where they differ.
RENAMED = {"initial_accumulator_value": "initial"}


def twin_spec(kind: str, torch_defaults: dict[str, Any]) -> _core.OptimizerSpec:
    """The spec of a torch optimizer, from its `defaults`, so that torch's own default values count."""
    fields = {RENAMED.get(name, name): value for name, value in torch_defaults.items()}
    if "betas" in fields:
        fields["beta1"], fields["beta2"] = fields.pop("betas")
    return make_spec(kind, **{k: v for k, v in fields.items() if hasattr(_core.OptimizerSpec, k)})


class Rows:
    """A few rows, value and state side by side, as the store holds them."""

    def __init__(self, spec: _core.OptimizerSpec, values: Array) -> None:
        self.spec, self.dim = spec, values.shape[1]
        state = np.tile(_core.update.init_state(spec, self.dim), (len(values), 1))
        self.rows = np.ascontiguousarray(np.hstack([values, state]))

    @property
    def values(self) -> Array:
        return self.rows[:, : self.dim]

    def step(self, touched: NDArray[np.int64], grads: Array, lr: float) -> None:
        part = np.ascontiguousarray(self.rows[touched])
        _core.update.update_rows(self.spec, lr, part, grads, self.dim)
        self.rows[touched] = part


def drive(rng: np.random.Generator, dim: int, lr: float, *steps: Step, schedule: float = 1.0) -> None:
    """The same random touches and gradients for all of `steps`; lr shrinks by `schedule` each time."""
    for _ in range(STEPS):
        touched = np.flatnonzero(rng.random(ROWS) < 0.6)
        grads = rng.standard_normal((len(touched), dim)).astype(np.float32)
        for step in steps:
            step(touched, grads, lr)
        lr *= schedule


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("kind", "make", "options"), TORCH_CASES, ids=TORCH_IDS)
def test_each_row_equals_its_own_torch_optimizer(
    kind: str, make: type[torch.optim.Optimizer], options: dict[str, Any], dim: int
) -> None:
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((ROWS, dim)).astype(np.float32)
    reference = TorchRows(make, options, values)
    rows = Rows(twin_spec(kind, reference.optimizers[0].defaults), values)
    drive(rng, dim, options["lr"], rows.step, reference.step)
    np.testing.assert_allclose(rows.values, reference.values, rtol=RTOL, atol=ATOL_PATH)


@pytest.mark.parametrize(("kind", "make", "options"), TORCH_CASES, ids=TORCH_IDS)
def test_each_single_step_equals_torch(
    kind: str, make: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(4)
    reference = TorchRows(make, options, rng.standard_normal((ROWS, 100)).astype(np.float32))
    rows = Rows(twin_spec(kind, reference.optimizers[0].defaults), reference.values)

    def compare(touched: NDArray[np.int64], grads: Array, lr: float) -> None:
        np.testing.assert_allclose(rows.values, reference.values, rtol=RTOL, atol=ATOL_STEP)
        rows.rows[:, :100] = reference.values  # so that differences do not add up

    drive(rng, 100, options["lr"], rows.step, reference.step, compare)


@pytest.mark.parametrize(("kind", "make", "options"), TORCH_CASES, ids=TORCH_IDS)
def test_lr_of_the_push_counts(kind: str, make: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((ROWS, 16)).astype(np.float32)
    reference = TorchRows(make, options, values)
    rows = Rows(twin_spec(kind, reference.optimizers[0].defaults), values)
    drive(rng, 16, 0.03, rows.step, reference.step, schedule=0.9)
    np.testing.assert_allclose(rows.values, reference.values, rtol=RTOL, atol=ATOL_PATH)


@pytest.mark.parametrize(("kind", "make", "options"), TORCH_CASES, ids=TORCH_IDS)
def test_a_dense_piece_equals_torch(
    kind: str, make: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(6)
    values = rng.standard_normal((1, 65536)).astype(np.float32)
    reference = TorchRows(make, options, values)
    rows = Rows(twin_spec(kind, reference.optimizers[0].defaults), values)
    for _ in range(5):
        grad = rng.standard_normal((1, 65536)).astype(np.float32)
        rows.step(np.array([0]), grad, options["lr"])
        reference.step(np.array([0]), grad, options["lr"])
    np.testing.assert_allclose(rows.values, reference.values, rtol=RTOL, atol=ATOL_PATH)


def test_adam_bias_correction_stays_right_after_many_touches() -> None:
    values = np.ones((1, 2), np.float32)
    reference = TorchRows(torch.optim.Adam, {"lr": 1e-3}, values)
    rows = Rows(twin_spec("adam", reference.optimizers[0].defaults), values)
    grad = np.array([[0.5, -0.25]], np.float32)
    for _ in range(3000):
        rows.step(np.array([0]), grad, 1e-3)
        reference.step(np.array([0]), grad, 1e-3)
    np.testing.assert_allclose(rows.values, reference.values, rtol=2e-5)


def sparse_embedding(make: type[torch.optim.Optimizer], values: Array) -> tuple[Step, torch.nn.Parameter]:
    table = torch.nn.Embedding.from_pretrained(torch.from_numpy(values.copy()), freeze=False, sparse=True)
    optimizer = make(table.parameters(), lr=0.1)

    def step(touched: NDArray[np.int64], grads: Array, lr: float) -> None:
        optimizer.zero_grad()
        with torch.sparse.check_sparse_tensor_invariants():  # torch warns where it is left open
            (table(torch.from_numpy(touched)) * torch.from_numpy(grads)).sum().backward()
            optimizer.step()

    return step, table.weight


@pytest.mark.parametrize(("kind", "make"), [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)])
def test_sgd_and_adagrad_equal_a_sparse_embedding(kind: str, make: type[torch.optim.Optimizer]) -> None:
    rng = np.random.default_rng(9)
    values = rng.standard_normal((ROWS, 16)).astype(np.float32)
    step, weight = sparse_embedding(make, values)
    rows = Rows(make_spec(kind, eps=1e-10 if kind == "adagrad" else 0.0), values)
    drive(rng, 16, 0.1, rows.step, step)
    np.testing.assert_allclose(rows.values, weight.detach().numpy(), rtol=RTOL, atol=ATOL_PATH)


def test_adam_is_not_sparse_adam_once_a_row_was_left_out() -> None:
    values = np.zeros((2, 1), np.float32)
    step, weight = sparse_embedding(torch.optim.SparseAdam, values)
    rows = Rows(make_spec("adam", beta1=0.9, beta2=0.999, eps=1e-8), values)
    for touched in (np.array([0, 1]), np.array([0]), np.array([0]), np.array([0, 1])):
        grads = np.ones((len(touched), 1), np.float32)
        rows.step(touched, grads, 0.1)
        step(touched, grads, 0.1)
    theirs = weight.detach().numpy()
    np.testing.assert_allclose(rows.values[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(rows.values[1], -0.2, rtol=1e-5)  # two touches at the full rate
    assert abs(theirs[1] + 0.2) > 0.02  # SparseAdam corrects as if it had been touched four times


@pytest.mark.parametrize("dim", [*DIMS, 17, 31, 1000])
@pytest.mark.parametrize("fields", [{}, {"weight_decay": 0.01}, {"initial": 0.1, "eps": 1e-3}], ids=str)
def test_rowwise_adagrad_equals_its_formula(fields: dict[str, float], dim: int) -> None:
    rng = np.random.default_rng(dim)
    spec = make_spec("rowwise_adagrad", **{"lr": 0.05, "eps": 1e-10, **fields})
    values = rng.standard_normal((ROWS, dim)).astype(np.float32)
    wanted, sums = values.astype(np.float64), np.full(ROWS, spec.initial, np.float64)
    rows = Rows(spec, values)
    drive(rng, dim, 0.05, rows.step, rowwise_step(spec, wanted, sums))
    np.testing.assert_allclose(rows.values, wanted, rtol=RTOL, atol=ATOL_PATH)
    np.testing.assert_allclose(rows.rows[:, dim], sums, rtol=2e-6)


FTRL_FIELDS = [{}, {"l1": 1.0}, {"l2": 0.5}, {"l1": 0.3, "l2": 0.1, "initial": 0.1}, {"beta": 0.0}]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("fields", FTRL_FIELDS, ids=str)
def test_ftrl_equals_the_paper(fields: dict[str, float], dim: int) -> None:
    rng = np.random.default_rng(dim)
    spec = make_spec("ftrl", **{"lr": 0.1, "beta": 1.0, **fields})
    paper = PaperFtrl(spec, (ROWS, dim))
    rows = Rows(spec, np.zeros((ROWS, dim), np.float32))
    drive(rng, dim, 0.1, rows.step, paper.step)
    # Against float64: z is a float32 sum of 24 terms of about 1, so it is off by a few of its units.
    np.testing.assert_allclose(rows.values, paper.values, rtol=RTOL, atol=ATOL_PATH)


def test_ftrl_l1_keeps_exact_zeros() -> None:
    rows = Rows(make_spec("ftrl", lr=0.1, beta=1.0, l1=5.0), np.zeros((ROWS, 8), np.float32))
    drive(np.random.default_rng(1), 8, 0.1, rows.step)
    zeros = int((rows.values == 0.0).sum())
    assert 0 < zeros < rows.values.size


def test_ftrl_without_a_rate_does_not_move() -> None:
    rows = Rows(make_spec("ftrl", lr=0.1, beta=1.0), np.ones((1, 4), np.float32))
    before = rows.rows.copy()
    rows.step(np.array([0]), np.ones((1, 4), np.float32), 0.0)
    np.testing.assert_array_equal(rows.rows, before)


def test_ftrl_takes_gradients_whose_square_is_zero() -> None:
    rows = Rows(make_spec("ftrl", lr=0.1), np.zeros((1, 2), np.float32))
    rows.step(np.array([0]), np.array([[0.0, 1e-30]], np.float32), 0.1)
    assert np.isfinite(rows.rows).all()


SIZES = [
    ("sgd", {}, 0),
    ("sgd", {"dampening": 0.1}, 0),
    ("sgd", {"momentum": 0.9}, 64),
    ("sgd", {"momentum": 0.9, "dampening": 0.1}, 65),
    ("adagrad", {}, 64),
    ("adagrad", {"lr_decay": 0.1}, 65),
    ("rowwise_adagrad", {}, 1),
    ("adam", {}, 129),
    ("adamw", {}, 129),
    ("ftrl", {"lr": 0.1}, 128),
]


@pytest.mark.parametrize(("kind", "fields", "floats"), SIZES, ids=str)
def test_state_floats(kind: str, fields: dict[str, float], floats: int) -> None:
    assert _core.update.state_floats(make_spec(kind, **fields), 64) == floats


def test_layout_follows_the_features_and_not_the_rates() -> None:
    same = _core.update.same_layout
    assert same(make_spec("sgd", momentum=0.9), make_spec("sgd", momentum=0.5, nesterov=True, lr=3.0))
    assert not same(make_spec("sgd", momentum=0.9), make_spec("sgd"))
    assert not same(make_spec("sgd", momentum=0.9), make_spec("sgd", momentum=0.9, dampening=0.1))
    assert not same(make_spec("adagrad"), make_spec("adagrad", lr_decay=0.1))
    assert not same(make_spec("adam"), make_spec("adamw"))


REFUSED = [
    ("sgd", {"lr": -0.1}, "optimizer sgd: lr is -0.1; allowed: 0 or more"),
    ("sgd", {"lr": float("nan")}, "optimizer sgd: lr is nan; allowed: a finite number"),
    ("sgd", {"nesterov": True}, "optimizer sgd: momentum is 0; allowed: above 0 where nesterov is true"),
    ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.5}, "optimizer sgd: dampening is 0.5"),
    ("sgd", {"momentum": -1.0}, "optimizer sgd: momentum is -1; allowed: 0 or more"),
    ("sgd", {"eps": 1.0}, "optimizer sgd: eps is 1; allowed: 0, as this optimizer does not use it"),
    ("adagrad", {"initial": -1.0}, "optimizer adagrad: initial is -1; allowed: 0 or more"),
    ("adagrad", {"beta1": 0.9}, "optimizer adagrad: beta1 is 0.9; allowed: 0, as this"),
    ("adam", {"beta1": 1.0}, "optimizer adam: beta1 is 1; allowed: 0 or more and below 1"),
    ("adamw", {"beta2": float("nan")}, "optimizer adamw: beta2 is nan; allowed: 0 or more and below 1"),
    ("adamw", {"nesterov": True}, "optimizer adamw: nesterov is true; allowed: false"),
    ("adam", {"weight_decay": float("inf")}, "optimizer adam: weight_decay is inf; allowed: a finite number"),
    ("ftrl", {"lr": 0.0}, "optimizer ftrl: lr is 0; allowed: above 0"),
    ("ftrl", {"lr": 0.1, "l1": -1.0}, "optimizer ftrl: l1 is -1; allowed: 0 or more"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_values_that_cannot_run_are_refused_by_name(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(_core.CoreError) as caught:
        make_spec(kind, **fields)
    assert caught.value.code == 1
    assert str(caught.value).startswith(message)


def test_an_unknown_optimizer_is_refused_with_the_list() -> None:
    with pytest.raises(_core.CoreError, match="optimizer kind is 'lamb'; allowed: sgd, adagrad"):
        _core.OptimizerSpec("lamb")
