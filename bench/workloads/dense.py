"""D1: 100 MB of gradients up and 100 MB of parameters down, SGD at the server."""

from bench import loops
from bench.contender import Contender, Spec
from bench.peers.ray_actor import RayActor
from bench.peers.sockets import Sockets
from bench.peers.torch_rpc import TorchRpc
from bench.plan import Plan, alternate
from bench.processes import call_together, workers
from bench.report import Book, Line, Need
from bench.subject import Shoal

D1 = {1: "D1 dense, 1 worker", 2: "D1 dense, 2 workers"}


def run(book: Book, plan: Plan) -> None:
    if not plan.wants("D1"):
        return
    for count, metric in D1.items():
        contenders: list[Contender] = [
            Shoal("auto"),
            TorchRpc("default"),
            TorchRpc("uv"),
            Sockets("unix"),
            Shoal("tcp"),
            Sockets("tcp"),
            RayActor(),
        ]
        alternate(book, plan, "D1", contenders, lambda c, n=count, m=metric: {m: _exchange(c, plan, n)})


def _exchange(contender: Contender, plan: Plan, worker_count: int) -> float:
    spec = Spec(dense_elements=plan.dense_elements, optimizer="sgd", workers=worker_count)
    with contender.serve(spec) as address, workers(contender, address, spec) as running:
        running[0].call(loops.check, spec, contender.abilities)
        each = [(spec.dense_elements, plan.seconds)] * worker_count
        return float(sum(call_together(running, loops.dense_rate, each)))


def lines() -> list[Line]:
    rpc = tuple(TorchRpc(transport).name for transport in ("default", "uv"))
    others = Need(peers=(Sockets("unix").name, RayActor().name))
    limit = "limit D1 by memory traffic, two cores"
    found = []
    for count, metric in D1.items():
        need = Need(peers=rpc, factor=2.5 if count == 1 else None)
        found += [
            Line(
                metric=metric,
                subjects=(Shoal("auto").name,),
                unit="GB/s",
                scale=1e9,
                needs=(need, others),
                goal="6 GB/s" if count == 1 else "",
                limit=limit,
            ),
            Line(
                metric=metric,
                subjects=(Shoal("tcp").name,),
                unit="GB/s",
                scale=1e9,
                needs=(Need(peers=(Sockets("tcp").name,)),),
            ),
        ]
    return found
