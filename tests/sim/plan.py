"""What happens in one simulated run: who pushes and pulls what, which faults strike, all from one seed.

A plan is a value. Taking actions out of it gives a smaller plan, which is how a failing one is shrunk.
Times are virtual milliseconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
KEYS = (0, 1, -1, 2, 3, 7, -7, 64, 1000, 4096, -99999, 1 << 40, INT64_MAX, INT64_MIN)
TABLES = (1, 2)
BURST_EVERY = 25  # one seed in so many opens more pushes than the window has room for
BURST_PUSHES = 300


class Action(NamedTuple):
    """Something that is done at `at`, by or to the client `who` (for `pause_server`: that server)."""

    at: float
    kind: str  # push pull | cut mute pause_client pause_server crash
    who: int
    # push: (table, column, *numbers of keys), pull: (table, *numbers of keys), cut: (server,),
    # mute: (server, direction, ms), pause_*: (ms,), crash: (ms until it is back,)
    detail: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `stream`: connections keep order and lose nothing until they are cut, as TCP's do;
    otherwise each frame is delayed, dropped or doubled by itself."""

    seed: int
    servers: int
    shards: int
    clients: int
    stream: bool
    drop: float
    double: float
    delay_ms: float
    late_ms: float  # how long a straggler may stay behind
    quiet_after: float  # no fault begins later
    replicas: int = 0
    weak: bool = False  # acknowledged before the copies have it
    columns: tuple[int, ...]  # per table: one for each of its pushes
    actions: tuple[Action, ...]


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    stream = rng.random() < 0.5
    servers, clients = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 3))
    burst = seed % BURST_EVERY == 0
    length = rng.choice((200.0, 500.0, 1000.0))
    columns = [0] * len(TABLES)
    actions = []
    for _ in range(rng.randint(10, 30)):
        actions.append(_work(rng, clients, length, columns))
    if burst:
        who, at = rng.randrange(clients), rng.uniform(0, length / 2)
        for _ in range(BURST_PUSHES):
            actions.append(_push(rng, at, who, columns, keys_max=2))
    for _ in range(rng.choice((0, 2, 4, 8))):
        actions.append(_fault(rng, servers, clients, length))
    actions.sort(key=lambda action: action.at)
    return Plan(
        seed=seed,
        servers=servers,
        shards=rng.choice((servers, 4, 8)),
        clients=clients,
        stream=stream,
        drop=0.0 if stream else rng.choice((0.0, 0.02, 0.1, 0.3)) / (3 if burst else 1),
        double=0.0 if stream else rng.choice((0.0, 0.1, 0.4)),
        delay_ms=rng.choice((1.0, 5.0, 20.0)),
        late_ms=rng.choice((20.0, 200.0, 800.0)),
        quiet_after=length,
        columns=tuple(columns),
        actions=tuple(actions),
    )


def _work(rng: random.Random, clients: int, length: float, columns: list[int]) -> Action:
    at, who = rng.uniform(0, length), rng.randrange(clients)
    if rng.random() < 0.65:
        return _push(rng, at, who, columns, keys_max=6)
    table = rng.randrange(len(TABLES))
    return Action(at, "pull", who, (table, *_keys(rng, 8)))


def _push(rng: random.Random, at: float, who: int, columns: list[int], keys_max: int) -> Action:
    table = rng.randrange(len(TABLES))
    columns[table] += 1
    return Action(at, "push", who, (table, columns[table] - 1, *_keys(rng, keys_max)))


def _keys(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(len(KEYS)) for _ in range(rng.randint(1, most))]  # with duplicates


def _fault(rng: random.Random, servers: int, clients: int, length: float) -> Action:
    at, who, server = rng.uniform(0, length), rng.randrange(clients), rng.randrange(servers)
    ms = rng.choice((5, 50, 300))
    kind = rng.choice(("cut", "cut", "cut", "mute", "pause_client", "pause_server", "crash", "crash"))
    if kind == "cut":
        return Action(at, kind, who, (server,))
    if kind == "mute":
        return Action(at, kind, who, (server, rng.randrange(2), ms))
    return Action(at, kind, server if kind == "pause_server" else who, (ms,))
