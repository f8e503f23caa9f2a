"""MOVE: how long pushes to one shard wait while servers come and go and shards move, one by one."""

import threading
import time
from contextlib import closing

import numpy as np

from bench.contender import Spec
from bench.plan import Plan, alternate
from bench.report import Book, Line
from bench.subject import Shoal, give_birth, open_table

DIM, SHARDS = 16, 64
PAUSE = {"add": "MOVE longest push, a server comes", "remove": "MOVE longest push, it goes"}
TAIL = {"add": "MOVE 99.9 % of pushes, a server comes", "remove": "MOVE 99.9 % of pushes, it goes"}
BEFORE = "MOVE longest push before"
SECONDS = {"add": "MOVE shards/s moved, a server comes", "remove": "MOVE shards/s moved, it goes"}


def run(book: Book, plan: Plan) -> None:
    if plan.wants("MOVE"):
        alternate(book, plan, "MOVE", [Shoal("auto")], lambda _: _measure(plan))


def _measure(plan: Plan) -> dict[str, float]:
    import shoal

    spec = Spec(rows=plan.memory_rows // 4, dim=DIM)
    with shoal.LocalCluster(servers=1, shards=SHARDS) as cluster, cluster.connect() as client:
        table = open_table(client, spec)
        give_birth(table, spec)
        _push_while(table, spec, plan.seconds, threading.Event())  # warm
        figures = {BEFORE: max(_push_while(table, spec, plan.seconds, threading.Event()))}

        def come() -> None:
            cluster.add_server()
            _until_moved(cluster)

        for name, change in (("add", come), ("remove", lambda: cluster.remove_server(1))):
            done, took = threading.Event(), [0.0]

            def act(change=change, done=done, took=took) -> None:
                begin = time.monotonic()
                change()
                took[0] = time.monotonic() - begin
                done.set()

            thread = threading.Thread(target=act)
            thread.start()
            gaps = _push_while(table, spec, 300.0, done)
            thread.join()
            figures[PAUSE[name]] = max(gaps)
            figures[TAIL[name]] = float(np.quantile(gaps, 0.999))
            figures[SECONDS[name]] = SHARDS / 2 / took[0]
        return figures


def _push_while(table, spec: Spec, seconds: float, done: threading.Event) -> list[float]:
    """One key a push, so that each is for one shard, and all shards in turn; how long each push took."""
    keys = [np.array([key]) for key in np.random.default_rng(5).integers(0, spec.rows, 256)]
    grad = np.full((1, spec.dim), 1e-3, np.float32)
    begin = last = time.perf_counter()
    gaps: list[float] = []
    while not done.is_set() and last < begin + seconds:
        table.push(keys[len(gaps) % len(keys)], grad)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return gaps


def _until_moved(cluster) -> None:
    from shoal.store.control import Address, ControlClient
    from shoal.store.messages import PlacementNews, WatchPlacement

    version, counts = 0, {}
    with closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control:
        while len(counts) < 2 or max(counts.values()) - min(counts.values()) > 1:
            news = control.ask(WatchPlacement(after=version, wait_s=5.0), PlacementNews, 10.0)
            if news.placement is not None:
                version = news.placement.version
                on = [chain[0] for chain in news.placement.chains]
                counts = {server: on.count(server) for server in set(on)}


def lines() -> list[Line]:
    auto = (Shoal("auto").name,)
    ms = {"unit": "ms", "scale": 1e-3, "lower_is_better": True}
    return [
        Line(metric=BEFORE, subjects=auto, **ms),
        *(Line(metric=metric, subjects=auto, bar=50.0, always=True, **ms) for metric in PAUSE.values()),
        *(Line(metric=metric, subjects=auto, **ms) for metric in TAIL.values()),
        *(Line(metric=metric, subjects=auto, unit="/s") for metric in SECONDS.values()),
    ]
