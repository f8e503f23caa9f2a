"""Parameters in memory that the workers of one host share."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.errors import BadInput
from shoal.train.parameters import Dense, FlatFloats, flat

if TYPE_CHECKING:
    from shoal.train.worker import Worker


def share_memory(worker: Worker, dense: Sequence[Dense], number: int) -> None:
    """Put `dense` where every worker of this job sees it: in memory `number`, at first rank 0's values.

    What is there already is taken over: a worker may replace one that died.
    """
    if worker.world_size == 1 or not dense:
        return
    for entry in dense:
        if entry.parameter.dtype != torch.float32 or entry.parameter.device.type != "cpu":
            raise BadInput(
                f"parameter {entry.name} is {entry.parameter.dtype} on {entry.parameter.device}; hogwild "
                f"shares "
                f"float32 parameters in the memory of one host"
            )
    values = np.concatenate([flat(entry.parameter) for entry in dense])
    memory = _memory(worker, values, number)
    at = 0
    for entry in dense:
        entry.parameter.data = memory[at : at + entry.parameter.numel()].view(entry.parameter.shape)
        at += entry.parameter.numel()


def _memory(worker: Worker, values: FlatFloats, number: int) -> torch.Tensor:
    if worker.threads is not None:
        if worker.rank == 0:
            worker.threads[number] = torch.from_numpy(values)
        worker.barrier()
        return worker.threads[number]
    if worker.job is None:
        raise BadInput(
            "hogwild needs a directory that the workers of this host share: start them with `shoal run`"
        )
    path = worker.job / "shared" / f"{number}.float32"
    if worker.rank == 0 and not path.exists():
        _write_whole(path, values)
    worker.barrier()
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    if len(mapped) != values.nbytes:
        raise BadInput(
            f"workers disagree on the number of parameters: rank 0 has {len(mapped) // 4}, rank "
            f"{worker.rank} {values.size}"
        )
    return torch.from_numpy(np.frombuffer(mapped, np.float32))


def _write_whole(path: Path, values: FlatFloats) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_bytes(values.tobytes())
    temporary.replace(path)
