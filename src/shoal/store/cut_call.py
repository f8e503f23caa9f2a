"""Workers are called before a cut: each keeps copies of what lies on it alone, until the cut is made.

A pure state machine, at the coordinator or in an embedded store. A call is known by the checkpoint's name. A
worker that asks (`AttendCut`) hears of it, copies its state at the end of each step, and says that it is
ready. When all are, the cut is made, and clocks say at the end of which step: a worker then writes the copy
of that step. Nobody waits but who saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.store.messages import AttendCut, CutNews


class CutCall:
    """The last call, and who attends: by connection, or whatever tells workers apart."""

    def __init__(self) -> None:
        self.news = CutNews()
        self._attending: dict[int, AttendCut] = {}

    def open(self, url: str, name: str) -> None:
        """A cut is wanted."""
        self._become(url=url, name=name, state="called", clocks=())

    def attend(self, peer: int, request: AttendCut) -> CutNews:
        """What a worker is told; it says how far it is."""
        if request.here:
            self._attending[peer] = request
        else:
            self.left(peer)
        return self.news

    def left(self, peer: int) -> None:
        """It is called no more."""
        self._attending.pop(peer, None)

    @property
    def missing(self) -> list[int]:
        """The ranks that are not ready, and will be."""
        there = self._attending.values()
        stands = any(one.stands for one in there)
        return [one.rank for one in there if one.ready != self.news.name and not (stands and one.waits)]

    def splits_a_step(self, clocks: Sequence[int]) -> bool:
        """Whether a cut with these clocks lies within a step that workers make together."""
        ranks = [one.rank for one in self._attending.values() if one.aligned]
        return len({clocks[rank] for rank in ranks if rank < len(clocks)}) > 1

    def begins(self, does: bool) -> None:
        """The shards are being cut, or it is to be tried again later."""
        if self.news.state in ("called", "begins"):
            self._become(state="begins" if does else "called")

    def made(self, clocks: Sequence[int]) -> tuple[int, ...]:
        """All shards are cut; the ranks whose state is to come."""
        self._become(state="made", clocks=tuple(clocks))
        return tuple(sorted(one.rank for one in self._attending.values() if one.ready == self.news.name))

    def end(self) -> None:
        """If it was not made, it will not be."""
        if self.news.state != "made":
            self._become(state="")

    def restored(self, checkpoint: str) -> None:
        """Clocks are those of this checkpoint."""
        self._become(restored=checkpoint)

    def _become(self, **changes: object) -> None:
        self.news = msgspec.structs.replace(self.news, **changes)
