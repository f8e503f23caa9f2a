"""Autoscale without processes: the fit, and jobs that are played through: planted speeds with noise, and what
real jobs showed (recordings/, by scripts/record_sizes).
"""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from shoal.errors import BadInput
from shoal.launch.autoscale import Autoscale, propose, shortened
from shoal.launch.options import JobOptions
from shoal.launch.throughput import Observation, fit, nnls

Curve = Callable[[int], float]


def optimus(shared: float, alone: float, each: float) -> Curve:
    return lambda n: 1000 / (shared / n + alone + each * n)


def collapsing(peak: int) -> Curve:
    return lambda n: 100.0 * (n if n <= peak else peak / 2)


CURVES: dict[str, Curve] = {
    "linear": lambda n: 100.0 * n,
    "saturating": optimus(1.0, 0.1, 0.0),
    "early peak": optimus(1.0, 0.1, 0.1),
    "late peak": optimus(1.0, 0.0, 0.01),
    "out of cores": lambda n: 100.0 * min(n, 5),
    "collapse": collapsing(5),
    "flat": lambda n: 100.0,
    "falling": lambda n: 100.0 / n,
    "steps": lambda n: 100.0 * (n // 4 + 1),
}


def play(curve: Curve, limits: Autoscale, begin: int, noise: float, windows: int, seed: int = 0) -> list[int]:
    """The sizes that the job of this curve is given, window by window."""
    rng = np.random.default_rng(seed)
    history: list[Observation] = []
    sizes = [begin]
    for _ in range(windows):
        speed = curve(sizes[-1]) * float(np.exp(noise * rng.standard_normal()))
        history = shortened([*history, Observation(sizes[-1], 1, speed)])
        sizes.append(propose(history, limits).workers)
    return sizes


def check(curve: Curve, limits: Autoscale, sizes: list[int]) -> None:
    """The size that is kept is within a tenth of the best."""
    assert limits.low <= min(sizes) <= max(sizes) <= limits.high
    assert len(set(sizes[-10:])) == 1, sizes
    assert curve(sizes[-1]) >= 0.9 * max(map(curve, range(limits.low, limits.high + 1))), sizes


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize(("low", "high", "begin"), [(2, 8, 2), (1, 16, 16), (1, 64, 4), (3, 3, 3)])
@pytest.mark.parametrize("name", CURVES)
def test_the_best_size_is_found_and_kept(name: str, low: int, high: int, begin: int, noise: float) -> None:
    limits = Autoscale(low=low, high=high)
    check(CURVES[name], limits, play(CURVES[name], limits, begin, noise, 50))


@pytest.mark.parametrize("name", CURVES)
def test_the_best_size_is_found_from_every_size(name: str) -> None:
    limits, sudden = Autoscale(low=1, high=64), name in ("collapse", "out of cores", "steps")
    for begin in range(1, 65, 1 if sudden else 7):
        check(CURVES[name], limits, play(CURVES[name], limits, begin, 0.0, 36))


@pytest.mark.parametrize(("low", "high"), [(1, 32), (2, 32), (1, 16), (2, 8)])
def test_a_peak_before_a_collapse_is_found_within_other_limits(low: int, high: int) -> None:
    limits = Autoscale(low=low, high=high)
    for curve in map(collapsing, (3, 5, 8, 20)):
        for begin in {low, (low + high) // 2, high - 1, high}:
            check(curve, limits, play(curve, limits, begin, 0.0, 36))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CURVES)
def test_noise_does_not_hide_the_best_size(name: str, seed: int) -> None:
    limits = Autoscale(low=1, high=64)
    for begin in (2, 13, 64):
        check(CURVES[name], limits, play(CURVES[name], limits, begin, 0.05, 50, seed))


def test_what_is_known_of_other_sizes_is_not_forgotten_in_a_long_stay() -> None:
    sizes = play(CURVES["early peak"], Autoscale(low=1, high=8), 8, 0.0, 400)
    assert len(set(sizes[30:])) == 1


RECORDINGS = Path(__file__).with_name("recordings")


@pytest.mark.parametrize("begin", ["least", "most"])
@pytest.mark.parametrize("name", ["ctr-asp", "ctr-bsp", "movielens-average"])
def test_the_best_size_of_a_recorded_job_is_found_and_kept(name: str, begin: str) -> None:
    """Windows are replayed in their order, and again from the first when there are no more."""
    recorded = json.loads((RECORDINGS / f"{name}.json").read_text())["sizes"]
    sizes = {size["workers"]: size["speeds"] for size in recorded}
    servers = recorded[0]["servers"]
    limits, now = Autoscale(low=min(sizes), high=max(sizes)), min(sizes) if begin == "least" else max(sizes)
    looks, history, chosen = {size: count() for size in sizes}, [], []
    for _ in range(50):
        speeds = sizes[now]
        history.append(Observation(now, servers, speeds[next(looks[now]) % len(speeds)]))
        now = propose(history, limits).workers
        chosen.append(now)
    assert len(set(chosen[-15:])) == 1, chosen
    assert median(sizes[now]) >= 0.9 * max(map(median, sizes.values())), (now, chosen)


def test_no_size_is_tried_above_twice_what_was_seen() -> None:
    sizes = play(CURVES["linear"], Autoscale(low=1, high=64), 1, 0.0, 30)
    assert all(after <= 2 * max(sizes[:at]) for at, after in enumerate(sizes) if at)
    assert sizes[-1] == 64


def test_a_job_that_becomes_another_is_looked_at_anew() -> None:
    curves = [CURVES["early peak"]] * 20 + [CURVES["linear"]] * 30
    history: list[Observation] = []
    sizes = [2]
    for curve in curves:
        history.append(Observation(sizes[-1], 1, curve(sizes[-1])))
        sizes.append(propose(history, Autoscale(low=2, high=8)).workers)
    assert (sizes[20], sizes[-1]) == (3, 8)


def test_the_model_finds_planted_parts_of_workers_and_servers() -> None:
    def speed(w: int, s: int) -> float:
        return 1 / (0.6 / w + 0.2 / s + 0.01 * w)

    seen = [
        Observation(w, s, speed(w, s)) for w, s in [(1, 1), (2, 1), (8, 1), (4, 2), (8, 4), (2, 4), (3, 3)]
    ]
    model = fit(seen)
    for w, s in [(5, 1), (16, 2), (6, 3)]:
        assert model.speed(w, s) == pytest.approx(speed(w, s), rel=0.01)
    assert model.doubt(64, 1) > model.doubt(5, 2)


def test_nnls_is_the_best_without_negative_parts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, values = rng.normal(size=(8, 4)), rng.normal(size=8)
        x = nnls(rows, values)
        slope = rows.T @ (rows @ x - values)  # the conditions of Karush, Kuhn and Tucker
        assert (x >= 0).all()
        assert (slope >= -1e-6).all()
        assert abs(slope @ x) < 1e-6


@pytest.mark.parametrize(
    "text", ["", "2", "8:2", "a:b", "2:8,every", "2:8,now", "2:8,every=1s,every=2s", "-1:2"]
)
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="it is written LOW:HIGH workers"):
        Autoscale.parse(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"autoscale": "3:8"},
            "workers is 2; allowed: a whole number from 3 to 8, the limits of --autoscale",
        ),
        ({"autoscale": "0:8"}, "autoscale, low is 0; allowed: a whole number from 1 to 4096"),
        ({"autoscale": "2:8,every=0s"}, "autoscale, every is '0s'; allowed: a number above 0 and s, m or h"),
    ],
)
def test_what_cannot_be_autoscaled_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        JobOptions(command=(__file__,), **options)
