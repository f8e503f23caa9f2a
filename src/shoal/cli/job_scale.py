"""`shoal scale`: other numbers of workers and servers for a job that runs; its supervisor carries it out."""

from __future__ import annotations

import time

from rich.console import Console

from shoal.config import SHARDS, check_count, counted
from shoal.errors import BadInput, Timeout
from shoal.launch.records import JobRecord, find_job
from shoal.train.environment import WORKERS_MAX

# Servers must have started by then.
_WAIT_S = 60.0
_LOOK_EVERY_S = 0.05


def scale(job: str | None, *, workers: int | None, servers: int | None) -> None:
    """Ask for so many workers and servers, and return when the job goes on with them."""
    asked = {"workers": workers, "servers": servers}
    sizes = {role: size for role, size in asked.items() if size is not None}
    if not sizes:
        raise BadInput("how many? shoal scale --workers 4, or --servers 2, or both")
    if workers is not None:
        check_count("workers", workers, 1, WORKERS_MAX)
    if servers is not None:
        check_count("servers", servers, 1, SHARDS, ", the number of shards")
    record = find_job(job)
    _check(record, sizes)
    since = time.time()
    record.ask_for_sizes(sizes)
    until = time.monotonic() + _WAIT_S
    while not sizes.items() <= (now := find_job(record.directory)).sizes.items():
        said = [event.text for event in now.events if event.time >= since]
        refused = [text for text in said if text.startswith("cannot go on")]
        if refused or now.state != "running":
            raise BadInput(f"job {now.name}: {refused[0] if refused else f'it is {now.state}'}")
        if time.monotonic() > until:
            raise Timeout(f"job {now.name}: its supervisor (pid {now.pid}) did not answer in {_WAIT_S:g} s")
        time.sleep(_LOOK_EVERY_S)
    text = " and ".join(counted(size, role.removesuffix("s")) for role, size in sizes.items())
    moving = "; shards move while it trains, see shoal status" if servers is not None else ""
    Console(soft_wrap=True, highlight=False).print(
        f"job {now.name} goes on with {text}{moving}", markup=False
    )


def _check(record: JobRecord, sizes: dict[str, int]) -> None:
    if record.state != "running" or not record.sizes:
        raise BadInput(f"job {record.name} is {record.state}; only a running one can be scaled")
    if (servers := sizes.get("servers")) is not None and record.replicas:
        copies = "1 replica needs" if record.replicas == 1 else f"{record.replicas} replicas need"
        why = f", the number of shards; {copies} as many servers, and one"
        check_count("servers", servers, record.replicas + 1, SHARDS, why)
