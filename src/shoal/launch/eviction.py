"""A worker that is gone, or is to be: nothing of it takes effect any more, and nobody waits for it."""

from __future__ import annotations

from typing import Any, cast

from shoal.fleet.local import LocalCluster
from shoal.store.messages import AttendCut
from shoal.store.rounds import Rounds, client_name

TIMEOUT_S = 3.0


def evict(cluster: LocalCluster, rank: int, workers: int, *, dismissed: bool) -> None:
    """Fence the worker by coming under its name, and let its rank go; ShoalError: that could not be done.

    Where it was `dismissed` no checkpoint waits for another one in its place.
    """
    with cluster.connect(name=client_name(rank), lane="unix", timeout=TIMEOUT_S) as client:
        Rounds(client, rank, workers).leave()
        if dismissed:
            cast(Any, client._directory).attend(AttendCut(rank=rank, here=False, dismissed=True))
