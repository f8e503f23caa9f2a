"""Workers in virtual time over one real embedded store: what they wait for is decided by the real sync shard.

One thread plays all workers. A step takes as many virtual seconds as `seconds(rank, step)` says; pulls,
pushes and the sync shard's answers take none. A worker that may not go on yet asks again after every event.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.train.history import History

from shoal import _core
from shoal.sync import parse

TABLE, WAIT_S = 1, 20.0
TIMED_OUT = "is waiting for"


class VirtualCrew:
    """`workers` of them under a sync word; each push is -1 in the worker's own column of every row."""

    def __init__(self, workers: int, word: str, keys: int = 40) -> None:
        self.workers, self.policy = workers, parse(word)
        self._store = _core.Client.embedded(shards=8, threads=1)
        spec = _core.TableSpec()
        spec.id, spec.name, spec.dim = TABLE, "rows", workers
        spec.optimizer, spec.init = _core.OptimizerSpec("sgd"), _core.InitSpec("zeros")
        spec.optimizer.lr = 1.0
        self._store.declare(spec, 1.0)
        self._keys = np.arange(keys, dtype=np.int64)
        self._clients = [self._store.fork() for _ in range(workers)]
        self._step = [0] * workers
        for rank, client in enumerate(self._clients):
            core = self.policy.core_spec(workers)
            core["quorum"] /= workers
            self._step[rank] = client.sync_open(rank=rank, workers=workers, timeout_s=WAIT_S, **core)[0]

    def rows(self, rank: int) -> Any:
        return self._clients[rank].pull(TABLE, self._keys, timeout_s=WAIT_S).wait(WAIT_S)

    def state(self) -> dict[str, Any]:
        return self._store.sync_state(WAIT_S)

    def run(
        self,
        until: Callable[[VirtualCrew], bool],
        seconds: Callable[[int, int], float],
        history: History | None = None,
    ) -> float:
        """Play until it says so; gives the virtual time."""
        now, events, waiting = 0.0, [], set()

        def begin(rank: int) -> None:
            step = self._step[rank]
            rows = self.rows(rank)
            if history is not None:
                history.start(rank, step)
                history.read(rank, step, rows)
            heapq.heappush(events, (now + seconds(rank, step), rank))

        for rank in range(self.workers):
            begin(rank)
        while not until(self):
            now, rank = heapq.heappop(events)  # an IndexError: all wait, for nobody
            self._push(rank)
            if history is not None:
                history.finish(rank, self._step[rank])
            waiting.add(rank)
            for parked in sorted(waiting, key=lambda other: (other - rank) % self.workers):
                if self._advance(parked):
                    waiting.discard(parked)
                    begin(parked)
        return now

    def _push(self, rank: int) -> None:
        grads = np.zeros((len(self._keys), self.workers), np.float32)
        grads[:, rank] = -self.policy.contribution_scale(1.0, self.workers)
        staged = rank if self.policy.staged else -1
        self._clients[rank].push(
            TABLE, self._keys, grads, lr=math.nan, step=self._step[rank], stage_rank=staged,
            by_staleness=self.policy.by_staleness, timeout_s=WAIT_S,
        ).wait(WAIT_S)  # fmt: skip

    def _advance(self, rank: int) -> bool:
        weight = self.policy.commit_weight(1.0)
        try:
            answer = self._clients[rank].advance(
                rank=rank, step=self._step[rank], weight=weight, timeout_s=0.0
            )
        except _core.CoreError as error:
            if TIMED_OUT not in str(error):
                raise
            return False
        self._step[rank] = answer["step"]
        return True
