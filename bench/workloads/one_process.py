"""P1: pull + push in one process, against torch's and FBGEMM's tables, each at its best number of threads."""

from dataclasses import replace

from bench import loops
from bench.contender import Contender, Spec
from bench.peers.fbgemm import Fbgemm
from bench.peers.torch_local import TorchEmbedding
from bench.plan import Plan, alternate
from bench.processes import call_together, workers
from bench.report import Book, Line, Need
from bench.subject import ShoalEmbedded

ADAGRAD, ROWWISE = "P1 one process, Adagrad", "P1 one process, row-wise Adagrad"
_THREADS = (1, 2)


def run(book: Book, plan: Plan) -> None:
    if not plan.wants("P1"):
        return
    for threads in _THREADS:
        adagrad: list[Contender] = [
            ShoalEmbedded("adagrad", threads),
            TorchEmbedding(threads),
            Fbgemm("adagrad", threads),
        ]
        alternate(book, plan, "P1", adagrad, lambda c: {ADAGRAD: _loop(c, plan, "adagrad")})
        rowwise: list[Contender] = [
            ShoalEmbedded("rowwise_adagrad", threads),
            Fbgemm("rowwise_adagrad", threads),
        ]
        alternate(book, plan, "P1", rowwise, lambda c: {ROWWISE: _loop(c, plan, "rowwise_adagrad")})


def _loop(contender: Contender, plan: Plan, optimizer: str) -> float:
    spec = replace(Spec(rows=plan.rows), optimizer=optimizer)
    with contender.serve(spec) as address, workers(contender, address, spec) as running:
        running[0].call(loops.check, spec, contender.abilities)
        requests = loops.Requests(rows=spec.rows, seed=10)
        [rate] = call_together(running, loops.pull_push_rate, [(requests, spec.dim, plan.seconds)])
        return float(rate)


def lines() -> list[Line]:
    torch = Need(peers=tuple(TorchEmbedding(t).name for t in _THREADS), factor=4)
    fused = Need(peers=tuple(Fbgemm("adagrad", t).name for t in _THREADS), factor=1.5)
    fused_rowwise = Need(peers=tuple(Fbgemm("rowwise_adagrad", t).name for t in _THREADS))
    return [
        Line(
            metric=metric,
            subjects=tuple(ShoalEmbedded(kind, t).name for t in _THREADS),
            unit="M ids/s",
            scale=1e6,
            needs=needs,
            goal=goal,
            limit=limit,
        )
        for metric, kind, needs, goal, limit in (
            (ADAGRAD, "adagrad", (torch, fused), "7x torch", "limit P1 by memory traffic, two cores"),
            (ROWWISE, "rowwise_adagrad", (fused_rowwise,), "above FBGEMM", None),
        )
    ]
