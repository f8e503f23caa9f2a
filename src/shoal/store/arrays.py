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

_INT64 = np.dtype(np.int64)
_INT32 = np.dtype(np.int32)
_UINT64 = np.dtype(np.uint64)
_FLOAT32 = np.dtype(np.float32)
# Python's own hash() differs from process to process.
_TEXT_ADVICE = (
    "Strings are hashed by the caller, to the same int64 in every process: "
    "int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'little', signed=True)"
)


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
    elif keys.size == 0 and dtype.kind in "fO":
        keys = keys.astype(np.int64)  # what [], np.array([]) and torch.tensor([]) give
    else:
        raise _refused_keys(keys, where)
    # ascontiguousarray makes a scalar one-dimensional, so it is not called in vain.
    return keys if keys.flags.c_contiguous else np.ascontiguousarray(keys)


def as_floats(values: ArrayLike, shape: tuple[int, ...], name: str, where: str) -> FloatRows:
    """Contiguous float32 `values` of exactly `shape`; no copy where they are that already."""
    if type(values) is not np.ndarray:
        values = _float_array(values, name, where)
    if values.dtype != _FLOAT32:
        raise BadInput(
            f"{where}: {name} {_are(name)} {values.dtype}; allowed: float32. "
            f"Convert {_them(name)}: {name}.astype(np.float32), or {name}.float() in torch"
        )
    if values.shape != shape:
        have = "have" if name.endswith("s") else "has"
        raise BadInput(f"{where}: {name} {have} shape {values.shape}; expected {shape}")
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
    if isinstance(keys, list | tuple | range | int):
        if _has_bool(keys):
            raise BadInput(f"{where}: keys hold a bool; allowed: whole numbers")
        array = _from_list(keys, "keys", where)
        if array.dtype.kind != "f":
            return array
        # NumPy makes floats of whole numbers that no integer dtype holds together, as 2**63 and -1.
        numbers = np.asarray(keys, dtype=object)
        return numbers if all(isinstance(number, int | np.integer) for number in numbers.flat) else array
    advice = f". {_TEXT_ADVICE}" if isinstance(keys, str | bytes) else ""
    raise BadInput(
        f"{where}: keys are a {type(keys).__name__}; "
        f"allowed: a NumPy array, a torch tensor or a list of whole numbers{advice}"
    )


def _refused_keys(keys: NDArray[Any], where: str) -> BadInput:
    elements = keys.reshape(-1).tolist() if keys.dtype.kind == "O" else []
    for number in elements:
        if isinstance(number, int | np.integer) and not -(1 << 63) <= number < 1 << 63:
            return BadInput(
                f"{where}: keys hold {number}; allowed: -2**63 to 2**63 - 1, "
                f"or 0 to 2**64 - 1 where none is negative (uint64)"
            )
    advice = "If they are whole numbers, convert them: keys.astype(np.int64), or keys.long() in torch"
    if keys.dtype.kind in "SUT" or any(isinstance(element, str | bytes) for element in elements):
        advice = _TEXT_ADVICE
    return BadInput(f"{where}: keys are {keys.dtype}; allowed: int64, int32, uint64. {advice}")


def _float_array(values: ArrayLike, name: str, where: str) -> NDArray[Any]:
    if is_torch(values):
        return _tensor_memory(values, name, where)
    if isinstance(values, np.ndarray | np.generic):
        return np.asarray(values)
    if isinstance(values, list | tuple | float | int) and not _has_bool(values):
        array = _from_list(values, name, where)
        return array.astype(np.float32) if array.dtype.kind in "iuf" else array
    raise BadInput(
        f"{where}: {name} {_are(name)} a {type(values).__name__}; "
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
        seen = f"{name} {_are(name)} on {tensor.device}"
        raise BadInput(f"{where}: {seen}; allowed: cpu. Move {_them(name)}: {name}.cpu()")
    try:
        array: NDArray[Any] = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise BadInput(f"{where}: {name} of {tensor.dtype} cannot be read: {error}") from None
    return array


def _are(name: str) -> str:
    return "are" if name.endswith("s") else "is"


def _them(name: str) -> str:
    return "them" if name.endswith("s") else "it"
