"""What went with servers: who took a shard over with how much, and what clients had been told before.

A server that becomes the head of a shard says with which version it begins. Clients hear of that, and answer
with what they had been acknowledged beyond it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from shoal.store.messages import Lost, Takeover, WatchPlacement

__all__ = ["Losses", "describe"]

_LOST_MAX = 4096


class Losses:
    """The takeovers of one coordinator's life, and what clients say that they lost by them."""

    def __init__(self) -> None:
        self._number = 0  # of the last takeover
        # Every one, in order: versions of a shard begin anew with each, so none stands for the one before.
        self._takeovers: deque[tuple[int, Takeover]] = deque(maxlen=_LOST_MAX)
        self._lost: dict[tuple[int, int, int], Lost] = {}  # by shard, term and client, which may say it again

    def hear(self, request: WatchPlacement) -> None:
        """Take what a server or a client says."""
        for one in request.takeovers:
            self._number += 1
            self._takeovers.append((self._number, one))
        self._lost |= {(one.shard, one.term, one.client): one for one in request.lost}
        while len(self._lost) > _LOST_MAX:
            del self._lost[next(iter(self._lost))]

    def news(self, request: WatchPlacement, life: int) -> tuple[int, tuple[Takeover, ...]]:
        """The number of the last takeover, and those that a client has not heard of."""
        heard = request.heard if request.life == life else 0
        new = (one for number, one in self._takeovers if number > heard)
        return self._number, tuple(new) if request.server is None else ()

    def by_shard(self) -> tuple[Lost, ...]:
        """For each shard and term: the newest version that any client was told of, and all their pushes."""
        found: dict[tuple[int, int], Lost] = {}
        for (shard, term, _), one in sorted(self._lost.items()):
            known = found.get((shard, term), Lost(shard=shard, term=term, version=one.version))
            found[shard, term] = msgspec.structs.replace(
                known, last=max(known.last, one.last), pushes=known.pushes + one.pushes
            )
        return tuple(found.values())


def describe(losses: Sequence[Lost]) -> str:
    """What went with servers, in a short line; which versions of which shards, the status knows.

    >>> describe([Lost(shard=shard, term=2, version=120, last=180) for shard in (3, 4, 5, 9)])
    'lost with a server: 240 updates of 4 shards (3-5, 9); versions by shard: shoal status --json'
    """
    gone = sorted({one.shard for one in losses if one.last > one.version})
    updates = sum(max(0, one.last - one.version) for one in losses)
    pushes = sum(one.pushes for one in losses)
    said = f", {pushes} of them acknowledged pushes," if pushes else ""
    begins = [shard for shard in gone if shard - 1 not in gone]
    ends = [shard for shard in gone if shard + 1 not in gone]
    ranges = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True)]
    shards = "1 shard" if len(gone) == 1 else f"{len(gone)} shards"
    return (
        f"lost with a server: {updates} updates{said} of {shards} ({', '.join(ranges)}); versions by shard: "
        "shoal status --json"
    )
