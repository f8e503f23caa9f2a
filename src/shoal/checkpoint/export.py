"""The values of a checkpoint in one safetensors file, for whoever serves or looks at the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shoal.checkpoint import shards
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.place import Place
from shoal.errors import BadInput
from shoal.store.catalogue import TableEntry

PIECE_FLOATS = 65536


def export(place: Place, manifest: Manifest, path: Path) -> dict[str, tuple[int, ...]]:
    """Write the user's tables as NAME.keys and NAME.values, tensors as NAME; their names and shapes.

    All of it is in memory at once. Optimizer state stays behind.
    """
    entries = {entry.id: entry for entry in manifest.tables if not entry.is_own}
    rows: dict[int, dict[int, np.ndarray]] = {number: {} for number in entries}
    for table, keys, found in shards.pages(place, manifest.name):
        if table not in entries:
            continue
        rows[table].update(zip(keys.tolist(), found[:, : _floats(entries[table])], strict=True))
    tensors: dict[str, np.ndarray] = {}
    for number, entry in entries.items():
        ordered = sorted(rows[number])
        if entry.shape is None:
            tensors[f"{entry.name}.keys"] = np.array(ordered, np.int64)
            values = [rows[number][key] for key in ordered]
            tensors[f"{entry.name}.values"] = np.array(values, np.float32).reshape(len(values), entry.dim)
        elif ordered:
            tensors[entry.name] = _dense(entry, rows[number])
    if not tensors:
        raise BadInput(
            f"checkpoint {manifest.name} holds no table and no tensor: under allreduce, gossip and hogwild "
            f"the model lies on the workers, and is in the checkpoint for them to go on with. Let the script "
            f"save model.state_dict() at its end"
        )
    try:
        save_file(tensors, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error}") from None
    return {name: tensor.shape for name, tensor in tensors.items()}


def _floats(entry: TableEntry) -> int | None:
    return entry.dim if entry.shape is None else None


def _dense(entry: TableEntry, pieces: dict[int, np.ndarray]) -> np.ndarray:
    whole = np.zeros(entry.dim, np.float32)
    for piece, row in pieces.items():
        place = whole[piece * PIECE_FLOATS : (piece + 1) * PIECE_FLOATS]
        place[:] = row[: len(place)]
    assert entry.shape is not None
    return whole.reshape(entry.shape)
