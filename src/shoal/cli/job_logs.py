"""`shoal logs`: what a job has shown, or the log of one of its processes; also while it runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shoal.errors import BadInput
from shoal.launch.records import JobRecord, find_job

_LOOK_EVERY_S = 0.1
_READ_BYTES = 1 << 16


def show(job: str | None, *, worker: int | None, server: int | None, follow: bool) -> None:
    """Copy the log to stdout; with `follow`, what is added to it until the job has ended."""
    record = find_job(job)
    path = _path(record, worker, server)
    try:
        with path.open("rb") as file:
            while True:
                # Asked before reading: what was written before the end is read after it.
                running = follow and find_job(record.directory).state in ("starting", "running")
                while data := file.read(_READ_BYTES):
                    sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                if not running:
                    return
                time.sleep(_LOOK_EVERY_S)
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Or the interpreter would complain at its end:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None


def _path(record: JobRecord, worker: int | None, server: int | None) -> Path:
    logs = record.path / "logs"
    if worker is not None and server is not None:
        raise BadInput("--worker and --server are two logs; choose one")
    if worker is not None:
        return logs / f"worker-{_known(record, 'worker', worker, [w.rank for w in record.workers])}.log"
    if server is not None:
        return logs / f"server-{_known(record, 'server', server, [s.index for s in record.servers])}.log"
    return logs / "job.log"


def _known(record: JobRecord, role: str, index: int, known: list[int]) -> int:
    if index not in known:
        allowed = f"{known[0]} to {known[-1]}" if known else "none: it has not started them"
        raise BadInput(f"job {record.name} has no {role} {index}; allowed: {allowed}")
    return index
