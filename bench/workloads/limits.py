"""LIMITS: what the machine allows, measured beside the rest so that a share of it can be printed.

Bounds by memory traffic count every byte that must be read or written at least once, per id of dim 64, at the
rate two cores reach with memcpy (a copy of n bytes is 2n of traffic):
1. a push reads the gradient (256), writes it to the wire or mapping (256), reads it there (256), reads and
   writes value and Adagrad sum (4 x 256): 7 x 256 bytes;
2. a pull reads the row and writes it: 2 x 256 bytes; so pull + push is 9 x 256;
3. in one process a push needs no transfer: 5 x 256, pull + push 7 x 256;
4. D1, per byte of gradient: copy up 2, update reads two and writes one, copy down 2: 7, for two counted.
They are ceilings, not estimates: rows are scattered, and memcpy is not.
"""

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.contender import Spec, first_rows
from bench.loops import Gate, Requests
from bench.plan import Plan, note
from bench.processes import Child, call_together, children
from bench.report import Book

_ROW_BYTES = 256
_BLOCK_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 20


def run(book: Book, plan: Plan) -> None:
    if not plan.wants("LIMITS"):
        return
    for _ in range(plan.repetitions):
        figures = _measure(plan)
        for metric, value in figures.items():
            book.add(f"limit {metric}", "machine", value)
    note("LIMITS: " + ", ".join(f"{metric} {value / 1e6:,.1f} M/s" for metric, value in figures.items()))


def _measure(plan: Plan) -> dict[str, float]:
    with children([lambda: Child("limits", _Memory), lambda: Child("limits", _Memory)]) as pair:
        [one] = call_together(pair[:1], _Memory.copy_rate, [(plan.seconds,)])
        two = sum(call_together(pair, _Memory.copy_rate, [(plan.seconds,)] * 2))
        gather = pair[0].call(_Memory.gather_rate, plan.rows, plan.seconds)
    unix, tcp = _socket_rate(plan, unix=True), _socket_rate(plan, unix=False)
    traffic = 2 * two
    return {
        "memcpy bytes, one core": one,
        "memcpy bytes, two cores": two,
        "gather of 256-byte rows, one core": gather,
        "unix socket bytes": unix,
        "tcp loopback bytes": tcp,
        "unix socket, 256-byte rows": unix / _ROW_BYTES,
        "tcp loopback, 256-byte rows": tcp / _ROW_BYTES,
        "S2 by memory traffic, two cores": traffic / (7 * _ROW_BYTES),
        "S3 by memory traffic, two cores": traffic / (9 * _ROW_BYTES),
        "P1 by memory traffic, two cores": traffic / (7 * _ROW_BYTES),
        "D1 by memory traffic, two cores": traffic * 2 / 7,
    }


class _Memory:
    """Runs in a child, so that two copies can be timed at once."""

    def copy_rate(self, gate: Gate, seconds: float) -> float:
        source, target = np.ones(_BLOCK_BYTES // 8), np.zeros(_BLOCK_BYTES // 8)
        np.copyto(target, source)
        gate()
        return source.nbytes * _rate(lambda: np.copyto(target, source), seconds)

    def gather_rate(self, rows: int, seconds: float) -> float:
        spec = Spec(rows=rows)
        table, [keys, *_] = first_rows(np.arange(rows), spec.dim), Requests(rows=rows, seed=10).draw()
        out = np.zeros((keys.size, spec.dim), np.float32)
        np.take(table, keys, axis=0, out=out, mode="clip")
        return keys.size * _rate(lambda: np.take(table, keys, axis=0, out=out, mode="clip"), seconds)


def _rate(one: Callable[[], object], seconds: float) -> float:
    rounds, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds or not rounds:
        one()
        rounds += 1
    return rounds / took


def _socket_rate(plan: Plan, *, unix: bool) -> float:
    """Bytes per second one way: a child sends, this process reads into one reused buffer."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as listener,
    ):
        listener.bind(str(Path(folder) / "limit") if unix else ("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(30)
        with children([lambda: Child("limits sender", _Sender, listener.getsockname())]):
            link, _ = listener.accept()
            with link:
                buffer, total, begin = bytearray(_CHUNK_BYTES), 0, time.perf_counter()
                while (took := time.perf_counter() - begin) < plan.seconds:
                    total += link.recv_into(buffer)
            return total / took


class _Sender:
    """Sends until the reader closes."""

    def __init__(self, address: str | tuple[str, int]) -> None:
        self._link = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._link.connect(address)
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        chunk = bytes(_CHUNK_BYTES)
        try:
            while True:
                self._link.sendall(chunk)
        except OSError:
            self._link.close()  # The reader has seen enough.
