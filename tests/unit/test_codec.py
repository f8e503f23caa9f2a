"""Wire codecs: bit equality with NumPy and torch, and the error bounds that the docs promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shoal import _core

Array = NDArray[np.float32]
encode, decode = _core.update.encode, _core.update.decode
FLOAT_MAX = np.finfo(np.float32).max


def from_bits(bits: NDArray[np.uint32]) -> Array:
    return bits.astype(np.uint32).view(np.float32)


def hard_floats() -> Array:
    """Every exponent with mantissas at and around the rounding points of both halves, both signs."""
    mantissas = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    mantissas += [0x10000, 0x18000, 0x7FE000, 0x7FEFFF, 0x7FF000, 0x7F7FFF, 0x7F8000, 0x7FFFFF]
    exponents = np.arange(255, dtype=np.uint32)[:, None] << 23
    positive = (exponents | np.array(mantissas, np.uint32)).ravel()
    random = np.random.default_rng(1).integers(0, 0x7F800000, 50_000, dtype=np.uint32)
    magnitudes = np.concatenate([positive, random, np.array([0x7F800000], np.uint32)])
    return from_bits(np.concatenate([magnitudes, magnitudes | np.uint32(0x80000000)]))


def as_halves(codec: str, values: Array) -> NDArray[np.uint16]:
    return encode(codec, values[None, :]).view(np.uint16)[0]


def test_fp32_is_the_bytes() -> None:
    values = hard_floats()[None, :]
    data = encode("fp32", values)
    assert data.tobytes() == values.tobytes()
    assert decode("fp32", data, *values.shape).tobytes() == values.tobytes()


def test_fp16_encodes_as_numpy() -> None:
    values = hard_floats()
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16)
    np.testing.assert_array_equal(as_halves("fp16", values), wanted.view(np.uint16))


def test_bf16_encodes_as_torch() -> None:
    values = hard_floats()
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(as_halves("bf16", values), wanted)


def test_every_fp16_decodes_as_numpy() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    got = decode("fp16", halves.view(np.uint8), 1, 65536)[0]
    wanted = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), wanted[~nan].view(np.uint32))
    assert np.isnan(got[nan]).all()


def test_every_bf16_decodes_as_torch() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    got = decode("bf16", halves.view(np.uint8), 1, 65536)[0]
    np.testing.assert_array_equal(got.view(np.uint32), halves.astype(np.uint32) << 16)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_nan_stays_nan(codec: str) -> None:
    values = from_bits(np.array([[0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF]], np.uint32))
    assert np.isnan(decode(codec, encode(codec, values), 1, 4)).all()


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "fp32"])
def test_encodable_max_is_the_last_that_stays_finite(codec: str) -> None:
    most = np.float32(_core.update.encodable_max(codec))
    over = from_bits(np.array(most).view(np.uint32) + 1)[()]
    values = np.array([[most, -most], [over, -over]], np.float32)
    got = decode(codec, encode(codec, values), 2, 2)
    assert np.isfinite(got[0]).all()
    assert not np.isfinite(got[1]).any()


# From the least normal number up: below it the bound is absolute, half of the least subnormal.
RELATIVE_BOUNDS = [("fp16", 2.0**-11, 2.0**-14), ("bf16", 2.0**-8, 2.0**-126)]


@pytest.mark.parametrize(("codec", "bound", "least"), RELATIVE_BOUNDS)
def test_halves_keep_their_relative_bound(codec: str, bound: float, least: float) -> None:
    values = hard_floats()
    size = np.abs(values)
    values = values[(size >= least) & (size <= _core.update.encodable_max(codec))].astype(np.float32)[None, :]
    got = decode(codec, encode(codec, values), *values.shape).astype(np.float64)
    assert (np.abs(got - values) <= bound * np.abs(values.astype(np.float64))).all()


def rows_of_many_sizes(rows: int, dim: int, exponent_max: int) -> Array:
    sizes = 10.0 ** np.linspace(-exponent_max, exponent_max, rows)
    return (np.random.default_rng(dim).standard_normal((rows, dim)) * sizes[:, None]).astype(np.float32)


def int8_reference(values: Array) -> tuple[Array, NDArray[np.int8]]:
    scale = np.abs(values).max(axis=1) / np.float32(127)
    quotient = np.divide(values, scale[:, None], where=scale[:, None] > 0, out=np.zeros_like(values))
    return scale, np.clip(np.rint(quotient), -127, 127).astype(np.int8)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 16, 63, 64, 100, 1000])
def test_int8_layout_and_values(dim: int) -> None:
    values = rows_of_many_sizes(20, dim, exponent_max=10)
    values[3] = 0
    data = encode("int8", values)
    assert data.shape == (20, 4 + (dim + 3) // 4 * 4)
    scale, quotient = int8_reference(values)
    np.testing.assert_array_equal(data[:, :4].copy().view(np.float32)[:, 0], scale)
    np.testing.assert_array_equal(data[:, 4 : 4 + dim].view(np.int8), quotient)
    assert not data[:, 4 + dim :].any()


def test_int8_is_within_half_a_scale() -> None:
    values = rows_of_many_sizes(200, 64, exponent_max=30)
    got = decode("int8", encode("int8", values), 200, 64).astype(np.float64)
    scale = np.abs(values).max(axis=1, keepdims=True).astype(np.float64) / 127
    # The quotient and the product round once each: 127 * 2^-23 of a scale beside the half.
    assert (np.abs(got - values) <= scale * (0.5 + 127 * 2.0**-23)).all()


def test_int8_halves_go_to_even() -> None:
    values = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    np.testing.assert_array_equal(decode("int8", encode("int8", values), 1, 7), [[127, 0, 2, 2, 0, -2, -2]])


def test_int8_rows_at_the_ends_of_the_range() -> None:
    top = from_bits(0x7F7FFFFF - np.arange(1000, dtype=np.uint32))[:, None]
    got = decode("int8", encode("int8", top), 1000, 1)
    np.testing.assert_allclose(got, top, rtol=2.0**-23)
    tiny = np.array([[1e-36, -1e-36], [1e-45, 0.0]], np.float32)
    assert not decode("int8", encode("int8", tiny), 2, 2).any()


def test_int8_row_with_inf_comes_back_nan_and_leaves_its_neighbours() -> None:
    values = np.array([[1.0, 2.0], [np.inf, 1.0], [3.0, 4.0]], np.float32)
    got = decode("int8", encode("int8", values), 3, 2)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 1000, 65537])
def test_max_abs_bits(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    wanted = int((values.view(np.uint32) & 0x7FFFFFFF).max(initial=0))
    assert _core.update.max_abs_bits(values) == wanted


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("place", [0, 5, 15, 16, 98, 99])
def test_max_abs_bits_sees_what_is_not_finite(bad: float, place: int) -> None:
    values = np.full(100, FLOAT_MAX, np.float32)
    assert _core.update.max_abs_bits(values) < 0x7F800000
    values[place] = bad
    assert _core.update.max_abs_bits(values) >= 0x7F800000


def test_a_wrong_size_or_name_is_refused() -> None:
    with pytest.raises(_core.CoreError, match="encoded rows have 3 bytes; allowed: 8"):
        decode("fp16", np.zeros(3, np.uint8), 2, 2)
    with pytest.raises(_core.CoreError, match="codec is 'fp8'; allowed: fp32, fp16, bf16, int8"):
        encode("fp8", np.zeros((1, 1), np.float32))
