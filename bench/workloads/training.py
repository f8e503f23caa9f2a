"""E2E: a click model trained by two workers and a server, and in one process, in samples per second."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.click import overheads, peers
from bench.click.model import DIM, IDS, samples_per_s
from bench.contender import Spec
from bench.peers.torch_rpc import TorchRpc
from bench.plan import Plan, alternate
from bench.processes import Child, call_together, children, workers
from bench.report import Book, Line, Need
from bench.subject import missing_shoal

TWO, TWO_ROWWISE = "E2E 2 workers, Adagrad", "E2E 2 workers, row-wise Adagrad"
ONE, ONE_ROWWISE = "E2E one process, Adagrad", "E2E one process, row-wise Adagrad"
LIMIT = "limit E2E the model without rows, two cores"
_SCRIPT = Path(peers.__file__).with_name("train_shoal.py")
_ROOT = Path(__file__).parents[2]
_THREADS = (1, 2)
_RUN_S_MAX = 300.0


@dataclass(frozen=True)
class ShoalScript:
    """A user's script: under `shoal run` with two workers and a server, or alone."""

    sync: str = "asp"
    optimizer: str = "Adagrad"
    tables: int = 1
    prefetch: int = 0
    threads: int = 0  # 0: two workers of one thread each; otherwise alone, on so many cores

    @property
    def name(self) -> str:
        words = [f"shoal {self.sync}" if not self.threads else f"shoal alone t{self.threads}"]
        words += [f"{self.tables} tables"] if self.tables > 1 else []
        words += ["prefetch"] if self.prefetch else []
        return " ".join(words)

    def missing(self) -> str | None:
        return missing_shoal()

    def rate(self, steps: int) -> float:
        with tempfile.TemporaryDirectory() as directory:
            run = ["-m", "shoal.cli", "run", "--workers", "2", "--servers", "1", "--sync", self.sync]
            run += ["--batch", "each", "--directory", f"{directory}/job"]
            command = [sys.executable, *([] if self.threads else run), str(_SCRIPT), directory]
            command += ["--steps", str(steps), "--optimizer", self.optimizer, "--tables", str(self.tables)]
            command += ["--prefetch", str(self.prefetch), "--threads", str(self.threads or 1)]
            paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            here = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
            here |= {"SHOAL_SYNC": self.sync}
            done = subprocess.run(
                command, env=here, capture_output=True, text=True, timeout=_RUN_S_MAX, check=False
            )
            if done.returncode:
                raise RuntimeError(
                    f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
                )
            stamps = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))]
        return samples_per_s(stamps)


@dataclass(frozen=True)
class RpcTrainer:
    transport: str

    @property
    def name(self) -> str:
        return TorchRpc(self.transport).name

    def missing(self) -> str | None:
        return TorchRpc(self.transport).missing()

    def rate(self, steps: int) -> float:
        system = TorchRpc(self.transport)
        spec = Spec(rows=IDS, dim=DIM, dense_elements=peers.dense_elements(), workers=2)
        with system.serve(spec) as address, workers(system, address, spec) as running:
            return samples_per_s(call_together(running, peers.by_rpc, [(rank, steps) for rank in range(2)]))


@dataclass(frozen=True)
class ChildTrainer:
    """A function of `peers` in processes of its own: one for each tuple of arguments."""

    name: str
    function: Callable[..., list[float]]
    arguments: tuple[tuple[Any, ...], ...]
    package: str = "torch"

    def missing(self) -> str | None:
        return peers.missing(self.package)

    def rate(self, steps: int) -> float:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        makers = [lambda i=i: Child(f"{self.name} {i}", int, port) for i in range(len(self.arguments))]
        each = [(first, steps, *rest) for first, *rest in self.arguments]
        with children(makers) as running:
            return samples_per_s(call_together(running, self.function, each))


_DDP = ChildTrainer("torch ddp gloo sparse", peers.by_ddp, ((0,), (1,)))
_TOWER = ChildTrainer("machine", peers.tower_alone, ((1,), (1,)))
_TORCH = [ChildTrainer(f"torch bag t{t}", peers.by_torch, ((t,),)) for t in _THREADS]
_RPC = [RpcTrainer("default"), RpcTrainer("uv")]
_BESIDE = [ShoalScript("bsp"), ShoalScript(prefetch=1), ShoalScript(tables=26)]


def _fbgemm(optimizer: str) -> list[ChildTrainer]:
    return [
        ChildTrainer(f"fbgemm t{t}", peers.by_fbgemm, ((t, optimizer),), package="fbgemm_gpu")
        for t in _THREADS
    ]


def run(book: Book, plan: Plan) -> None:
    if not plan.wants("E2E"):
        return
    alone = [ShoalScript(threads=t) for t in _THREADS]
    alone_rowwise = [ShoalScript(threads=t, optimizer="RowwiseAdagrad") for t in _THREADS]
    sets: list[tuple[str, list[Any]]] = [
        (LIMIT, [_TOWER]),
        (TWO, [ShoalScript(), *_RPC, _DDP, *_BESIDE]),
        (TWO_ROWWISE, [ShoalScript(optimizer="RowwiseAdagrad")]),
        (ONE, [*alone, *_TORCH, *_fbgemm("Adagrad")]),
        (ONE_ROWWISE, [*alone_rowwise, *_fbgemm("RowwiseAdagrad")]),
    ]
    for metric, contenders in sets:
        alternate(book, plan, "E2E", contenders, lambda c, m=metric: {m: c.rate(plan.training_steps)})
    alternate(book, plan, "E2E", [overheads.Overheads()], lambda c: c.percents(plan.training_steps))


def _samples(metric: str, subjects: tuple[str, ...], *needs: Need, goal: str = "") -> Line:
    return Line(
        metric=metric, subjects=subjects, unit="k samples/s", scale=1e3, needs=needs, goal=goal, limit=LIMIT
    )


def lines() -> list[Line]:
    names = {metric: tuple(ShoalScript(threads=t).name for t in _THREADS) for metric in (ONE, ONE_ROWWISE)}
    fused = Need(peers=tuple(one.name for one in _fbgemm("Adagrad")), factor=None)
    return [
        _samples(
            TWO,
            (ShoalScript().name,),
            Need(peers=tuple(one.name for one in _RPC), factor=1.9),
            Need(peers=(_DDP.name,), factor=2.3),
            goal="250k",
        ),
        *(_samples(TWO, (beside.name,)) for beside in _BESIDE),
        _samples(TWO_ROWWISE, (ShoalScript().name,), goal="300k"),
        _samples(
            ONE,
            names[ONE],
            Need(peers=tuple(one.name for one in _TORCH), factor=2),
            fused,
            goal="above FBGEMM",
        ),
        _samples(ONE_ROWWISE, names[ONE_ROWWISE], fused, goal="above FBGEMM"),
        *(
            Line(metric=m, subjects=("shoal",), unit="%", lower_is_better=True, bar=3)
            for m in (overheads.LEDGER, overheads.ROUNDS)
        ),
        Line(metric=overheads.ROUNDS_SERVER, subjects=("shoal",), unit="%", lower_is_better=True),
    ]
