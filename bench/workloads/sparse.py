"""S1, S2 and S3: rows of tables, pulled and pushed by workers in other processes."""

from bench import loops
from bench.contender import Contender, Spec
from bench.peers.ray_actor import RayActor
from bench.peers.sockets import Sockets
from bench.peers.torch_rpc import TorchRpc
from bench.plan import Plan, alternate
from bench.processes import call_together, workers
from bench.report import Book, Line, Need
from bench.subject import Shoal

S1, P50, P99, S2 = "S1 pull", "S1 100 ids p50", "S1 100 ids p99", "S2 push Adagrad"
_UNIX_LIMIT, _TCP_LIMIT = "limit unix socket, 256-byte rows", "limit tcp loopback, 256-byte rows"
S3 = {(2, 1): "S3 pull+push 2x1", (2, 2): "S3 pull+push 2x2"}

_RPC = tuple(TorchRpc(transport).name for transport in ("default", "uv"))
_RPC_HUGE = (TorchRpc("uv", huge_pages=True).name,)
_RAY = (RayActor().name,)
_AUTO, _UNIX, _TCP = (Shoal(lane).name for lane in ("auto", "unix", "tcp"))
_FLOOR_UNIX, _FLOOR_TCP = Sockets("unix").name, Sockets("tcp").name
_BETTER_UNIX, _BETTER_TCP = Sockets("unix", pipelined=True).name, Sockets("tcp", pipelined=True).name


def run(book: Book, plan: Plan) -> None:
    if plan.wants("S1") or plan.wants("S2"):
        contenders: list[Contender] = [
            Shoal("auto"),
            TorchRpc("default"),
            TorchRpc("uv"),
            Sockets("unix"),
            Shoal("unix"),
            TorchRpc("uv", huge_pages=True),
            Sockets("unix", pipelined=True),
            Sockets("tcp"),
            Shoal("tcp"),
            Sockets("tcp", pipelined=True),
            RayActor(),
        ]
        alternate(book, plan, "S1 S2", contenders, lambda contender: _one_worker(contender, plan))
    if plan.wants("S3"):
        for shape, metric in S3.items():
            several: list[Contender] = [Shoal("auto"), TorchRpc("default"), TorchRpc("uv"), RayActor()]
            alternate(book, plan, "S3", several, lambda c, s=shape, m=metric: {m: _loop(c, plan, *s)})


def _one_worker(contender: Contender, plan: Plan) -> dict[str, float]:
    spec = Spec(rows=plan.rows)
    figures: dict[str, float] = {}
    with contender.serve(spec) as address, workers(contender, address, spec) as [worker]:
        worker.call(loops.check, spec, contender.abilities)
        if plan.wants("S1"):
            figures[S1] = worker.call(loops.pull_rate, spec, plan.seconds)
            figures[P50], figures[P99] = worker.call(loops.small_pull_latency, spec, plan.latency_samples)
        if plan.wants("S2") and "push" in contender.abilities:
            figures[S2] = worker.call(loops.push_rate, spec, plan.seconds)
    return figures


def _loop(contender: Contender, plan: Plan, worker_count: int, servers: int) -> float:
    spec = Spec(rows=plan.rows, servers=servers, workers=worker_count)
    with contender.serve(spec) as address, workers(contender, address, spec) as running:
        running[0].call(loops.check, spec, contender.abilities)
        # Workers ask for different ids, as workers do.
        requests = [loops.Requests(rows=spec.rows, seed=10 + 100 * rank) for rank in range(worker_count)]
        each = [(drawn, spec.dim, plan.seconds) for drawn in requests]
        return float(sum(call_together(running, loops.pull_push_rate, each)))


def _ids(metric: str, subject: str, *needs: Need, goal: str = "", limit: str | None = None) -> Line:
    return Line(
        metric=metric, subjects=(subject,), unit="M ids/s", scale=1e6, needs=needs, goal=goal, limit=limit
    )


def _latency(metric: str, subject: str, *needs: Need, goal: str = "") -> Line:
    return Line(metric=metric, subjects=(subject,), unit="us", lower_is_better=True, needs=needs, goal=goal)


def lines() -> list[Line]:
    rpc, rest = Need(peers=_RPC, factor=3), Need(peers=(*_RPC_HUGE, *_RAY))
    ten = Need(peers=_RPC, factor=10)
    s3 = Need(peers=(*_RPC, *_RAY), factor=3)
    floor_unix, floor_tcp = Need(peers=(_FLOOR_UNIX,), factor=1.4), Need(peers=(_FLOOR_TCP,), factor=1.3)
    below = Need(peers=(_FLOOR_TCP,), factor=1)
    return [
        _ids(S1, _AUTO, rpc, floor_unix, rest, goal="18 M", limit="limit gather of 256-byte rows, one core"),
        _ids(S1, _UNIX, Need(peers=(_FLOOR_UNIX,)), Need(peers=(_BETTER_UNIX,)), limit=_UNIX_LIMIT),
        _ids(S1, _TCP, floor_tcp, Need(peers=(_BETTER_TCP,)), goal="10 M", limit=_TCP_LIMIT),
        _latency(P50, _AUTO, ten, Need(peers=(_FLOOR_UNIX, *_RAY)), goal="20 us"),
        _latency(P50, _UNIX, Need(peers=(_FLOOR_UNIX,))),
        _latency(P50, _TCP, below),
        _latency(P99, _AUTO, ten, Need(peers=(_FLOOR_UNIX, *_RAY))),
        _latency(P99, _UNIX, Need(peers=(_FLOOR_UNIX,))),
        _latency(P99, _TCP, below),
        _ids(
            S2,
            _AUTO,
            Need(peers=(*_RPC, *_RAY), factor=4),
            Need(peers=_RPC_HUGE),
            goal="6x",
            limit="limit S2 by memory traffic, two cores",
        ),
        _ids(S2, _UNIX),
        _ids(S2, _TCP),
        _ids(S3[2, 1], _AUTO, s3, goal="4.5x", limit="limit S3 by memory traffic, two cores"),
        _ids(S3[2, 2], _AUTO, s3, goal="4.5x", limit="limit S3 by memory traffic, two cores"),
    ]
