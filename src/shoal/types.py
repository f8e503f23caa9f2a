"""Words for types that several modules share. Nothing here runs.

Arrays that people hand in are `Any` on purpose: NumPy arrays, torch tensors and lists are told apart at
run time (`shoal.store.arrays`), and torch must not be imported to name its type.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Lane: TypeAlias = Literal["auto", "shm", "unix", "tcp"]
Reads: TypeAlias = Literal["strong", "any"]
Codec: TypeAlias = Literal["fp32", "fp16", "bf16", "int8"]
KeyArray: TypeAlias = NDArray[np.int64]
FloatRows: TypeAlias = NDArray[np.float32]
ArrayLike: TypeAlias = Any


class Waitable(Protocol):
    """One operation in flight."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation is finished; raise `shoal.errors.Timeout` after `timeout` seconds."""
        ...
