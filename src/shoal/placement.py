"""Which shard a key lies in: by hash, unless a table asks for ranges."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import BadInput

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Range:
    """Placement by key range: shard i holds the i-th equal part of [low, high).

    Neighbouring keys then lie on one server. Choose it when keys are dense and touched evenly, or when
    scans by range matter; hashing, the default, spreads any pattern of keys. Keys outside of
    [low, high) are allowed; they lie in the first or last shard.

    >>> Range(0, 1_000_000)
    Range(low=0, high=1000000)
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise BadInput(f"Range: {name} is {value!r}; it must be an int")
        if not _INT64_MIN <= self.low < self.high <= _INT64_MAX:
            raise BadInput(f"Range({self.low}, {self.high}): low must be below high, both 64-bit")
