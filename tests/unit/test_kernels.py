"""Every clone of every kernel gives the same bits: a replica may run on another CPU kind than its head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal import _core

DIMS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 67, 100, 129, 257, 65536]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "dampening": 0.3}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adagrad", {"eps": 1e-10}),
    ("adagrad", {"eps": 1e-10, "lr_decay": 0.1, "weight_decay": 0.01}),
    ("rowwise_adagrad", {"eps": 1e-10}),
    ("rowwise_adagrad", {"eps": 1e-10, "weight_decay": 0.01}),
    ("adam", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    ("adam", {"beta1": 0.3, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}),
    ("adamw", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}),
    ("ftrl", {"lr": 0.1, "beta": 1.0, "l1": 0.5, "l2": 0.1}),
]


@pytest.fixture(autouse=True)
def _best_kernels_after() -> Iterator[None]:
    yield
    _core.update.use_kernels("")


def by_clone(work: Callable[[], bytes]) -> dict[str, bytes]:
    results = {}
    for name in _core.kernel_names():
        _core.update.use_kernels(name)
        results[name] = work()
    return results


def assert_all_equal(work: Callable[[], bytes]) -> None:
    results = by_clone(work)
    differing = [name for name, result in results.items() if result != results["default"]]
    assert not differing


def gradients(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
    """Of all sizes, with zeros and subnormals among them."""
    grads = rng.standard_normal((rows, dim)) * 10.0 ** rng.integers(-8, 4, (rows, dim))
    grads[rng.random((rows, dim)) < 0.05] = 0.0
    grads[rng.random((rows, dim)) < 0.05] = 1e-40
    return grads.astype(np.float32)


def train(kind: str, fields: dict[str, Any], dim: int) -> bytes:
    spec = _core.OptimizerSpec(kind)
    for name, value in fields.items():
        setattr(spec, name, value)
    rng = np.random.default_rng(dim)
    count = 40 if dim < 1000 else 2
    state = np.tile(_core.update.init_state(spec, dim), (count, 1))
    rows = np.ascontiguousarray(np.hstack([gradients(rng, count, dim), state]))
    for step in range(8):
        _core.update.update_rows(spec, 0.1 / (1 + step), rows, gradients(rng, count, dim), dim)
    assert np.isfinite(rows[:, :dim]).all()
    return rows.tobytes()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("kind", "fields"), OPTIMIZERS, ids=str)
def test_optimizers(kind: str, fields: dict[str, Any], dim: int) -> None:
    assert_all_equal(lambda: train(kind, fields, dim))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["zeros", "constant", "uniform", "normal"])
def test_initial_values(kind: str, dim: int) -> None:
    spec = _core.InitSpec(kind, -0.3, 0.7)
    keys = range(-20, 20) if dim < 1000 else range(2)
    make = _core.update.init_row
    assert_all_equal(lambda: b"".join(make(spec, 7, "t", key, dim).tobytes() for key in keys))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_codecs(codec: str, dim: int) -> None:
    # Any bits at all, so that inf, NaN and subnormals are among them; every other row is ordinary.
    rng = np.random.default_rng(dim)
    values = rng.integers(0, 2**32, (20, dim), dtype=np.uint32).view(np.float32)
    values[::2] = gradients(rng, 10, dim)

    def work() -> bytes:
        data = _core.update.encode(codec, values)
        return data.tobytes() + _core.update.decode(codec, data, 20, dim).tobytes()

    assert_all_equal(work)


def test_decoding_any_bytes() -> None:
    data = np.random.default_rng(0).integers(0, 256, 4 * 65536, dtype=np.uint8)
    for codec, rows, dim in (("fp16", 2, 65536), ("bf16", 2, 65536), ("int8", 4, 65532)):
        assert_all_equal(lambda c=codec, r=rows, d=dim: _core.update.decode(c, data, r, d).tobytes())


@pytest.mark.parametrize("dim", DIMS)
def test_max_abs_bits(dim: int) -> None:
    values = np.random.default_rng(dim).integers(0, 2**32, dim, dtype=np.uint32).view(np.float32)
    assert_all_equal(lambda: str(_core.update.max_abs_bits(values)).encode())


def test_default_is_always_there_and_an_unknown_name_is_refused() -> None:
    assert _core.kernel_names()[0] == "default"
    with pytest.raises(_core.CoreError, match="kernels are 'sse9'; allowed on this machine: default"):
        _core.update.use_kernels("sse9")
