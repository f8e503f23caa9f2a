"""The timed loops. They run in worker processes, on any `Store`, so that every system is timed alike."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.contender import LR, Keys, Rows, Spec, Store, first_rows, request_ids

# Returns in all workers at the same instant of the monotonic clock, and returns that instant.
Gate = Callable[[], float]
REQUEST_IDS = 8192 * 26
_REQUESTS = 4  # Different requests in turn: no system may profit from asking for the same rows again.


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Which ids a worker asks for, drawn in its own process."""

    rows: int
    seed: int
    among: int = 0  # 0 = skewed over all rows; otherwise uniform over that many rows, spread evenly

    def draw(self) -> list[Keys]:
        if not self.among:
            return [request_ids(self.rows, REQUEST_IDS, self.seed + i) for i in range(_REQUESTS)]
        rng, stride = np.random.default_rng(self.seed), self.rows // self.among
        return [rng.integers(0, self.among, REQUEST_IDS) * stride for _ in range(_REQUESTS)]


def gradients(dim: int, count: int = REQUEST_IDS) -> Rows:
    return np.random.default_rng(3).standard_normal((count, dim), dtype=np.float32) * np.float32(0.01)


def check(store: Store, spec: Spec, abilities: frozenset[str]) -> None:
    """Refuses to time a system that does other work: values as born, duplicates summed, one step."""
    if spec.dense_elements:
        if "dense" in abilities:
            weight = np.asarray(store.exchange_dense(np.ones(spec.dense_elements, np.float32)))
            _equal(
                weight.reshape(-1, 1)[[0, -1]], np.full((2, 1), -LR, np.float32), "SGD moved to a wrong place"
            )
        return
    keys = request_ids(spec.rows, 1000, 99)
    expected = first_rows(keys, spec.dim)
    _equal(store.pull(keys), expected, "pulled rows are not those that were born")
    if "push" in abilities:
        # The first Adagrad step moves a row by lr whatever the gradient's size; SGD moves it by the sum.
        store.push(keys, np.full_like(expected, 0.5))
        counts = np.unique(keys, return_inverse=True, return_counts=True)
        moved = LR if spec.optimizer != "sgd" else LR * 0.5 * counts[2][counts[1]].reshape(-1, 1)
        _equal(store.pull(keys), expected - moved, f"{spec.optimizer} moved rows to a wrong place")


def pull_rate(store: Store, spec: Spec, seconds: float) -> float:
    """Ids per second of pulls, one after the other."""
    requests = Requests(rows=spec.rows, seed=10).draw()

    def one(i: int) -> None:
        store.pull(requests[i % _REQUESTS])

    return REQUEST_IDS / _seconds_per_round(one, seconds)


def push_rate(store: Store, spec: Spec, seconds: float) -> float:
    """Ids per second of acknowledged pushes, one after the other."""
    requests, grads = Requests(rows=spec.rows, seed=10).draw(), gradients(spec.dim)

    def one(i: int) -> None:
        store.push(requests[i % _REQUESTS], grads)

    return REQUEST_IDS / _seconds_per_round(one, seconds)


def small_pull_latency(store: Store, spec: Spec, count: int) -> tuple[float, float]:
    """p50 and p99 in microseconds of pulls of 100 ids."""
    requests = [request_ids(spec.rows, 100, 1000 + i) for i in range(64)]
    for i in range(max(100, count // 10)):
        store.pull(requests[i % 64])
    took_ns = np.empty(count)
    for i in range(count):
        begin = time.perf_counter_ns()
        store.pull(requests[i % 64])
        took_ns[i] = time.perf_counter_ns() - begin
    p50, p99 = np.percentile(took_ns, [50, 99]) / 1000
    return float(p50), float(p99)


def pull_push_rate(store: Store, gate: Gate, requests: Requests, dim: int, seconds: float) -> float:
    """Ids per second of pull + push rounds over a window that all workers share."""
    keys = requests.draw()
    grads = gradients(dim, keys[0].size)

    def one(i: int) -> None:
        store.pull(keys[i % len(keys)])
        store.push(keys[i % len(keys)], grads)

    return keys[0].size * _rounds_in_window(one, gate, seconds) / seconds


def dense_rate(store: Store, gate: Gate, elements: int, seconds: float) -> float:
    """Bytes per second both ways over a window that all workers share: gradients up, parameters down."""
    grad = np.full(elements, 1e-6, np.float32)
    return 2 * grad.nbytes * _rounds_in_window(lambda _: store.exchange_dense(grad), gate, seconds) / seconds


def _rounds_in_window(one: Callable[[int], Any], gate: Gate, seconds: float) -> float:
    """Rounds done in the window; the round that its end cuts counts as its share. One round warms up."""
    one(0)
    rounds, end = 0, gate() + seconds
    while True:
        begin = time.monotonic()
        one(rounds)
        now = time.monotonic()
        if now >= end:
            return rounds + max(0.0, end - begin) / (now - begin)
        rounds += 1


def _seconds_per_round(one: Callable[[int], Any], seconds: float) -> float:
    for i in range(3):
        one(i)
    rounds, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds or rounds < 3:
        one(rounds)
        rounds += 1
    return took / rounds


def _equal(got: Any, expected: Rows, problem: str) -> None:
    if not np.allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-5):
        raise ValueError(f"{problem}: first row {np.asarray(got)[0, :4]}, expected {expected[0, :4]}")
