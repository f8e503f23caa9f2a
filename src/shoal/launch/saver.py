"""The checkpoints of a job: what it goes on from, and the process that makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.client import load
from shoal.checkpoint.place import Place
from shoal.fleet.local import LocalCluster

__all__ = ["Saver", "go_on"]

_LOAD_S = 3600.0
_LAST_S = 600.0


def go_on(cluster: LocalCluster, url: str) -> str | None:
    """Make a fresh cluster what the newest whole checkpoint at `url` is; its name, if there is one."""
    if not manifest_.names(Place(url)):
        return None
    with cluster.connect() as client:
        return load(client, url, _LOAD_S, resume=True)


class Saver:
    """A `shoal.checkpoint.keep` for this cluster."""

    def __init__(self, cluster: LocalCluster, url: str, every_s: float, log: Path) -> None:
        environment = {
            **os.environ,
            "SHOAL_ADDRESS": cluster.address,
            "SHOAL_TOKEN_FILE": str(cluster.token_file),
            "SHOAL_LOG": "INFO",
        }
        environment.pop("SHOAL_TOKEN", None)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.checkpoint.keep", "--url", url, "--every", str(every_s)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def end(self, *, last: bool = False) -> None:
        """End it, after a last checkpoint if that is asked for. Twice is harmless."""
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            return
        with suppress(OSError):
            if last:
                stdin.write(b"last\n")
                stdin.flush()
            else:
                stdin.close()
        try:
            self._process.wait(_LAST_S if last else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            stdin.close()
