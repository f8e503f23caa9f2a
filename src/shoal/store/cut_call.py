"""Workers are called before a cut: each keeps copies of what lies on it alone, until the cut is made.

A pure state machine, at the coordinator or in an embedded store. A call is known by the checkpoint's name. A
worker that asks (`AttendCut`) hears of it, copies its state at the end of each step, and says that it is
ready. When all are, the cut is made, and clocks say at the end of which step: a worker then writes the copy
of that step. Nobody waits but who saves.

Who has gone without a word is waited for as well, for a while: a job that is being ended would else have a
last checkpoint without what the one before it has. Of ranks that have not come since the clocks were taken
back to a checkpoint, that one says what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shoal.store.messages import AttendCut, CutNews


class CutCall:
    """The last call, and who attends: by connection, or whatever tells workers apart."""

    def __init__(self) -> None:
        self.news = CutNews()
        self._attending: dict[int, AttendCut] = {}
        self._came: set[int] = set()  # since the clocks were taken back
        self._gone: set[int] = set()  # whose connection has ended, and nobody came in their place
        self._dismissed: set[int] = set()  # in whose place nobody will come

    def open(self, url: str, name: str) -> None:
        """A cut is wanted."""
        self._become(url=url, name=name, state="called", clocks=())

    def attend(self, peer: int, request: AttendCut) -> CutNews:
        """What a worker is told; it says how far it is."""
        if request.here:
            self._attending[peer] = request
            self._came.add(request.rank)
            self._gone.discard(request.rank)
            self._dismissed.discard(request.rank)
        else:
            self._attending.pop(peer, None)
        if request.dismissed:
            self._gone.discard(request.rank)
            self._dismissed.add(request.rank)
        return self.news

    def lost(self, peer: int) -> None:
        """Its connection has ended."""
        if (one := self._attending.pop(peer, None)) is not None:
            here = {other.rank for other in self._attending.values()}
            self._gone |= {one.rank} - here - self._dismissed

    @property
    def came(self) -> tuple[int, ...]:
        """The ranks that have prepared a model since the clocks were taken back to a checkpoint."""
        return tuple(sorted(self._came))

    @property
    def missing(self) -> list[int]:
        """The ranks that are not ready, and will be."""
        there = self._attending.values()
        stands = any(one.stands for one in there)
        return [one.rank for one in there if one.ready != self.news.name and not (stands and one.waits)]

    @property
    def gone(self) -> bool:
        """Whether one has gone without a word, and another may come in its place."""
        stands = any(one.stands for one in self._attending.values())
        return bool(self._gone) and not stands  # who comes may wait for the one that saves

    def give_up(self) -> None:
        """Those are waited for no more."""
        self._gone.clear()

    def splits_a_step(self, clocks: Sequence[int]) -> bool:
        """Whether a cut with these clocks lies within a step that workers make together."""
        ranks = [one.rank for one in self._attending.values() if one.aligned]
        return len({clocks[rank] for rank in ranks if rank < len(clocks)}) > 1

    def splits_a_batch(self, clocks: Sequence[int]) -> bool:
        """Whether a worker that is ready would go on behind some of the steps that it makes with a batch."""
        there = [one for one in self._attending.values() if one.ready == self.news.name]
        return any(
            clocks[one.rank] not in one.whole
            for one in there
            if one.whole is not None and one.rank < len(clocks)
        )

    def begins(self, does: bool) -> None:
        """The shards are being cut, or it is to be tried again later."""
        if self.news.state in ("called", "begins"):
            self._become(state="begins" if does else "called")

    def made(self, clocks: Sequence[int]) -> tuple[int, ...]:
        """All shards are cut; the ranks whose state is to come."""
        self._become(state="made", clocks=tuple(clocks))
        self.give_up()
        return tuple(sorted(one.rank for one in self._attending.values() if one.ready == self.news.name))

    def end(self) -> None:
        """If it was not made, it will not be."""
        if self.news.state != "made":
            self._become(state="")

    def restored(self, checkpoint: str, came: Iterable[int] = ()) -> None:
        """Clocks are those of this checkpoint; these have come since."""
        self._become(restored=checkpoint)
        self._came, self._gone = set(came), set()

    def _become(self, **changes: object) -> None:
        self.news = msgspec.structs.replace(self.news, **changes)
