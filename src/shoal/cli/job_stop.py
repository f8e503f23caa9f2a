"""`shoal stop`: end a job by its supervisor, which ends the rest."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

from rich.console import Console

from shoal.launch.records import JobRecord, find_job

# The supervisor kills workers after five seconds and its servers after five more.
_WAIT_S = 30.0


def stop(job: str | None) -> None:
    """Stop the job, and return when it has ended."""
    record = find_job(job)
    console = Console(soft_wrap=True, highlight=False)
    if record.state in ("starting", "running") and _end(record):
        console.print(f"stopped job {record.name}", markup=False)
        return
    now = find_job(record.directory)
    how = "its supervisor was killed" if now.state == "lost" else f"code {now.code}"
    console.print(f"job {now.name} had ended already ({how})", markup=False)


def _end(record: JobRecord) -> bool:
    """Whether it ran, and so was ended by this."""
    try:
        supervisor = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return False
    try:
        # Asked after opening, so that it is this process and no later one of its number that is signalled.
        if not record.alive:
            return False
        poller = select.poll()
        poller.register(supervisor, select.POLLIN)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(supervisor, signal.SIGTERM)
            if not poller.poll(_WAIT_S * 1000):
                # What it has started ends with it in any case.
                signal.pidfd_send_signal(supervisor, signal.SIGKILL)
                poller.poll(_WAIT_S * 1000)
    finally:
        os.close(supervisor)
    return True
