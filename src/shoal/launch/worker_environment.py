"""The variables that a worker is started with; `shoal.train.environment` reads them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.health import parse_policies
from shoal.launch.options import JobOptions
from shoal.train.straggler import parse_stragglers

# Of the supervisor's own environment: a token there would be taken before the file of this cluster.
_DROPPED = frozenset({"SHOAL_TOKEN"})


@dataclass(frozen=True, kw_only=True)
class JobAddress:
    """Where the workers of one job find everything."""

    address: str
    token_file: Path
    directory: Path
    # For torch.distributed: rank 0 listens there.
    master_port: int


def worker_environment(
    options: JobOptions, where: JobAddress, rank: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of worker `rank`: `base`, and what the job says."""
    said = {
        "SHOAL_ADDRESS": where.address,
        "SHOAL_TOKEN_FILE": str(where.token_file),
        "SHOAL_RANK": str(rank),
        "SHOAL_WORLD_SIZE": str(options.workers),
        "SHOAL_SYNC": options.word,
        "SHOAL_BATCH": options.batch,
        "SHOAL_SEED": str(options.seed),
        "SHOAL_JOB": str(where.directory),
        "SHOAL_STRAGGLER": parse_stragglers(options.straggler, options.workers).get(rank, ""),
        "SHOAL_HISTORY": "1" if options.history else "",
        "SHOAL_NAN": "" if parse_policies(options.on_trouble)["nan"] == "raise" else "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(options.workers),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(where.master_port),
    }
    # Each worker would otherwise start as many threads as there are cores, and they would fight over them.
    cores = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": str(max(1, cores // options.workers))}
    kept = {name: value for name, value in base.items() if name not in _DROPPED}
    return {**threads, **kept, **said}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
