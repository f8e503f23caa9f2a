"""IDLE: CPU that servers and a connected client use while nothing is asked of them."""

import os
import time

from bench import loops
from bench.contender import Contender, Spec
from bench.peers.sockets import Sockets
from bench.peers.torch_rpc import TorchRpc
from bench.plan import Plan, alternate
from bench.processes import cpu_s, descendants, workers
from bench.report import Book, Line, Need
from bench.subject import Shoal

WINDOW_S = 3.0
SETTLE_S = 1.0
# One per cent of one core: room for leases and ticks, none for spinning.
BAR_S = 0.01 * WINDOW_S
IDLE = f"IDLE CPU over {WINDOW_S:.0f} s, 2 servers + client"


def run(book: Book, plan: Plan) -> None:
    if plan.wants("IDLE"):
        contenders: list[Contender] = [Shoal("auto"), TorchRpc("default"), TorchRpc("uv"), Sockets("unix")]
        alternate(book, plan, "IDLE", contenders, lambda contender: {IDLE: _idle_cpu_s(contender)})


def _idle_cpu_s(contender: Contender) -> float:
    spec = Spec(rows=10_000, servers=2)
    with contender.serve(spec) as address, workers(contender, address, spec) as [worker]:
        worker.call(loops.small_pull_latency, spec, 200)
        time.sleep(SETTLE_S)
        # This process too: a cluster may keep threads in the process that started it.
        pids = [os.getpid(), *descendants(os.getpid())]
        before = sum(cpu_s(pid) for pid in pids)
        time.sleep(WINDOW_S)
        return sum(cpu_s(pid) for pid in pids) - before


def lines() -> list[Line]:
    peers = (TorchRpc("default").name, TorchRpc("uv").name, Sockets("unix").name)
    return [
        Line(
            metric=IDLE,
            subjects=(Shoal("auto").name,),
            unit="s",
            lower_is_better=True,
            bar=BAR_S,
            needs=(Need(peers=peers),),
        )
    ]
