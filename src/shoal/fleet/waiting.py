"""Who waits for an answer of the coordinator, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.store.messages import WatchPlacement

__all__ = ["Waiting", "Watching"]


@dataclass(frozen=True)
class Waiting:
    """A client that wants to join a cluster whose servers are not all there."""

    peer: int
    name: str | None
    since: float
    until: float


@dataclass(frozen=True)
class Watching:
    """A client or (with its index) a server that wants to know of a placement newer than `after`."""

    peer: int
    request: WatchPlacement
    until: float
