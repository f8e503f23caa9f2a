"""How fast a job is with so many workers and servers: a model fitted to what the job itself has shown.

The time of a sample is a sum of parts that can only cost, as Optimus (EuroSys 2018) has it for both
synchronous and asynchronous training: what workers share out, what nobody shares, what each further worker
adds, and the same for servers. So the fit is a least-squares one without negative coefficients. Errors are
relative: a fast size counts as much as a slow one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

# Windows at one size differ by so much; where they, or the fit, are worse than that it is trusted less.
_NOISE = 0.05
# Before anything was seen, a part may be this much of the whole time.
_PRIOR = 0.5


@dataclass(frozen=True)
class Observation:
    """Samples a second over some time at one size."""

    workers: int
    servers: int
    speed: float


@dataclass(frozen=True)
class Model:
    """A fit: what it expects of a size, and how sure that is."""

    unit: Observation  # sizes and speeds are relative to it
    parts: np.ndarray  # of a sample's time
    inverse: np.ndarray  # of what is known about the parts
    noise: float

    def speed(self, workers: int, servers: int) -> float:
        """Expected samples a second."""
        return self.expected([workers], servers)[workers][0]

    def doubt(self, workers: int, servers: int) -> float:
        """The standard error of that, as a part of it: where it is large, a look would teach much."""
        return self.expected([workers], servers)[workers][1]

    def expected(self, sizes: Sequence[int], servers: int) -> dict[int, tuple[float, float]]:
        """Speed and doubt of each of these numbers of workers."""
        rows = _features(np.array(sizes, float), np.full(len(sizes), float(servers)), self.unit)
        speeds = 1 / (rows @ self.parts)
        rows *= speeds[:, None]
        doubts = self.noise * np.sqrt(((rows @ self.inverse) * rows).sum(axis=1))
        pairs = zip((self.unit.speed * speeds).tolist(), doubts.tolist(), strict=True)
        return dict(zip(sizes, pairs, strict=True))


def fit(seen: Sequence[Observation]) -> Model:
    """The model of at least one observation, of which the last is the size that the job has now."""
    unit = seen[-1]
    sizes: dict[tuple[int, int], list[float]] = {}
    for one in seen:
        sizes.setdefault((one.workers, one.servers), []).append(one.speed)
    workers, servers = np.array(list(sizes), float).T
    speeds = np.array([median(values) for values in sizes.values()])
    rows = _features(workers, servers, unit) * (speeds / unit.speed)[:, None]
    spread = [v / speed - 1 for values, speed in zip(sizes.values(), speeds, strict=True) for v in values]
    ones = np.ones(len(sizes))
    parts = np.zeros(rows.shape[1])
    # With one number of servers nothing can be known of what servers cost.
    columns = 3 if len({count for _, count in sizes}) == 1 else rows.shape[1]
    parts[:columns] = nnls(rows[:, :columns], ones)
    noise = max(_NOISE, float(np.abs(rows @ parts - ones).max()), float(np.square(spread).mean()) ** 0.5)
    known = rows.T @ rows + (noise / _PRIOR) ** 2 * np.eye(rows.shape[1])
    return Model(unit, parts, np.linalg.inv(known), noise)


def nnls(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes |rows @ x - values| least, with as few parts above 0 as do it.

    The solution is the plain least-squares one of the columns that it uses. There are few columns, so all
    choices of them are tried.

    >>> nnls(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0])).round(6).tolist()
    [1.5, 0.0]
    """
    columns = rows.shape[1]
    best, least = np.zeros(columns), float(values @ values)
    for count in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), count)):
            solution = np.linalg.lstsq(rows[:, chosen], values, rcond=None)[0]
            error = float(np.sum((rows[:, chosen] @ solution - values) ** 2))
            if (solution >= 0).all() and error < least - 1e-9 * len(values):
                best, least = np.zeros(columns), error
                best[chosen] = solution
    return best


def _features(workers: np.ndarray, servers: np.ndarray, unit: Observation) -> np.ndarray:
    w, s = workers / unit.workers, servers / unit.servers
    return np.stack([1 / w, np.ones_like(w), w, 1 / s, w / s, s], axis=1)
