"""Several tables and tensors at once: one request per server, whatever their number."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shoal import _core
from shoal.store.table import Table, check_lr
from shoal.store.tensor import Tensor

if TYPE_CHECKING:
    from shoal.store.client import Client

__all__ = ["Pull", "Push", "pull_many", "push_many"]

# A table and keys, or a tensor and None; then memory for the rows, or None.
Pull: TypeAlias = tuple["Table | Tensor", Any, Any]
# A table and keys, or a tensor and None; gradients; lr, or None for the table's own.
Push: TypeAlias = tuple["Table | Tensor", Any, Any, "float | None"]


def pull_many(client: Client, pulls: Sequence[Pull], timeout: float | None = None) -> list[Any]:
    """The rows of each, in order; 1-d keys give (n, dim) arrays, a tensor gives a flat one."""
    session = client._session
    started, seconds = time.monotonic(), session.deadline(timeout)
    items = [(handle._id, keys, out) for handle, keys, out in pulls]
    try:
        ticket = session.core.pull_many(items, codec="fp32", timeout_s=seconds)
        return list(ticket.wait(max(0.0, started + seconds - time.monotonic())))
    except _core.CoreError as error:
        raise session.error(error, _names([pull[0] for pull in pulls])) from None


def push_many(
    client: Client,
    pushes: Sequence[Push],
    *,
    step: int = 0,
    stage_rank: int = -1,
    by_staleness: bool = False,
    timeout: float | None = None,
) -> None:
    """Apply gradients to each (or stage them, for the round of `step`), as one push with one identity."""
    session = client._session
    started, seconds = time.monotonic(), session.deadline(timeout)
    where = _names([push[0] for push in pushes])
    items = [
        (
            handle._id,
            keys,
            np.ascontiguousarray(grads, dtype=np.float32),
            math.nan if lr is None else check_lr(lr, where),
        )
        for handle, keys, grads, lr in pushes
    ]
    try:
        ticket = session.core.push_many(
            items,
            step=step,
            stage_rank=stage_rank,
            by_staleness=by_staleness,
            codec="fp32",
            timeout_s=seconds,
        )
        ticket.wait(max(0.0, started + seconds - time.monotonic()))
    except _core.CoreError as error:
        raise session.error(error, where) from None


def _names(handles: Sequence[Table | Tensor]) -> str:
    """For messages: the first few."""
    names = [handle._where for handle in handles[:3]]
    more = f" and {len(handles) - 3} more" if len(handles) > 3 else ""
    return ", ".join(names) + more
