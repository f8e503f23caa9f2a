"""How many samples a collated batch holds. Looks at shapes only; torch is not needed to do so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from shoal.errors import BadInput

_DEPTH_MAX = 16


def samples_in(batch: Any) -> int:
    """The first dimension that all arrays of a batch share; lists of texts or numbers count, too.

    Arrays without dimensions, single numbers and None say nothing. BadInput when nothing says it, or when
    parts disagree, as the ids and offsets of bags do.

    >>> import numpy as np
    >>> samples_in({"x": np.zeros((4, 2)), "meta": [np.zeros(4), ["a", "b", "c", "d"]]})
    4
    """
    sizes = set(_sizes(batch, 0))
    if len(sizes) == 1:
        return sizes.pop()
    seen = f"its parts hold {', '.join(map(str, sorted(sizes)))}" if sizes else "no part of it has a length"
    raise BadInput(
        f"how many samples are in this batch ({type(batch).__name__})? {seen}; "
        f"say it before optimizer.step() with worker.weight(n)"
    )


def _sizes(value: Any, depth: int) -> Iterator[int]:
    if value is None or isinstance(value, str | bytes) or depth > _DEPTH_MAX:
        return
    if hasattr(value, "batch_sizes") and hasattr(value, "data"):  # a PackedSequence, which is a tuple as well
        yield int(value.batch_sizes[0])
    elif (size := _array_size(value)) is not None:
        if size >= 0:
            yield size
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _sizes(part, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _sizes(getattr(value, field.name), depth + 1)
    elif isinstance(value, Sequence):
        if value and all(isinstance(part, str | bytes | int | float) for part in value):
            yield len(value)
        else:
            for part in value:
                yield from _sizes(part, depth + 1)


def _array_size(value: Any) -> int | None:
    """The first dimension of an array, -1 if it has none, None if it is no array."""
    if hasattr(value, "dim") and hasattr(value, "size"):  # torch, nested tensors included
        return int(value.size(0)) if value.dim() else -1
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple):
        return None
    return int(shape[0]) if shape else -1
