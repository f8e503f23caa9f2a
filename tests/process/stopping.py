"""A process that stands still, for sure."""

import os
import signal
import time
from pathlib import Path

_DEADLINE_S = 20.0


def stop(pid: int) -> None:
    """SIGSTOP; returns when it has reached all threads, which it does one after the other."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + _DEADLINE_S
    while not _is_stopped(pid):
        assert time.monotonic() < end, f"process {pid} does not stop"
        time.sleep(0.005)


def _is_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
