"""The checkpoints of a job: what it goes on from, the process that makes them, and the one that goes back."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.client import load
from shoal.checkpoint.place import Place
from shoal.checkpoint.reload import AGAIN
from shoal.fleet.local import LocalCluster
from shoal.store.rounds import Rounds
from shoal.sync.words import parse
from shoal.train.progress import PASSES_A_LOADER, DataUse, left_path, part_used, write_data_before

__all__ = ["Reload", "Saver", "go_on"]

_LOAD_S = 3600.0
_LAST_S = 600.0
# Of a script; of further ones what an earlier job trained would be counted again.
_LOADERS_MAX = 64


def go_on(cluster: LocalCluster, url: str, job: Path) -> str | None:
    """Make a fresh cluster what the newest whole checkpoint at `url` is; its name, if there is one.

    What of the data is done already is put down in the directory `job`, so that it is not counted again.
    """
    if not manifest_.names(Place(url)):
        return None
    with cluster.connect() as client:
        name = load(client, url, _LOAD_S, resume=True)
        if manifest_.find(Place(url), name).clocks:  # it is of a job
            write_data_before(job, _data_done(Rounds(client, 0, 1)))
        return name


def _data_done(rounds: Rounds) -> DataUse:
    last, before = [], {}
    for first in range(0, _LOADERS_MAX * PASSES_A_LOADER, PASSES_A_LOADER):
        epoch, _ = rounds.go_on(first)
        if epoch > first:
            last.append(epoch - 1)
        begun = rounds.report(epoch)
        if part := part_used(begun["units"], begun["used"]):
            before[epoch] = part
    return DataUse(last=tuple(last), before=before)


class Saver:
    """A `shoal.checkpoint.keep` for this cluster."""

    def __init__(self, cluster: LocalCluster, url: str, every_s: float, job: Path, sync: str) -> None:
        left_path(job).mkdir(exist_ok=True)
        arguments = ["--url", url, "--every", str(every_s), "--left", str(left_path(job))]
        arguments += ["--needs"] * (parse(sync).dense_home in ("peers", "shared"))
        self._process = _start(cluster, "keep", arguments, job / "logs" / "checkpoint.log")

    def end(self, *, last: bool = False, unless: Sequence[int] = ()) -> None:
        """End it, after a last checkpoint if that is asked for, `unless` one of these can be read before.

        Twice is harmless.
        """
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
        ended = os.pidfd_open(self._process.pid)
        select.select([ended, *unless], [], [], _LAST_S if last else 1.0)
        os.close(ended)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            stdin.close()


class Reload:
    """A `shoal.checkpoint.reload` of what those servers had."""

    def __init__(
        self, cluster: LocalCluster, url: str, lost: Collection[int], together: bool, log: Path
    ) -> None:
        self.lost = frozenset(lost)
        arguments = ["--url", url, "--lost", ",".join(map(str, sorted(lost)))]
        self._process = _start(cluster, "reload", arguments + ["--together"] * together, log, subprocess.PIPE)
        self.pid = self._process.pid

    def end(self) -> tuple[bool, str]:
        """Whether it was done, and what it said; once it has ended."""
        said, _ = self._process.communicate()
        return self._process.returncode == 0, said.decode(errors="replace").strip() or "it said nothing"

    @property
    def may_help_again(self) -> bool:
        """Whether it may be done another time."""
        return self._process.returncode == AGAIN

    def kill(self) -> None:
        """The job ends without it."""
        self._process.kill()
        self._process.wait()


def _start(
    cluster: LocalCluster, module: str, arguments: Sequence[str], log: Path, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "SHOAL_ADDRESS": cluster.address,
        "SHOAL_TOKEN_FILE": str(cluster.token_file),
        "SHOAL_LOG": "INFO",
    }
    environment.pop("SHOAL_TOKEN", None)
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", f"shoal.checkpoint.{module}", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=file if stdout is None else stdout,
            stderr=file,
            start_new_session=True,
        )
