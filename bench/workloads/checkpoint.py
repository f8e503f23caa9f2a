"""CKPT: what a checkpoint costs those who train meanwhile, and how fast it is against the disk itself."""

import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from bench.contender import Spec
from bench.plan import Plan, alternate
from bench.report import Book, Line
from bench.subject import Shoal, give_birth, open_table

DIM, KEYS = 16, 4096
KEPT = "CKPT pushes/s during a save / before"
STALL = "CKPT longest push during a save"
BEFORE = "CKPT longest push before it"
SPEED = "CKPT MB/s of a save"
DISK = "CKPT MB/s of the disk: write, fsync"
_DISK_FILE = 64 << 20


def run(book: Book, plan: Plan) -> None:
    if plan.wants("CKPT"):
        alternate(book, plan, "CKPT", [Shoal("auto")], lambda _: _measure(plan))


def _measure(plan: Plan) -> dict[str, float]:
    import shoal

    spec = Spec(rows=plan.memory_rows // 2, dim=DIM)
    with (
        shoal.LocalCluster(servers=1) as cluster,
        cluster.connect() as client,
        cluster.connect() as saver,
        tempfile.TemporaryDirectory(dir=Path.cwd()) as directory,
    ):
        table = open_table(client, spec)
        give_birth(table, spec)
        saved = [0.0]

        def save() -> None:
            begin = time.monotonic()
            saver.save(directory)
            saved[0] = time.monotonic() - begin

        push_until(table, spec, lambda: False, plan.seconds)  # warm
        before = push_until(table, spec, lambda: False, plan.seconds)
        thread = threading.Thread(target=save)
        thread.start()
        during = push_until(table, spec, lambda: not thread.is_alive(), 600.0)
        thread.join()
        size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
        return {
            KEPT: during[0] / before[0],
            STALL: during[1],
            BEFORE: before[1],
            SPEED: size / saved[0],
            DISK: disk_speed(Path(directory), min(size, 1 << 30)),
        }


def push_until(table, spec: Spec, done, seconds: float) -> tuple[float, float]:
    """Pushes a second, and the longest of them."""
    random = np.random.default_rng(3)
    batches = [random.integers(0, spec.rows, KEYS) for _ in range(32)]
    grads = np.full((KEYS, spec.dim), 1e-3, np.float32)
    begin = last = time.perf_counter()
    count, longest = 0, 0.0
    while not done() and last < begin + seconds:
        table.push(batches[count % len(batches)], grads)
        now = time.perf_counter()
        longest = max(longest, now - last)
        last, count = now, count + 1
    return count / (last - begin), longest


def disk_speed(directory: Path, size: int) -> float:
    """Bytes a second of plain files like those of a checkpoint, each made durable."""
    data = os.urandom(_DISK_FILE)
    begin = time.perf_counter()
    for number in range(max(1, size // _DISK_FILE)):
        with (directory / f"plain-{number}").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    return max(1, size // _DISK_FILE) * _DISK_FILE / (time.perf_counter() - begin)


def lines() -> list[Line]:
    auto = (Shoal("auto").name,)
    return [
        Line(metric=KEPT, subjects=auto, unit="x", bar=0.7),
        Line(
            metric=STALL, subjects=auto, unit="ms", scale=1e-3, lower_is_better=True, bar=100.0, always=True
        ),
        Line(metric=BEFORE, subjects=auto, unit="ms", scale=1e-3, lower_is_better=True),
        Line(metric=SPEED, subjects=auto, unit="MB/s", scale=1e6, limit=DISK),
        Line(metric=DISK, subjects=auto, unit="MB/s", scale=1e6),
    ]
