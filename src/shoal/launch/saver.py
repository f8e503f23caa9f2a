"""The checkpoints of a job: what it goes on from, the process that makes them, and the one that goes back."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint import states
from shoal.checkpoint.client import Loaded, load
from shoal.checkpoint.place import Place
from shoal.checkpoint.reload import AGAIN
from shoal.fleet.local import LocalCluster
from shoal.launch.lines import LineSplitter
from shoal.launch.options import JobOptions
from shoal.launch.records import SaveRecord
from shoal.launch.worker import how_ended
from shoal.store.rounds import Rounds
from shoal.train.progress import PASSES_A_LOADER, DataUse, left_path, part_used, write_data_before

_LOAD_S = 3600.0
_LAST_S = 600.0
# It is given up when it has ended so often without a checkpoint between.
_ENDS_MAX = 5
_READ_BYTES = 1 << 16
# Of checkpoints that were passed over; a damaged one takes along all that are based on it.
_TOLD_MAX = 12
# Of a script; of further ones what an earlier job trained would be counted again.
_LOADERS_MAX = 64


def go_on(cluster: LocalCluster, url: str, job: Path) -> Loaded | None:
    """Make a fresh cluster what the newest whole checkpoint at `url` is; which one, if there is any.

    What of the data is done already is put down in the directory `job`, so that it is not counted again.
    """
    if not manifest_.names(Place(url)):
        return None
    with cluster.connect() as client:
        loaded = load(client, url, _LOAD_S, resume=True)
        if manifest_.find(Place(url), loaded.name).clocks:  # it is of a job
            write_data_before(job, _data_done(Rounds(client, 0, 1)))
        return loaded


def told_of(options: JobOptions, loaded: Loaded) -> Iterator[str]:
    """What a user is told of the checkpoint that a job goes on from, and of newer ones that it does not."""
    assert options.checkpoint is not None
    name, passed_over = loaded
    for newer, why in islice(passed_over.items(), _TOLD_MAX):
        yield f"checkpoint {newer} was passed over: {why}"
    if (more := len(passed_over) - _TOLD_MAX) > 0:
        yield f"{more} more were passed over: {options.checkpoint} has them"
    yield f"going on from checkpoint {name} of {options.checkpoint}"
    found = manifest_.find(Place(options.checkpoint), name)
    for why, ranks in states.missing(found, options.workers).items():
        who = ", ".join(map(str, ranks))
        yield (
            f"checkpoint {name} has no state of worker {who} ({why}): what lay there alone begins anew, such "
            f"as random numbers, buffers and schedulers"
        )


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
    """A `shoal.checkpoint.keep` for this cluster, which is started again when it ends.

    `record` is what came of it so far; what `needs` is says the method. `watch_once` calls back when a
    descriptor is readable; `say` tells the user, and with an empty text only that `record` is another.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        url: str,
        every_s: float,
        job: Path,
        needs: bool,
        *,
        watch_once: Callable[[int, Callable[[], None]], None],
        say: Callable[[str], None],
    ) -> None:
        left_path(job).mkdir(exist_ok=True)
        arguments = ["--url", url, "--every", str(every_s), "--left", str(left_path(job))]
        log = job / "logs" / "checkpoint.log"
        self.record = SaveRecord()
        self._start_with = partial(_start, cluster, "keep", log=log, stdout=subprocess.PIPE)
        self._arguments, self._needs = arguments, needs
        self._watch_once = watch_once
        self._say = say
        self._ends = 0  # since the last checkpoint
        self._process: subprocess.Popen[bytes]
        self._begin()

    def needs(self, needs: bool) -> None:
        """Whether a checkpoint is none without the state of a worker, since the model lies there."""
        if needs != self._needs:
            self._needs = needs
            self._order(f"needs {int(needs)}")

    def end(self) -> None:
        """End it. Twice is harmless."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(OSError):
            stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()

    def end_with_a_last(self, unless: Sequence[int] = ()) -> str | None:
        """Have a last checkpoint made by it, or by another if it dies; why that could not be.

        It is not waited for any longer once one of `unless` can be read.
        """
        for _ in range(2):
            if self._process.poll() is not None:
                self.end()
                self._process = self._start()
            assert self._process.stdout is not None  # of `_start`
            self._order("last")
            ended = os.pidfd_open(self._process.pid)
            ready, _, _ = select.select([ended, *unless], [], [], _LAST_S)
            os.close(ended)
            if self._process.poll() is None:
                self.end()
                return "it was not waited for" if ready else f"it was not done within {_LAST_S:g} s"
            said = self._process.stdout.read().splitlines()
            self.end()
            if self._process.returncode == 0:
                self._hear(said[-1] if said else b"failed it said nothing")
                return self.record.problem
        return self._how_it_ended()

    def _start(self) -> subprocess.Popen[bytes]:
        return self._start_with([*self._arguments, *["--needs"] * self._needs])

    def _order(self, what: str) -> None:
        assert self._process.stdin is not None  # of `_start`
        with suppress(OSError, ValueError):  # it has ended; if another is started, it is told
            self._process.stdin.write(f"{what}\n".encode())
            self._process.stdin.flush()

    def _begin(self) -> None:
        self._process = self._start()
        self._lines = LineSplitter()
        self._listen()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        self._watch_once(self._process.stdout.fileno(), self._heard)

    def _heard(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        for line in self._lines.feed(data):
            self._hear(line)
        if data:
            self._listen()
        else:
            self._ended()

    def _hear(self, line: bytes) -> None:
        word, _, text = line.decode(errors="replace").partition(" ")
        before = self.record.problem
        if word == "saved":
            self._ends = 0
            self.record = SaveRecord(name=text, time=time.time())
            self._say(f"checkpoints are made again: {text}" if before else "")
        else:
            self._fails(text, "" if before else f"no checkpoint was made: {text}")

    def _ended(self) -> None:
        self.end()
        self._ends += 1
        how = self._how_it_ended()
        if self._ends > _ENDS_MAX:
            self._fails(how, f"{how}, again and again, and is given up: no more checkpoints are made")
        else:
            self._begin()
            self._fails(how, f"{how} and is started again")

    def _fails(self, problem: str, text: str) -> None:
        self.record = SaveRecord(name=self.record.name, time=self.record.time, problem=problem)
        self._say(text)

    def _how_it_ended(self) -> str:
        process = self._process
        return f"the process that makes checkpoints (pid {process.pid}) {how_ended(process.returncode)}"


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
