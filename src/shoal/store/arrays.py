"""Arrays at the door: NumPy, torch or lists in; contiguous int64 keys and float32 rows for the core out.

torch is never imported here. If the caller has imported it, its tensors are recognised and results go
back as tensors; both share the memory of the NumPy array in between. Inputs that are not contiguous are
copied, others are not. What cannot be taken is refused with the value seen, what is allowed and what to
try; `where` names the table in those messages.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BadInput
from shoal.types import ArrayLike, FloatRows, KeyArray

__all__ = ["as_floats", "as_keys", "as_out", "is_torch", "to_torch"]

_INT64 = np.dtype(np.int64)
_INT32 = np.dtype(np.int32)
_UINT64 = np.dtype(np.uint64)
_FLOAT32 = np.dtype(np.float32)


def is_torch(array: object) -> bool:
    """Whether `array` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def to_torch(array: NDArray[Any]) -> Any:
    """A tensor on the same memory. Only for callers who gave a tensor, so torch is there."""
    return sys.modules["torch"].from_numpy(array)


def as_keys(keys: ArrayLike, where: str) -> KeyArray:
    """Contiguous int64 keys of the same shape; no copy where they are that already."""
    if type(keys) is not np.ndarray:
        keys = _key_array(keys, where)
    dtype = keys.dtype
    if dtype == _INT64:
        pass
    elif dtype == _UINT64:
        keys = keys.view(np.int64) if keys.flags.c_contiguous else keys.astype(np.uint64).view(np.int64)
    elif dtype == _INT32:
        keys = keys.astype(np.int64)
    else:
        raise BadInput(
            f"{where}: keys are {dtype}; allowed: int64, int32, uint64. If they are whole numbers, "
            f"convert them: keys.astype('int64') or keys.long()"
        )
    # ascontiguousarray makes a scalar one-dimensional, so it is not called in vain.
    return keys if keys.flags.c_contiguous else np.ascontiguousarray(keys)


def as_floats(values: ArrayLike, shape: tuple[int, ...], name: str, where: str) -> FloatRows:
    """Contiguous float32 `values` of exactly `shape`; no copy where they are that already."""
    if type(values) is not np.ndarray:
        values = _float_array(values, name, where)
    if values.dtype != _FLOAT32:
        raise BadInput(
            f"{where}: {name} are {values.dtype}; allowed: float32. "
            f"Convert them: {name}.astype('float32') or {name}.float()"
        )
    if values.shape != shape:
        raise BadInput(f"{where}: {name} have shape {values.shape}; expected {shape}")
    return values if values.flags.c_contiguous else np.ascontiguousarray(values)


def as_out(out: ArrayLike, shape: tuple[int, ...], where: str) -> FloatRows:
    """The memory of `out`, to be written in place: float32, of exactly `shape`, contiguous, writable."""
    array = _tensor_memory(out, "out", where) if is_torch(out) else out
    if not isinstance(array, np.ndarray):
        raise BadInput(f"{where}: out is a {type(out).__name__}; allowed: a NumPy array or a torch tensor")
    if array.dtype != _FLOAT32 or array.shape != shape:
        raise BadInput(f"{where}: out is {array.dtype} of shape {array.shape}; expected float32 of {shape}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise BadInput(f"{where}: out must be contiguous and writable, since it is filled in place")
    return array


def _key_array(keys: ArrayLike, where: str) -> NDArray[Any]:
    if is_torch(keys):
        return _tensor_memory(keys, "keys", where)
    if isinstance(keys, np.ndarray | np.generic):
        return np.asarray(keys)
    if isinstance(keys, list | tuple | range):
        if _has_bool(keys):
            raise BadInput(f"{where}: keys hold a bool; allowed: whole numbers")
        array = _from_list(keys, "keys", where)
        return array.astype(np.int64) if array.size == 0 else array
    if isinstance(keys, int) and not isinstance(keys, bool):
        return _from_list(keys, "keys", where)
    raise BadInput(
        f"{where}: keys are a {type(keys).__name__}; "
        f"allowed: a NumPy array, a torch tensor or a list of whole numbers"
    )


def _float_array(values: ArrayLike, name: str, where: str) -> NDArray[Any]:
    if is_torch(values):
        return _tensor_memory(values, name, where)
    if isinstance(values, np.ndarray | np.generic):
        return np.asarray(values)
    if isinstance(values, list | tuple | float | int) and not _has_bool(values):
        array = _from_list(values, name, where)
        return array.astype(np.float32) if array.dtype.kind in "iuf" else array
    raise BadInput(
        f"{where}: {name} are a {type(values).__name__}; "
        f"allowed: a NumPy array, a torch tensor or a list of numbers"
    )


def _from_list(values: Any, name: str, where: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"{where}: {name} cannot be made an array: {error}") from None


def _has_bool(values: Any) -> bool:
    if isinstance(values, list | tuple):
        return any(_has_bool(value) for value in values)
    return isinstance(values, bool)


def _tensor_memory(tensor: Any, name: str, where: str) -> NDArray[Any]:
    """A NumPy view of a tensor in CPU memory."""
    if tensor.device.type != "cpu":
        raise BadInput(f"{where}: {name} are on {tensor.device}; allowed: cpu. Move them: {name}.cpu()")
    try:
        array: NDArray[Any] = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise BadInput(f"{where}: {name} of {tensor.dtype} cannot be read: {error}") from None
    return array
