"""Tables in a state_dict: `weight.keys` and `weight.values`, or torch's own `weight` as keys 0 to N-1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.errors import BadInput
from shoal.store.table import Table

_BATCH_ROWS = 65536


@dataclass
class LoadReport:
    """What torch asks of a load: names that were missing or not expected, and why values did not fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def save_rows(table: Table, rows_max: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a table, sorted by key: keys int64 (n,), values float32 (n, dim)."""
    rows = len(table)
    if rows > rows_max:
        raise BadInput(
            f"table {table.name!r} has {rows} rows; a state_dict holds tables of up to {rows_max} "
            f"(state_dict_rows_max). Save it with worker.save(url)"
        )
    keys, values = np.empty(0, np.int64), np.empty((0, table.dim), np.float32)
    batches = list(table.scan(_BATCH_ROWS))
    if batches:
        keys = np.concatenate([batch[0] for batch in batches])
        values = np.concatenate([batch[1] for batch in batches])
    order = np.argsort(keys)
    return torch.from_numpy(keys[order]), torch.from_numpy(values[order])


def load_rows(
    state: Mapping[str, torch.Tensor],
    name: str,
    table: Table | None,
    dim: int,
    padding_idx: int | None,
    assign_by: Callable[[Callable[[], None]], None],
) -> LoadReport:
    """Assign the rows that `state` has under `name` ("...weight"). Rows that it does not have stay.

    Without a table (the module is not bound) only an empty handle can be taken. `assign_by` is given what
    assigns them.
    """
    names = (f"{name}.keys", f"{name}.values")
    report = LoadReport(unexpected=[key for key in state if key not in (name, *names)])
    if name in state and not any(key in state for key in names):
        values = state[name]
        keys = torch.arange(values.shape[0] if values.dim() else 0)
    else:
        report.missing = [key for key in names if key not in state]
        report.unexpected += [name] if name in state else []
        if report.missing:
            return report
        keys, values = (state[key] for key in names)
    if keys.dim() != 1 or keys.dtype != torch.int64 or values.shape != (len(keys), dim):
        report.errors.append(
            f"size mismatch for {name}: keys are {keys.dtype} of shape {tuple(keys.shape)} and values have "
            f"shape {tuple(values.shape)}; expected int64 of (N,) and values of (N, {dim})."
        )
    elif len(keys) and table is None:
        report.errors.append(
            f"{name} has {len(keys)} rows and its module is not bound to a store. Load after "
            f"worker.prepare(...), or after module.bind(client)."
        )
    elif table is not None:
        assign_by(lambda: _assign(table, keys.cpu(), values, padding_idx))
    return report


def _assign(table: Table, keys: torch.Tensor, values: torch.Tensor, padding_idx: int | None) -> None:
    for start in range(0, len(keys), _BATCH_ROWS):
        some = keys[start : start + _BATCH_ROWS]
        rows = values[start : start + _BATCH_ROWS].detach().to("cpu", torch.float32)
        if padding_idx is not None:
            kept = some != padding_idx
            some, rows = some[kept], rows[kept]
        table.assign(some, rows)
