"""MEM and SCALE: what a row costs in the server's memory, and whether a large table slows the rows in use."""

from bench import loops
from bench.contender import Contender, Spec
from bench.plan import Plan, alternate
from bench.processes import call_together, rss_bytes, workers
from bench.report import Book, Line
from bench.subject import Shoal, give_birth, open_table

DIM = 16
MEMORY = {
    "adagrad": "MEM bytes/row, Adagrad dim 16",
    "adam": "MEM bytes/row, Adam dim 16",
    "rowwise_adagrad": "MEM bytes/row, row-wise Adagrad dim 16",
    "sgd": "MEM bytes/row, SGD dim 16",
}
SMALL, LARGE_FIXED, LARGE_ALL = (
    "SCALE 1M rows",
    "SCALE large table, 1M rows used",
    "SCALE large table, all used",
)
RATIO_FIXED, RATIO_ALL = "SCALE large / 1M rows, same 1M used", "SCALE large / 1M rows, all used"
_STATE_FLOATS = {"adagrad": DIM, "adam": 2 * DIM + 1, "rowwise_adagrad": 1, "sgd": 0}


def run(book: Book, plan: Plan) -> None:
    if plan.wants("MEM"):
        for optimizer, metric in MEMORY.items():
            alternate(
                book,
                plan,
                "MEM",
                [Shoal("auto")],
                lambda _, o=optimizer, m=metric: {m: _bytes_per_row(plan, o)},
            )
    if plan.wants("SCALE"):
        alternate(book, plan, "SCALE", [Shoal("auto")], lambda contender: _scale(contender, plan))


def _bytes_per_row(plan: Plan, optimizer: str) -> float:
    import shoal

    spec = Spec(rows=plan.memory_rows, dim=DIM, optimizer=optimizer)
    with shoal.LocalCluster(servers=1) as cluster:
        client = cluster.connect()
        try:
            pid = cluster.servers[0].pid
            table = open_table(client, spec)
            before = rss_bytes(pid)
            give_birth(table, spec)
            return (rss_bytes(pid) - before) / spec.rows
        finally:
            client.close()


def _scale(contender: Contender, plan: Plan) -> dict[str, float]:
    used = plan.rows
    small = Spec(rows=plan.rows, dim=DIM)
    large = Spec(rows=plan.large_rows, dim=DIM)
    figures = {SMALL: _rates(contender, plan, small, [used])[0]}
    figures[LARGE_FIXED], figures[LARGE_ALL] = _rates(contender, plan, large, [used, large.rows])
    figures[RATIO_FIXED] = figures[LARGE_FIXED] / figures[SMALL]
    figures[RATIO_ALL] = figures[LARGE_ALL] / figures[SMALL]
    return figures


def _rates(contender: Contender, plan: Plan, spec: Spec, sets: list[int]) -> list[float]:
    with contender.serve(spec) as address, workers(contender, address, spec) as running:
        running[0].call(loops.check, spec, contender.abilities)
        drawn = [loops.Requests(rows=spec.rows, seed=10, among=among) for among in sets]
        return [
            call_together(running, loops.pull_push_rate, [(requests, DIM, plan.seconds)])[0]
            for requests in drawn
        ]


def lines() -> list[Line]:
    auto = (Shoal("auto").name,)
    memory = [
        Line(
            metric=metric,
            subjects=auto,
            unit="B",
            lower_is_better=True,
            bar=1.25 * 4 * (DIM + _STATE_FLOATS[optimizer]) + 32,
        )
        for optimizer, metric in MEMORY.items()
    ]
    rates = [
        Line(metric=m, subjects=auto, unit="M ids/s", scale=1e6) for m in (SMALL, LARGE_FIXED, LARGE_ALL)
    ]
    # From 1 to 20 million rows: a quarter may go for rows in use, and 60 % to cache misses over all rows.
    kept = [
        Line(metric=metric, subjects=auto, unit="x", bar=bar)
        for metric, bar in ((RATIO_FIXED, 0.75), (RATIO_ALL, 0.4))
    ]
    return memory + rates + kept
