"""Every optimizer through a table: keys that come several times in a push are one touch with their sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.optimizer_references import (
    TORCH_CASES,
    TORCH_IDS,
    Array,
    PaperFtrl,
    TorchRows,
    make_spec,
    rowwise_step,
)

import shoal

KEYS = np.array([0, 7, -7, 2**62, -(2**63), 123_456_789])
STEPS = 20
PUSHED = 15  # of six keys: most are there more than once
RTOL, ATOL = 1e-6, 5e-7


class Reference(Protocol):
    @property
    def values(self) -> NDArray[Any]: ...

    def step(self, touched: NDArray[np.int64], grads: Array, lr: float) -> None: ...


class RowwiseRows:
    def __init__(self, optimizer: shoal.optim.RowwiseAdagrad, values: Array) -> None:
        self.values = values.astype(np.float64)
        sums = np.full(len(values), optimizer.initial_accumulator_value)
        self.step = rowwise_step(core_spec(optimizer), self.values, sums)


def core_spec(optimizer: shoal.optim.Optimizer) -> Any:
    fields = {name: value for name, value in asdict(optimizer).items() if name != "kind"}
    fields["initial"] = fields.pop("initial_accumulator_value")
    return make_spec(optimizer.kind, **fields)


def torch_case(kind: str, make: Any, options: dict[str, Any]) -> tuple[shoal.optim.Optimizer, Any]:
    return shoal.optim.KINDS[kind](**options), lambda values: TorchRows(make, options, values)


def rowwise_case(**options: float) -> tuple[shoal.optim.Optimizer, Any]:
    optimizer = shoal.optim.RowwiseAdagrad(**options)
    return optimizer, lambda values: RowwiseRows(optimizer, values)


def ftrl_case(**options: float) -> tuple[shoal.optim.Optimizer, Any]:
    optimizer = shoal.optim.FTRL(**options)
    return optimizer, lambda values: PaperFtrl(core_spec(optimizer), values.shape)


CASES = {
    **{name: torch_case(*case) for name, case in zip(TORCH_IDS, TORCH_CASES, strict=True)},
    "rowwise_adagrad": rowwise_case(lr=0.05),
    "rowwise_adagrad-weight_decay": rowwise_case(lr=0.05, weight_decay=0.01, initial_accumulator_value=0.1),
    "ftrl": ftrl_case(lr=0.1),
    "ftrl-l1-l2": ftrl_case(lr=0.1, l1=0.3, l2=0.1, initial_accumulator_value=0.1),
}


@pytest.fixture(scope="module", params=["memory", "server"])
def client(request: pytest.FixtureRequest) -> Iterator[shoal.Client]:
    if request.param == "memory":
        with shoal.connect("memory://") as client:
            yield client
    else:
        with shoal.LocalCluster() as cluster, cluster.connect() as client:
            yield client


@pytest.mark.parametrize("dim", [1, 17, 64])
@pytest.mark.parametrize("case", CASES)
def test_duplicates_are_one_touch_with_their_sum(client: shoal.Client, case: str, dim: int) -> None:
    optimizer, make_reference = CASES[case]
    rng = np.random.default_rng(dim)
    reference: Reference = make_reference(rng.standard_normal((len(KEYS), dim)).astype(np.float32))
    table = client.table(f"{case} {dim}", dim=dim, optimizer=optimizer)
    table.assign(KEYS, reference.values.astype(np.float32))
    for _ in range(STEPS):
        picked = rng.integers(0, len(KEYS), PUSHED)
        # Of so few bits that their sums are exact in any order.
        grads = (rng.integers(-128, 129, (PUSHED, dim)) / 64).astype(np.float32)
        touched = np.unique(picked)
        sums = np.stack([grads[picked == row].sum(axis=0) for row in touched])
        table.push(KEYS[picked], grads)
        reference.step(touched, sums, optimizer.lr)
    np.testing.assert_allclose(table.pull(KEYS), reference.values, rtol=RTOL, atol=ATOL)
