"""START: how long an import, a server and a coordinator take until they can be used."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from bench.plan import Plan, alternate
from bench.report import Book, Line
from bench.subject import Shoal

TIMES = 5  # of which the median is one sample
BAR_S = 0.3
IMPORT = "START import shoal"
SERVER = "START server until it has joined"
COORDINATOR = "START coordinator until it answers"
ANSWER_S_MAX = 30.0


def run(book: Book, plan: Plan) -> None:
    if plan.wants("START"):
        alternate(book, plan, "START", [Shoal("auto")], lambda _: _seconds())


def _seconds() -> dict[str, float]:
    import shoal

    with tempfile.TemporaryDirectory(prefix="bench-start-") as name, shoal.LocalCluster() as cluster:
        directory = Path(name)
        measured: dict[str, Callable[[], float]] = {
            IMPORT: _import_s,
            SERVER: lambda: _timed(cluster.add_server),
            COORDINATOR: lambda: _coordinator_s(directory),
        }
        return {metric: statistics.median(once() for _ in range(TIMES)) for metric, once in measured.items()}


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _import_s() -> float:
    """From the inside: what Python itself takes to start is not ours."""
    code = "import time; began = time.perf_counter(); import shoal; print(time.perf_counter() - began)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(ran.stdout)


def _coordinator_s(directory: Path) -> float:
    """As clusters start it: it is given a socket that listens already, so who asks is answered at once."""
    from shoal.config import ServerOptions
    from shoal.fleet.child import start_child, stop_children
    from shoal.fleet.process import listen
    from shoal.fleet.token import write_token_file
    from shoal.store.control import Address, ControlClient
    from shoal.store.messages import GetStatus, StatusInfo

    for old in directory.iterdir():
        old.unlink()
    token = "start"
    write_token_file(directory / "token", token)
    with listen(ServerOptions()) as listener:
        arguments = ["--listen-fd", str(listener.fileno()), "--journal", str(directory / "journal")]
        arguments += ["--token-file", str(directory / "token"), "--watch-stdin"]
        began = time.perf_counter()
        child = start_child(directory, "coordinator", "coordinator", arguments, [listener.fileno()])
        try:
            with closing(ControlClient(Address("127.0.0.1", listener.getsockname()[1]), token)) as control:
                control.ask(GetStatus(), StatusInfo, ANSWER_S_MAX)
            return time.perf_counter() - began
        finally:
            stop_children([child])


def lines() -> list[Line]:
    return [
        Line(metric=metric, subjects=(Shoal("auto").name,), unit="s", lower_is_better=True, bar=BAR_S)
        for metric in (IMPORT, SERVER, COORDINATOR)
    ]
