"""Who mixes with whom, and by how much, where there is no server: a ring.

The matrix of all weights is symmetric and doubly stochastic, so mixing leaves the mean of the models as it
is; its other eigenvalues are all below 1 in size, so repeated mixing brings every model to that mean.
"""

from __future__ import annotations

from shoal.errors import BadInput


def mixing(n: int, rank: int) -> dict[int, float]:
    """Weights of the models that worker `rank` of `n` mixes, by rank; its own first.

    >>> mixing(2, 0)
    {0: 0.5, 1: 0.5}
    >>> sorted(mixing(5, 0))
    [0, 1, 4]
    """
    if n < 1 or not 0 <= rank < n:
        raise BadInput(f"mixing: rank is {rank} of {n} workers; it must be from 0 to n - 1")
    ring = dict.fromkeys([rank, (rank - 1) % n, (rank + 1) % n])
    return dict.fromkeys(ring, 1 / len(ring))
