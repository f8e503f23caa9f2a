"""Jobs of which a process is killed or stopped at a moment that a seed chooses, and what came of it.

The script is dying_script.py, whose rows count samples and whose weight counts rounds, exactly.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.process.run_jobs import DEADLINE_S, Jobs, all_end, wait_until

import shoal
from shoal.store.rounds import Rounds

DYING = str(Path(__file__).with_name("dying_script.py"))
SAMPLES, BATCH, PASSES, PACE_S = 64, 8, 4, 0.06  # of that script
ROLES = ("worker", "server", "coordinator", "supervisor")
HOWS = ("SIGKILL", "SIGSTOP")
AT_SERVERS = ("bsp", "quorum:0.5", "ssp:1", "asp", "softsync:2", "dcasgd:0.5")
WORDS = (*AT_SERVERS, "downpour:2,2", "average:2", "easgd:2", "allreduce", "gossip", "hogwild")
ROUNDS = ("bsp", "quorum:0.5", "allreduce")
# Their dense weight is no exact count: corrected, pulled to a centre, mixed, written without locks.
UNCOUNTED = ("dcasgd:0.5", "easgd:2", "gossip", "hogwild")
SAVING_WORDS = ("bsp", "asp")
# Longer than a lease. Who is then given up wakes as one that is not wanted any more.
STOPPED_S = 3.0
# By then steps go on, on a machine that is busy with other jobs: a start of Python and torch is in some.
LIMITS_S = {"worker": 60.0, "server": 15.0, "coordinator": 10.0, "supervisor": 60.0}
# Steps that others had finished before they could miss anybody.
ON_THEIR_WAY = 2


@dataclass(frozen=True)
class Fault:
    """Who is hurt, and how; `seed` chooses the moment and, of several, which one.

    `saving`: checkpoints are made one after the other meanwhile.
    """

    role: str
    how: str
    word: str
    seed: int = 0
    saving: bool = False

    def __str__(self) -> str:
        saving = " while saving" if self.saving else ""
        return f"{self.role} {self.how} {self.word}{saving} {self.seed}"

    @property
    def fatal(self) -> bool:
        """Whether the job ends by it: nobody is left to look."""
        return (self.role, self.how) == ("supervisor", "SIGKILL")


def faults(seed: int) -> list[Fault]:
    """All that are tried with one seed."""
    cases = [Fault(*case, seed) for case in itertools.product(ROLES, HOWS, WORDS)]
    # A supervisor's job always has checkpoints: it needs one to go on from.
    saving = itertools.product(ROLES[:3], HOWS, SAVING_WORDS)
    return cases + [Fault(*case, seed, saving=True) for case in saving]


@dataclass
class Outcome:
    """What a user saw. `seconds`: from the signal to the first step that was not on its way before it."""

    seconds: float
    code: int
    said: str
    found: list[dict[str, Any]] = field(default_factory=list)


def suffer(state: Path, fault: Fault) -> Outcome:
    """Run a job in which that happens, to its end."""
    jobs, out, chance = Jobs(state / "state"), state / "out", random.Random(str(fault))
    out.mkdir(parents=True)
    jobs.environment["OMP_NUM_THREADS"] = "1"
    options = ["--workers", "2", "--servers", "3", "--replicas", "1", "--sync", fault.word]
    if fault.saving or fault.role == "supervisor":
        options += ["--checkpoint", str(state / "checkpoints"), "--every", "0.2s"]
    command = [*options, DYING, str(out), "epochs", f"pace:{PACE_S}"]
    with jobs.started(*command) as process, watching(jobs, process) as clock:
        wait_until(lambda: all((out / f"stepped-{rank}").exists() for rank in range(2)))
        time.sleep(chance.uniform(0.0, 8 * PACE_S))
        before, pids = clock(), jobs.pids()
        pid = victim(jobs, fault.role, chance)
        began = time.monotonic()
        os.kill(pid, getattr(signal, fault.how))
        if fault.fatal:
            return ended(jobs, process, pids, command, out)
        wait_until(lambda: clock() > before + ON_THEIR_WAY)
        seconds = time.monotonic() - began
        if fault.how == "SIGSTOP":
            time.sleep(max(0.0, began + STOPPED_S - time.monotonic()))
            wake(pid)
        said = "".join(process.communicate(timeout=DEADLINE_S))
    return Outcome(seconds, process.returncode, said, results(out) if process.returncode == 0 else [])


@contextmanager
def watching(jobs: Jobs, process: subprocess.Popen[str]) -> Iterator[Callable[[], int]]:
    """The clock of the worker that is ahead, as one more client sees it; -1 before there is one."""
    wait_until(lambda: running(jobs, process))
    record = jobs.record()
    token = Path(record["token_file"]).read_text().strip()
    with shoal.connect(record["address"], token=token, timeout=DEADLINE_S) as client:
        rounds = Rounds(client, 0, 2)

        def clock() -> int:
            try:
                return max(rounds.state()["clocks"])
            except shoal.errors.BadInput:  # no worker has joined yet
                return -1

        yield clock


def running(jobs: Jobs, process: subprocess.Popen[str]) -> bool:
    try:
        record = jobs.record()
    except FileNotFoundError:  # while it takes the place of an earlier one
        return False
    return (record["pid"], record["state"]) == (process.pid, "running")


def victim(jobs: Jobs, role: str, chance: random.Random) -> int:
    record = jobs.record()
    if role in ("worker", "server"):
        return int(chance.choice(record[f"{role}s"])["pid"])
    return int(record["coordinator" if role == "coordinator" else "pid"])


def wake(pid: int) -> None:
    """Let it go on, if it was not ended meanwhile."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def ended(
    jobs: Jobs, process: subprocess.Popen[str], pids: list[int], command: list[str], out: Path
) -> Outcome:
    """A job that could not go on: nothing of it is left, and it is run again from its checkpoint."""
    began = time.monotonic()
    said = "".join(process.communicate(timeout=DEADLINE_S))
    all_end(pids)
    with jobs.started(*command) as again:
        with watching(jobs, again) as clock:
            wait_until(lambda: clock() >= 0 or again.poll() is not None)
            first = clock()
            wait_until(lambda: clock() > first or again.poll() is not None)
        seconds = time.monotonic() - began
        said = "".join(again.communicate(timeout=DEADLINE_S))
    return Outcome(seconds, again.returncode, said, results(out) if again.returncode == 0 else [])


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def check(fault: Fault, outcome: Outcome) -> None:
    """What must hold: nothing is lost, and where no worker died nothing counts twice."""
    assert outcome.code == 0, outcome.said
    assert outcome.seconds < LIMITS_S[fault.role], f"no step for {outcome.seconds:.1f} s"
    for found in outcome.found:
        rows, units = found["rows"], SAMPLES // BATCH * 2
        for used in found["used"]:
            assert "0" not in used, f"a unit was never used: {found['used']}"
            assert sum(used.values()) == units
        assert min(rows) >= PASSES / BATCH, rows
        if fault.word not in (*UNCOUNTED, "average:2") and not fault.fatal:
            lacking = sum(max(0.0, PASSES / BATCH - count) for count in found["dense"])
            # Who dies under downpour takes along its steps since its last push: one, of half a batch.
            unpushed = 0.5 if (fault.role, fault.word) == ("worker", "downpour:2,2") else 0.0
            assert lacking <= unpushed, found["dense"]
        if fault.word in ROUNDS and not (fault.fatal and fault.word == "allreduce"):  # no checkpoint has it
            assert sum(rows) == found["rounds"], (sum(rows), found["rounds"])
        if fault.role in ("server", "coordinator") and fault.word != "quorum:0.5":
            assert rows == [PASSES / BATCH] * SAMPLES, rows
            if fault.word not in (*UNCOUNTED, "average:2"):
                assert found["dense"] == [PASSES / BATCH] * SAMPLES, found["dense"]
            if fault.word == "average:2":  # a block that one makes alone, at a pass's end, counts whole
                assert min(found["dense"]) >= PASSES / BATCH, found["dense"]
                assert sum(found["dense"]) == found["rounds"] >= PASSES * SAMPLES / BATCH, found["rounds"]
            elif fault.word not in UNCOUNTED:
                assert found["rounds"] == PASSES * SAMPLES / BATCH, found["rounds"]
