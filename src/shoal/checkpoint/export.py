"""The values of a checkpoint in one safetensors file, for whoever serves or looks at the model."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from errno import EINVAL, EISDIR
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from shoal.checkpoint import shards, states
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.place import Place
from shoal.errors import BadInput
from shoal.store.catalogue import TableEntry

PIECE_FLOATS = 65536
FIXED = "shoal.fixed."  # what leads the names of parameters that nobody steps
_KINDS = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BOOL": np.bool_, "U8": np.uint8},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8},
}
Tensors = dict[str, NDArray[Any]]


def export(place: Place, manifest: Manifest, path: Path) -> dict[str, tuple[int, ...]]:
    """Write a model's values by the names that its `state_dict` has; their names and shapes.

    What no trained model holds goes by its own name: a table as NAME.keys and NAME.values, a tensor as NAME.
    All of it is in memory at once. Optimizer state stays behind.
    """
    whole = path.resolve()  # a link stays one
    half = whole.with_name(f".{whole.name}.{secrets.token_hex(4)}")
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a directory")
        if path.exists() and not path.is_file():
            raise OSError(EINVAL, "it is no ordinary file")
        half.touch()  # before anything is read, which may be a lot
        found = _values(place, manifest)
        save_file(found, half)
        half.replace(whole)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)
    return {name: found[name].shape for name in sorted(found)}


def _values(place: Place, manifest: Manifest) -> Tensors:
    tables, tensors = _stored(place, manifest)
    names, more = _on_workers(place, manifest)
    tensors = more | tensors  # where both have a model, that of the servers is the job's
    found: Tensors = {key: tensors[source] for key, source in names.items() if source in tensors}
    found |= {name: tensors[name] for name in tensors.keys() - set(names.values())}
    for source, (keys, values) in tables.items():
        for name in [key for key, table in names.items() if table == source] or [source]:
            found |= {f"{name}.keys": keys, f"{name}.values": values}
    if not found:
        raise BadInput(f"checkpoint {manifest.name} holds no table, no tensor and no model of a worker")
    return found


def _stored(place: Place, manifest: Manifest) -> tuple[dict[str, tuple[NDArray[Any], NDArray[Any]]], Tensors]:
    """Keys and values of the tables, and the tensors, that the servers held."""
    entries = {one.id: one for one in manifest.tables if not one.is_own or one.name.startswith(FIXED)}
    rows: dict[int, dict[int, NDArray[Any]]] = {number: {} for number in entries}
    for table, keys, found in shards.pages(place, manifest.name):
        if table not in entries:
            continue
        floats = entries[table].dim if entries[table].shape is None else None
        rows[table].update(zip(keys.tolist(), found[:, :floats], strict=True))
    tables, tensors = {}, {}
    for number, entry in entries.items():
        ordered = sorted(rows[number])
        if entry.shape is None:
            values = np.array([rows[number][key] for key in ordered], np.float32)
            tables[entry.name] = np.array(ordered, np.int64), values.reshape(len(ordered), entry.dim)
        elif ordered:
            tensors[entry.name.removeprefix(FIXED)] = _dense(entry, rows[number])
    return tables, tensors


def _dense(entry: TableEntry, pieces: dict[int, NDArray[Any]]) -> NDArray[Any]:
    whole = np.zeros(entry.dim, np.float32)
    for piece, row in pieces.items():
        place = whole[piece * PIECE_FLOATS : (piece + 1) * PIECE_FLOATS]
        place[:] = row[: len(place)]
    assert entry.shape is not None
    return whole.reshape(entry.shape)


def _on_workers(place: Place, manifest: Manifest) -> tuple[dict[str, str], Tensors]:
    """What the keys of the model's `state_dict` are called here, and what of it lay on the lowest rank."""
    found = states.read(place, manifest.name, 0, common=True)
    if found is None:
        return {}, {}
    raw = dict(deserialize(found[1]))  # type: ignore[no-untyped-call]
    tree = states.from_plain(json.loads(bytes(raw[states.TREE]["data"])), raw)
    values = {name: one for part in tree["stepped"] for name, one in part["values"].items()}
    buffers = tree["buffers"]
    names = tree["names"] | {name: name for name in buffers}
    return names, {name: _array(name, one) for name, one in (values | buffers).items()}


def _array(name: str, raw: dict[str, Any]) -> NDArray[Any]:
    kind, shape = raw["dtype"], raw["shape"]
    if kind == "BF16":  # NumPy has none; each is a float32 whose lower half is zeros
        return (np.frombuffer(raw["data"], np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if kind not in _KINDS:
        raise BadInput(f"{name} is {kind}; an export holds {', '.join(sorted([*_KINDS, 'BF16']))}")
    return np.frombuffer(raw["data"], _KINDS[kind]).reshape(shape)
