"""Child processes that always end, and calls into them.

A child runs one command at a time and ends when told, when its pipe closes, or when this process dies;
whatever does not end in time is killed. Nothing here knows what is measured.
"""

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.contender import Contender, Spec

START_S_MAX = 90.0
CALL_S_MAX = 300.0
STOP_S_MAX = 15.0
_PR_SET_PDEATHSIG = 1
# Clients work in one thread; a system that gains from more asks for them in its own process.
_CHILD_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class ChildError(Exception):
    """A child failed, died or did not answer in time; the message carries its traceback."""


class Child:
    """A spawned process that owns one object and runs functions on it."""

    def __init__(
        self, name: str, factory: Callable[..., Any], *args: Any, environment: dict[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_child_main, args=(far_end, factory, args), name=name)
        with _environment({**_CHILD_ENV, **(environment or {})}):
            self._process.start()
        far_end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def result(self, timeout_s: float = CALL_S_MAX) -> Any:
        if not self._pipe.poll(timeout_s):
            raise ChildError(f"{self.name} (pid {self.pid}) gave no answer in {timeout_s:.0f} s")
        try:
            failed, value = self._pipe.recv()
        except EOFError:
            raise ChildError(f"{self.name} (pid {self.pid}) died") from None
        if failed:
            raise ChildError(f"{self.name} failed:\n{value}")
        return value

    def open_gate(self, start_at: float) -> None:
        self._pipe.send(start_at)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.send(function, *args)
        return self.result()

    def ask_to_stop(self) -> None:
        with suppress(OSError):  # It may have ended already.
            self._pipe.send(None)

    def stop(self, timeout_s: float = STOP_S_MAX) -> None:
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


@contextmanager
def children(makers: Sequence[Callable[[], Child]]) -> Iterator[list[Child]]:
    """Starts all, waits until each owns its object, and ends all: asked together, then awaited one by one."""
    with ExitStack() as stack:
        running: list[Child] = []
        for make in makers:
            running.append(make())
            stack.callback(running[-1].stop)
        stack.callback(_ask_all_to_stop, running)
        for child in running:
            child.result(START_S_MAX)
        yield running


@contextmanager
def workers(contender: Contender, address: Any, spec: Spec) -> Iterator[list[Child]]:
    """The workers of one measurement, each connected."""

    def maker(rank: int) -> Callable[[], Child]:
        name = f"{contender.name} worker {rank}"
        return lambda: Child(name, contender.connect, address, spec, rank, environment=contender.environment)

    with children([maker(rank) for rank in range(spec.workers)]) as running:
        yield running


def call_together(
    running: Sequence[Child], function: Callable[..., Any], args_of_each: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Runs `function(object, gate, *args)` in all children; `gate()` returns in all of them at one instant.

    A function prepares, passes the gate, and then measures; the gate returns that monotonic instant.
    """
    for child, args in zip(running, args_of_each, strict=True):
        child.send(_through_gate, function, *args)
    for child in running:
        child.result()
    start_at = time.monotonic() + 0.1
    for child in running:
        child.open_gate(start_at)
    return [child.result() for child in running]


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no VmRSS: it has ended")


def cpu_s(pid: int) -> float:
    """CPU seconds used so far, user and system, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`, found by walking /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # It ended while we walked.
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: list[int] = []
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found.extend(level)
    return found


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _child_main(pipe: Connection, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent is interrupted and ends us.
    owned = None
    try:
        owned = factory(*args)
        pipe.send((False, None))
        while (command := pipe.recv()) is not None:
            function, arguments = command
            if function is _through_gate:
                function, arguments = arguments[0], (lambda: _wait_at_gate(pipe), *arguments[1:])
            pipe.send((False, function(owned, *arguments)))
    except EOFError:
        pass  # The parent has gone.
    except Exception:  # noqa: BLE001 - whatever it was, the parent reports it.
        pipe.send((True, traceback.format_exc()))
    finally:
        if owned is not None and hasattr(owned, "close"):
            owned.close()


def _ask_all_to_stop(running: Sequence[Child]) -> None:
    for child in running:
        child.ask_to_stop()


def _through_gate() -> None:
    """Marks a command whose function takes a gate; never called."""


def _wait_at_gate(pipe: Connection) -> float:
    pipe.send((False, None))
    start_at = pipe.recv()
    if start_at is None:
        raise ChildError("told to stop while waiting for the others")
    time.sleep(max(0.0, start_at - time.monotonic()))
    return float(start_at)
