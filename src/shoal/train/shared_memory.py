"""Parameters in memory that the workers of one host share."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.errors import BadInput
from shoal.train.parameters import Dense

if TYPE_CHECKING:
    from shoal.train.worker import Worker

__all__ = ["share_memory"]

_lock = threading.Lock()
_of_threads: dict[tuple[int, str], torch.Tensor] = {}


def share_memory(worker: Worker, dense: Sequence[Dense]) -> None:
    """Put the values of `dense` where every worker of this job sees them. All hold the same values before."""
    if worker.world_size == 1 or not dense:
        return
    for entry in dense:
        if entry.parameter.dtype != torch.float32 or entry.parameter.device.type != "cpu":
            raise BadInput(
                f"parameter {entry.name} is {entry.parameter.dtype} on {entry.parameter.device}; hogwild "
                f"shares "
                f"float32 parameters in the memory of one host"
            )
    memory = _memory(worker, sum(entry.parameter.numel() for entry in dense))
    at = 0
    for entry in dense:
        view = memory[at : at + entry.parameter.numel()].view(entry.parameter.shape)
        # Everybody writes the same values (rank 0's) before anybody steps: see the barrier below.
        view.copy_(entry.parameter.data)
        entry.parameter.data = view
        at += entry.parameter.numel()
    worker.barrier()


def _memory(worker: Worker, floats: int) -> torch.Tensor:
    if worker.threads is not None:
        with _lock:
            return _of_threads.setdefault((id(worker.threads), "dense"), torch.empty(floats))
    if worker.job is None:
        raise BadInput(
            "hogwild needs a directory that the workers of this host share: start them with `shoal run`"
        )
    path = worker.job / "hogwild"
    _grow(path, 4 * floats)
    worker.barrier()
    with path.open("r+b") as file:
        if os.fstat(file.fileno()).st_size != 4 * floats:
            raise BadInput(f"workers disagree on the number of parameters: this one has {floats}")
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 4 * floats), np.float32))


def _grow(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)
