"""`shoal scale`: another number of workers for a job that runs; its supervisor carries it out."""

from __future__ import annotations

import time

from rich.console import Console

from shoal.config import check_count
from shoal.errors import BadInput, Timeout
from shoal.launch.options import elastic
from shoal.launch.records import find_job
from shoal.train.environment import WORKERS_MAX

__all__ = ["scale"]

_WAIT_S = 20.0
_LOOK_EVERY_S = 0.05


def scale(job: str | None, workers: int) -> None:
    """Ask for so many workers, and return when the job goes on with them."""
    check_count("workers", workers, 1, WORKERS_MAX)
    record = find_job(job)
    if record.state != "running" or record.size == 0:
        raise BadInput(f"job {record.name} is {record.state}; only a running one can be scaled")
    if not elastic(record.sync):
        raise BadInput(
            f"job {record.name} runs with sync {record.sync}, whose workers exchange models among "
            f"themselves; their number cannot change. Take another word, such as bsp"
        )
    before = len(record.events)
    record.ask_for_size(workers)
    until = time.monotonic() + _WAIT_S
    while (now := find_job(record.directory)).size != workers:
        refused = [event.text for event in now.events[before:] if event.text.startswith("cannot go on")]
        if refused or now.state != "running":
            raise BadInput(f"job {now.name}: {refused[0] if refused else f'it is {now.state}'}")
        if time.monotonic() > until:
            raise Timeout(f"job {now.name}: its supervisor (pid {now.pid}) did not answer in {_WAIT_S:g} s")
        time.sleep(_LOOK_EVERY_S)
    Console(soft_wrap=True, highlight=False).print(
        f"job {now.name} goes on with {workers} workers", markup=False
    )
