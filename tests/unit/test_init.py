"""Initial values: fixed for ever by golden bytes, of the right distribution, independent of order."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal import _core

# If one of these changes, every table that was ever made reads differently where it was not trained.
GOLDEN = [
    (("uniform", -0.5, 0.5), (7, "items", 3), "c4ee8d3eeeaaad3e6401433ef8b0863d54a1a63e"),
    (("uniform", -0.5, 0.5), (0, "", 0), "b409f73e4af39ebea4324c3e3cd8a8be1ceff83e"),
    (("uniform", -0.5, 0.5), (2**64 - 1, "users", -1), "40fc3e3de056963e1aaff33eb00cafbe7aabb53e"),
    (("normal", 0.0, 1.0), (7, "items", 3), "aa47433f41bc7d3fc681fe3e2395293ea4b36f3f"),
    (("normal", 0.0, 1.0), (0, "", 0), "cded0640872a61bf53d0053fda0974bf67fc0c40"),
    (("normal", 0.0, 1.0), (2**64 - 1, "users", -1), "9be9ef3dacaf513fbbfafc3f6b4a80bf3a57873f"),
]
ROWS, DIM = 2000, 500


def row(
    kind: str, a: float, b: float, *, key: int = 1, dim: int = 8, seed: int = 7, name: str = "t"
) -> NDArray[np.float32]:
    return _core.update.init_row(_core.InitSpec(kind, a, b), seed, name, key, dim)


def table(kind: str, a: float, b: float) -> NDArray[np.float64]:
    return np.stack([row(kind, a, b, key=key, dim=DIM) for key in range(ROWS)]).astype(np.float64)


@pytest.mark.parametrize(("spec", "place", "wanted"), GOLDEN, ids=str)
def test_golden_bytes(spec: tuple[str, float, float], place: tuple[int, str, int], wanted: str) -> None:
    assert _core.update.init_row(_core.InitSpec(*spec), *place, 5).tobytes().hex() == wanted


def test_zeros_and_constant() -> None:
    np.testing.assert_array_equal(row("zeros", 0, 0), np.zeros(8, np.float32))
    np.testing.assert_array_equal(row("constant", 0.25, 0), np.full(8, 0.25, np.float32))


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_an_element_does_not_depend_on_the_length_of_its_row(kind: str) -> None:
    long = row(kind, -1, 1, dim=300)
    for dim in (1, 2, 3, 63, 64, 65, 129, 299):
        np.testing.assert_array_equal(row(kind, -1, 1, dim=dim), long[:dim])


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_rows_do_not_depend_on_the_order_of_making(kind: str) -> None:
    keys = [5, -3, 2**62, 0, 17]
    forward = {key: row(kind, -1, 1, key=key).tobytes() for key in keys}
    backward = {key: row(kind, -1, 1, key=key).tobytes() for key in reversed(keys)}
    assert forward == backward
    assert len(set(forward.values())) == len(keys)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_seed_name_and_key_each_change_the_row(kind: str) -> None:
    base = row(kind, -1, 1)
    for other in (row(kind, -1, 1, key=2), row(kind, -1, 1, seed=8), row(kind, -1, 1, name="u")):
        assert not (base == other).any()


def largest_gap(sample: NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov distance of a sample in [0, 1] from the uniform distribution."""
    ordered = np.sort(sample.ravel())
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def test_uniform_has_its_distribution() -> None:
    values = table("uniform", -0.3, 0.7)
    assert values.min() >= np.float32(-0.3)
    assert values.max() < np.float32(0.7)
    share = values + 0.3
    assert largest_gap(share) < 1.95 / math.sqrt(share.size)  # exceeded by one seed in a thousand
    assert abs(share.mean() - 0.5) < 4 * math.sqrt(1 / 12 / share.size)


def test_normal_has_its_distribution() -> None:
    values = (table("normal", 1.5, 2.0) - 1.5) / 2.0
    count = values.size
    assert abs(values.mean()) < 4 / math.sqrt(count)
    assert abs(values.std() - 1) < 4 / math.sqrt(2 * count)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / count)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / count)
    every_tenth = values.ravel()[::10]
    cdf = np.array([NormalDist().cdf(x) for x in every_tenth])
    assert largest_gap(cdf) < 1.95 / math.sqrt(len(cdf))


def test_normal_is_the_quantile_of_the_same_bits() -> None:
    # Uniform on [0, 2^24) shows the upper 24 of the 32 bits that the normal is made of.
    bits = row("uniform", 0.0, 2.0**24, dim=4096).astype(np.float64)
    got = row("normal", 0.0, 1.0, dim=4096).astype(np.float64)
    low = np.array([NormalDist().inv_cdf(max(b, 2.0**-9) * 2.0**-24) for b in bits])
    high = np.array([NormalDist().inv_cdf(min(b + 1, 2.0**24 - 2.0**-9) * 2.0**-24) for b in bits])
    slack = 3e-7 * np.maximum(np.abs(got), 0.1)
    assert ((low - slack <= got) & (got <= high + slack)).all()


def test_elements_and_rows_are_not_correlated() -> None:
    values = table("normal", 0.0, 1.0)
    bound = 4.5 / math.sqrt(values.size)
    for lag in (1, 2, 3, 64):
        assert abs((values[:, lag:] * values[:, :-lag]).mean()) < bound
        assert abs((values[lag:] * values[:-lag]).mean()) < bound


def test_uniform_never_reaches_its_upper_end() -> None:
    high = np.float32(1.0000001)  # two floats above 1 - 2^-24: without care most sums round up to it
    values = row("uniform", 1.0, float(high), dim=10_000)
    assert (values == 1.0).all()
    np.testing.assert_array_equal(row("uniform", 0.5, 0.5), np.full(8, 0.5, np.float32))


def test_normal_without_deviation_is_its_mean() -> None:
    np.testing.assert_array_equal(row("normal", 0.1, 0.0), np.full(8, 0.1, np.float32))


REFUSED = [
    (("constant", math.nan, 0.0), "init constant: value is nan; allowed: a finite number"),
    (("uniform", -math.inf, 0.0), "init uniform: low is -inf; allowed: a finite number"),
    (("uniform", 0.0, math.inf), "init uniform: high is inf; allowed: a finite number"),
    (("uniform", 1.0, 0.5), "init uniform: high is 0.5; allowed: low (1) or more"),
    (("uniform", -3e38, 3e38), "init uniform: high - low is inf; allowed: a finite number"),
    (("normal", math.nan, 1.0), "init normal: mean is nan; allowed: a finite number"),
    (("normal", 0.0, math.nan), "init normal: std is nan; allowed: a finite number"),
    (("normal", 0.0, -1.0), "init normal: std is -1; allowed: 0 or more"),
    (("normal", 0.0, 1e38), "init normal: |mean| + 7 std is inf; allowed: a finite number"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_values_that_cannot_run_are_refused_by_name(spec: tuple[str, float, float], message: str) -> None:
    with pytest.raises(_core.CoreError) as caught:
        _core.update.check(_core.InitSpec(*spec))
    assert (caught.value.code, str(caught.value)) == (1, message)


def test_an_unknown_kind_is_refused_with_the_list() -> None:
    with pytest.raises(_core.CoreError, match="init kind is 'xavier'; allowed: zeros, constant"):
        _core.InitSpec("xavier")
