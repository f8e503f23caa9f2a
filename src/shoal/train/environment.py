"""What the environment says about this worker: its rank, its job and how it synchronises.

`shoal run` writes these variables for the workers that it starts (`shoal.launch.worker_environment`).
Where torchrun starts them, its RANK and WORLD_SIZE are taken, and SHOAL_ADDRESS says where the servers are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.config import check_count, check_timeout, read_environment
from shoal.errors import BadInput
from shoal.sync.words import check_word

WORKERS_MAX = 4096
SEED_MAX = (1 << 63) - 1
# split: each worker takes a part of every batch of the loader; each: every worker takes whole ones.
BATCHES = ("split", "each")


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """Who this worker is; None = the variable is not set, and `shoal.join` decides."""

    rank: int = 0  # SHOAL_RANK, else RANK
    world_size: int = 1  # SHOAL_WORLD_SIZE, else WORLD_SIZE
    address: str | None = None  # SHOAL_ADDRESS; without it this worker is alone, with a store of its own
    sync: str | None = None  # SHOAL_SYNC: a word of `shoal.sync.words`
    batch: str | None = None  # SHOAL_BATCH: split or each
    seed: int | None = None  # SHOAL_SEED
    job: Path | None = None  # SHOAL_JOB: the directory of the job, where progress is reported
    wait_s: float | None = None  # SHOAL_WAIT_S: how long it waits for other workers before it gives up
    straggler: str | None = None  # SHOAL_STRAGGLER: how slow this worker is made, as 5x or 50ms
    nan: bool = False  # SHOAL_NAN: it abstains from a step that is not finite, and does not raise
    history: bool = False  # SHOAL_HISTORY: workers begin together, and keep what they do (`shoal compare`)

    @property
    def alone(self) -> bool:
        """Whether nobody started this worker as a part of something."""
        return self.address is None


def check_batch(batch: str) -> str:
    """`batch` if there is such a way to hand out batches."""
    if batch not in BATCHES:
        raise BadInput(
            f"batch is {batch!r}; allowed: split (the loader's batch is cut over the workers) or "
            "each (every worker takes whole batches)"
        )
    return batch


def read_worker_environment(environ: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """The worker that `environ` (default: that of this process) describes. An empty variable is not set.

    >>> read_worker_environment({"RANK": "1", "WORLD_SIZE": "2", "SHOAL_ADDRESS": "shoal://h:1"}).rank
    1
    >>> read_worker_environment({}).alone
    True
    """
    source = os.environ if environ is None else environ
    rank, world_size = _place(source)
    sync, batch, job = (source.get(f"SHOAL_{name}") or None for name in ("SYNC", "BATCH", "JOB"))
    seed = source.get("SHOAL_SEED") or None
    return WorkerEnvironment(
        rank=rank,
        world_size=world_size,
        address=read_environment(source).address,
        sync=None if sync is None else check_word(sync),
        batch=None if batch is None else check_batch(batch),
        seed=None if seed is None else check_count("SHOAL_SEED", _whole("SHOAL_SEED", seed), 0, SEED_MAX),
        job=None if job is None else Path(job),
        wait_s=_seconds("SHOAL_WAIT_S", source.get("SHOAL_WAIT_S")),
        straggler=source.get("SHOAL_STRAGGLER") or None,
        nan=bool(source.get("SHOAL_NAN")),
        history=bool(source.get("SHOAL_HISTORY")),
    )


def _place(source: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world size); (0, 1) where no variable says so."""
    for prefix in ("SHOAL_", ""):
        names = (f"{prefix}RANK", f"{prefix}WORLD_SIZE")
        given = [name for name in names if source.get(name)]
        if len(given) == 1:
            missing = next(name for name in names if name not in given)
            raise BadInput(f"{given[0]} is set and {missing} is not; a worker needs both, or neither")
        if given:
            world_size = check_count(names[1], _whole(names[1], source[names[1]]), 1, WORKERS_MAX)
            why = f", since {names[1]} is {world_size}"
            rank = check_count(names[0], _whole(names[0], source[names[0]]), 0, world_size - 1, why)
            return rank, world_size
    return 0, 1


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"{name} is {text!r}; allowed: a whole number") from None


def _seconds(name: str, text: str | None) -> float | None:
    try:
        return check_timeout(float(text)) if text else None
    except ValueError:
        raise BadInput(f"{name} is {text!r}; it must be a number of seconds above 0") from None
