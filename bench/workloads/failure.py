"""FAIL: what a copy of every row costs, and how long a kill is felt.

A copy: pushes and pulls as in S1 and S2, on two servers. A lost server: seconds until the coordinator gave
it up, and until a push to all rows is acknowledged again. A job of two workers: seconds until the replacement
of a killed worker finishes its first step. Goodput: units of data that were done in a window after a kill
against the rate before it, as seconds that were lost of a minute.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import loops
from bench.click import peers
from bench.contender import Contender, Spec
from bench.plan import Plan, alternate
from bench.processes import workers
from bench.report import Book, Line, Need
from bench.subject import Shoal, give_birth, open_table

PUSH, PULL = "FAIL push, 2 servers", "FAIL pull, 2 servers"
DETECT = "FAIL killed server: until it is given up"
FAILOVER = "FAIL killed server: until a push to all rows"
FIRST_STEP = "FAIL killed worker: until its successor's step"
GOODPUT = {role: f"FAIL goodput, a {role} killed each minute" for role in ("worker", "server")}
_SCRIPT = Path(peers.__file__).with_name("train_shoal.py")
_ROOT = Path(__file__).parents[2]
_KEYS = np.arange(4096)
_WAIT_S = 60.0
_LOOK_S = 0.005
# A window after a kill; what is lost is lost by its end, when the replacement works and the copies are made.
_WINDOW_S = 20.0
_RATE_S = 6.0
_STEPS = 20_000  # more than are made in that time, and not so many that the list of them takes long to make
_PLAIN, _COPIED = Shoal("auto"), Shoal("auto", replicas=1)


def run(book: Book, plan: Plan) -> None:
    if plan.wants("FAIL"):
        alternate(book, plan, "FAIL", [_PLAIN, _COPIED], lambda contender: _rates(contender, plan))
        alternate(book, plan, "FAIL", [_COPIED], lambda _: _lost_server(plan))
        alternate(book, plan, "FAIL", [_COPIED], lambda _: _job())


def _rates(contender: Contender, plan: Plan) -> dict[str, float]:
    spec = Spec(rows=plan.rows, servers=2)
    with contender.serve(spec) as address, workers(contender, address, spec) as [worker]:
        pulls = worker.call(loops.pull_rate, spec, plan.seconds)
        return {PULL: pulls, PUSH: worker.call(loops.push_rate, spec, plan.seconds)}


def _lost_server(plan: Plan) -> dict[str, float]:
    import shoal
    from shoal.store.control import Address, ControlClient
    from shoal.store.messages import GetStatus, StatusInfo

    spec = Spec(rows=plan.rows // 10, servers=3)
    with (
        shoal.LocalCluster(servers=3, replicas=1) as cluster,
        cluster.connect(timeout=_WAIT_S) as client,
    ):
        table = open_table(client, spec)
        give_birth(table, spec)
        grads = np.full((len(_KEYS), spec.dim), 1e-3, np.float32)
        table.push(_KEYS, grads)
        began = time.monotonic()
        os.kill(cluster.servers[0].pid, signal.SIGKILL)
        table.push(_KEYS, grads)  # keys of every shard: those of the lost server wait for its copies
        acknowledged = time.monotonic() - began

    # Again without pushes, which would be looked at late.
    with (
        shoal.LocalCluster(servers=3, replicas=1) as cluster,
        closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control,
    ):
        began = time.monotonic()
        os.kill(cluster.servers[0].pid, signal.SIGKILL)
        _until(lambda: control.ask(GetStatus(), StatusInfo, _WAIT_S).servers[0].state == "evicted")
        return {FAILOVER: acknowledged, DETECT: time.monotonic() - began}


def _job() -> dict[str, float]:
    figures = {}
    with _training() as (record, rounds):
        for role in ("worker", "server"):
            rate = _units_in(rounds, _RATE_S) / _RATE_S
            member = record()[f"{role}s"][1 if role == "worker" else 0]
            began, before = time.monotonic(), _units(rounds)
            os.kill(member["pid"], signal.SIGKILL)
            if role == "worker":
                figures[FIRST_STEP] = _until_back(record, rounds, member["pid"]) - began
            time.sleep(max(0.0, began + _WINDOW_S - time.monotonic()))
            done, took = _units(rounds) - before, time.monotonic() - began
            figures[GOODPUT[role]] = 1 - (took - done / rate) / 60.0
    return figures


@contextmanager
def _training() -> Iterator[tuple[Callable[[], dict[str, Any]], Any]]:
    """A job of two workers that trains until the block ends: its record as it is now, and its rounds."""
    import shoal
    from shoal.store.rounds import Rounds

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "job/job.json")
        command = [sys.executable, "-m", "shoal.cli", "run", "--workers", "2", "--servers", "3", "--replicas"]
        command += ["1", "--max-restarts", "10", "--sync", "asp", "--batch", "each", "--directory"]
        command += [str(path.parent), str(_SCRIPT), directory, "--steps", str(_STEPS)]
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        here = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=here, **quiet) as job:
            try:
                _until(lambda: path.exists() and _read(path)["state"] == "running")
                started = _read(path)
                token = Path(started["token_file"]).read_text().strip()
                with shoal.connect(started["address"], token=token, timeout=_WAIT_S) as client:
                    rounds = Rounds(client, 0, 2)
                    _until(lambda: _units(rounds) > 50)
                    yield lambda: _read(path), rounds
            finally:
                job.terminate()
                job.wait(_WAIT_S)


def _read(path: Path) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.json.decode(path.read_bytes()))


def _units(rounds: Any) -> int:
    """Units of the first pass that are done; 0 before it begins."""
    import shoal

    try:
        return int(rounds.report(0)["done"])
    except shoal.errors.BadInput:
        return 0


def _units_in(rounds: Any, seconds: float) -> int:
    before = _units(rounds)
    time.sleep(seconds)
    return _units(rounds) - before


def _until_back(record: Callable[[], dict[str, Any]], rounds: Any, pid: int) -> float:
    """When worker 1 has done more than its predecessor of that pid."""
    _until(lambda: record()["workers"][1]["pid"] != pid)
    before = rounds.report(0)["by_rank"][1]
    _until(lambda: rounds.report(0)["by_rank"][1] > before)
    return time.monotonic()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {_WAIT_S:g} s")
        time.sleep(_LOOK_S)


def lines() -> list[Line]:
    copied = (_COPIED.name,)
    plain = (_PLAIN.name,)
    return [
        Line(metric=PUSH, subjects=copied, unit="M ids/s", scale=1e6, needs=(Need(peers=plain, factor=0.5),)),
        Line(
            metric=PULL, subjects=copied, unit="M ids/s", scale=1e6, needs=(Need(peers=plain, factor=0.95),)
        ),
        Line(metric=DETECT, subjects=copied, unit="s", lower_is_better=True, bar=3.0),
        Line(metric=FAILOVER, subjects=copied, unit="s", lower_is_better=True, bar=5.0, goal="2 s"),
        Line(metric=FIRST_STEP, subjects=copied, unit="s", lower_is_better=True),
        *(Line(metric=m, subjects=copied, unit="%", scale=0.01, bar=90.0) for m in GOODPUT.values()),
    ]
