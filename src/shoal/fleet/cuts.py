"""Saving and loading over all servers, as a pure state machine: one at a time, for one that asked.

A save is one cut through all shards:

0. wait: a shard has one image, which a fill reads too. Fills under way are ended, and shards that are short
   of copies get them, for a minute at most; no other fill begins until the cut is written;
1. call: where workers are to add what lies on them alone (`shoal.store.cut_call`), they get ready for it;
2. hold: every client keeps new pushes back, and answers when those in flight are acknowledged everywhere.
   Who does not answer within a second is let go on with the others, and all are asked again;
3. begin: every server begins an image of its shards; when all have, the clients go on. A hold ends by itself
   two seconds after a client was told of it, so what took longer is no cut, and is tried again;
4. write: servers bring their images to files. If a shard is short of copies meanwhile, whose fill waits, that
   goes first after a minute, once: whoever asked begins anew.

A load: every server checks what it would read; only when all have does any change a row. The first failure,
the end of a server's connection or the deadline ends either on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.errors import ShoalError, Timeout, Unavailable, code_of, from_code
from shoal.fleet.decisions import ClocksRestored
from shoal.fleet.leases import Leases
from shoal.fleet.pulse import PulseOrder
from shoal.store import messages as m
from shoal.store.cut_call import CutCall

Replies = list[tuple[int, m.Reply | PulseOrder]]

HOLD_S = 1.0
BEGIN_S = 1.8  # from the moment that clients are told to hold
COPIES_S = 60.0
# A job that is being ended, and its saver, are over by then; and mostly who dies is replaced.
GONE_S = 10.0
_PAUSE_S = 0.2
_GOLDEN = 0.618
_TRIES_MAX = 50


@dataclass
class _Work:
    peer: int
    request: m.SaveStore | m.LoadStore | m.ReloadStore
    connected: Mapping[int, int]  # index -> connection, as it changes
    owners: Callable[[], Mapping[int, tuple[int, ...]]]  # index of the server -> shards, as it changes
    until: float
    copies_until: float
    call_until: float = 0.0
    gone_until: float = 0.0
    lets_copy: bool = False
    shards: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # what that was when it began
    servers: Mapping[int, int] = field(default_factory=dict)  # of those, their connections
    number: int = 0
    stage: Literal["wait", "call", "pause", "hold", "begin", "write", "check", "load"] = "wait"
    stage_until: float = 0.0
    tries: int = 0
    why_not: str = ""
    held: set[int] = field(default_factory=set)  # connections of clients that were told to hold
    waiting: set[int] = field(default_factory=set)  # clients or servers that have not come so far
    parts: dict[int, m.PartInfo | None] = field(default_factory=dict)
    clocks: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()  # that write their state
    restored: str = ""  # and who has come since, when it was cut
    came: tuple[int, ...] = ()


_NO_IMAGES = ("wait", "call", "pause", "hold")


class Cuts:
    """What is being saved or loaded, if anything. `copying`: the shards that are being filled, and those that
    are short of copies and wait for a fill. `unseen`: clients that may push and cannot be told to hold.
    """

    def __init__(
        self,
        shards: int,
        leases: Leases,
        copying: Callable[[], tuple[Set[int], Set[int]]] = lambda: (frozenset(), frozenset()),
        unseen: Callable[[], Set[int]] = frozenset,
    ) -> None:
        self._shards = shards
        self._leases = leases
        self._copying = copying
        self._unseen = unseen
        self.number = 0  # of the last order; another coordinator's are others
        self._work: _Work | None = None
        self._call = CutCall()
        self._kept = ClocksRestored(checkpoint="")  # as a later coordinator would know it
        self.reloaded: tuple[int, m.ReloadStore] | None = None  # what all have read, and who asked for it

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        work = self._work
        if work is None:
            return None
        return work.until if work.stage in ("check", "load") else min(work.until, work.stage_until)

    @property
    def holding(self) -> bool:
        """Whether clients are held now: one that comes newly must wait."""
        return self._work is not None and self._work.stage in ("hold", "begin")

    @property
    def fills(self) -> Literal["all", "copies", "none"]:
        """Which fills may begin now."""
        if self._work is None:
            return "all"
        return "copies" if self._work.lets_copy else "none"

    def begin(
        self,
        peer: int,
        request: m.SaveStore | m.LoadStore | m.ReloadStore,
        servers: Mapping[int, int],
        shards: Callable[[], Mapping[int, tuple[int, ...]]],
        now: float,
    ) -> Replies:
        """Start; raises Unavailable where that cannot be."""
        if self._work is not None:
            raise Unavailable("another checkpoint is being saved or loaded; try again when it is done")
        self._work = _Work(peer, request, servers, shards, now + request.wait_s, now + COPIES_S)
        return self._when_copied(self._work, now)

    def _when_copied(self, work: _Work, now: float) -> Replies:
        request = work.request
        if not isinstance(request, m.ReloadStore):  # fills of what that changes become void
            filled, short = self._copying()
            work.lets_copy = bool(short) and now < work.copies_until
            if filled or work.lets_copy:
                work.stage_until = now + _PAUSE_S
                work.why_not = f"shard {_list(filled | short)} is being copied"
                return []
        work.shards, work.servers = work.owners(), dict(work.connected)
        # Not while workers wait for a server that is gone: whoever brings its shards back must not wait too.
        if (
            isinstance(request, m.SaveStore)
            and request.call_s > 0
            and work.shards.keys() <= work.servers.keys()
        ):
            self._call.open(request.url, request.name)
            work.stage, work.call_until = "call", now + request.call_s
            return self._called(now)
        return self._start(work, now)

    def to_keep(self) -> list[ClocksRestored]:
        """What is to be decided since it has changed: workers that come later must find it."""
        now = ClocksRestored(checkpoint=self._call.news.restored, came=self._call.came)
        return [now] if now.checkpoint and now != self._kept else []

    def restore(self, kept: ClocksRestored) -> None:
        """It was decided, by this coordinator or one before it."""
        self._kept = kept
        if (self._call.news.restored, self._call.came) != (kept.checkpoint, kept.came):
            self._call.restored(kept.checkpoint, kept.came)

    def attend(self, peer: int, request: m.AttendCut, now: float) -> Replies:
        """A worker asks whether a cut is wanted, and says whether it is ready."""
        return [(peer, self._call.attend(peer, request)), *self._called(now)]

    def _called(self, now: float) -> Replies:
        """Go on, if all are ready whom there was time to hear of, or there is no more time."""
        work = self._work
        if work is None or work.stage != "call":
            return []
        if self._call.gone:
            work.gone_until = work.gone_until or now + GONE_S
            if now >= work.gone_until:
                self._call.give_up()
        gone = self._call.gone
        work.stage_until = min(work.call_until, work.gone_until) if gone else work.call_until
        waits = bool(self._call.missing) or gone or self._leases.starting(now)
        return [] if waits and now < work.call_until else self._start(work, now)

    def _start(self, work: _Work, now: float) -> Replies:
        work.shards = work.owners()  # of now: a server may have been given up since the last try
        work.servers = {index: peer for index, peer in work.connected.items() if index in work.shards}
        if gone := work.shards.keys() - work.servers.keys():
            text = f"server {_list(gone)} is not connected to the coordinator"
            if self._leases.starting(now):
                return self._pause(work, now, text)
            return self._fail(Unavailable(text))
        if isinstance(work.request, m.SaveStore):
            return self._hold(work, now)
        work.stage, work.waiting = "check", set(work.shards)
        return self._orders(work, "check")

    def held(self, peer: int, number: int, now: float) -> Replies:
        """A client keeps its pushes back."""
        work = self._work
        if work is None or work.stage != "hold" or number != work.number:
            return []
        work.waiting.discard(peer)
        return [] if work.waiting else self._begin_images(work)

    def report(self, peer: int, report: m.PartReport, now: float) -> Replies:
        """A server has come further; one that speaks of something earlier is not heard."""
        work = self._work
        if work is None or report.number != work.number or work.stage in _NO_IMAGES:
            return []
        index = next((i for i, p in work.servers.items() if p == peer), None)
        if index is None:
            return []
        if report.did == "failed":
            return self._fail(from_code(report.code, f"server {index}: {report.message}"))
        if work.stage == "begin" and now >= work.stage_until:  # this coordinator slept, and tick comes later
            return self._pause(work, now, f"server {index} was heard too late")
        if work.stage == "begin" and work.owners() != work.shards:  # its image may be of the past
            return self._pause(work, now, "shards have got other servers")
        work.clocks = work.clocks or report.clocks
        if work.stage == "begin" and self._call.splits_a_step(work.clocks):
            return self._pause(work, now, f"workers were within a step, at {_list(set(work.clocks))}")
        if work.stage == "begin" and self._call.splits_a_batch(work.clocks):
            return self._pause(work, now, f"a worker was within a batch, at {_list(set(work.clocks))}")
        if report.did == "saved":
            work.parts[index] = report.part
        if report.did != "begun" or work.stage == "begin":
            work.waiting.discard(index)
        return [] if work.waiting else self._next(work)

    def closed(self, peer: int, now: float) -> Replies:
        """A connection ended."""
        self._call.lost(peer)
        work = self._work
        if work is None:
            return []
        if peer == work.peer:
            return self._fail(None)
        for index, connection in work.servers.items():
            if connection == peer:
                return self._fail(Unavailable(f"server {index} has gone while a checkpoint was made of it"))
        if self.holding and peer in work.held:
            return self._pause(work, now, "a client's connection ended")
        return self._called(now)

    def tick(self, now: float) -> Replies:
        """Go on with, or end, what takes too long."""
        work = self._work
        if work is None:
            return []
        if now >= work.until:
            doing = (
                work.why_not
                if work.stage in ("wait", "pause")
                else f"{work.stage} waits for {_list(work.waiting)}"
            )
            return self._fail(
                Timeout(f"{work.request.url}: not done within {work.request.wait_s:g} s: {doing}")
            )
        if work.stage in ("check", "load") or now < work.stage_until:
            return []
        if work.stage == "wait":
            return self._when_copied(work, now)
        if work.stage == "write":
            return self._give_way(work, now)
        if work.stage == "call":
            return self._called(now)
        if work.stage == "pause":
            return self._start(work, now)
        if work.stage == "begin":
            return self._pause(work, now, f"server {_list(work.waiting)} did not begin in time")
        clients = self._leases.peers()
        names = _list({clients.get(peer, 0) for peer in work.waiting})
        return self._pause(work, now, f"client {names} did not hold its pushes within {HOLD_S:g} s")

    def _give_way(self, work: _Work, now: float) -> Replies:
        _, short = self._copying()
        assert isinstance(work.request, m.SaveStore)
        if not short or not work.request.gives_way:
            work.stage_until = now + COPIES_S
            return []
        return [
            *self._fail(None),
            (work.peer, m.StoreSaved(again=f"shard {_list(short)} is short of copies")),
        ]

    def _hold(self, work: _Work, now: float) -> Replies:
        self._leases.drop_expired(now)
        unreachable = {lease.client_id for lease in self._leases.unreachable()} | self._unseen()
        if unreachable or self._leases.starting(now):
            names = _list(unreachable)
            why = f"waiting for client {names} to connect again, or to be given up"
            return self._pause(work, now, why, tried=False)
        self.number += 1
        work.number = self.number
        work.stage, work.stage_until = "hold", now + HOLD_S
        work.held = set(self._leases.peers())
        work.waiting = set(work.held)
        if not work.waiting:
            return self._begin_images(work)
        return [(peer, PulseOrder(True, work.number)) for peer in work.held]

    def _begin_images(self, work: _Work) -> Replies:
        work.stage, work.stage_until = "begin", work.stage_until - HOLD_S + BEGIN_S
        work.waiting = set(work.shards)
        self._call.begins(True)
        return self._orders(work, "save")

    def _pause(self, work: _Work, now: float, why: str, *, tried: bool = True) -> Replies:
        """Let everybody go on, and try again after a while."""
        replies = self._stop(work)
        self._call.begins(False)
        work.tries += tried
        work.why_not = why
        if work.tries >= _TRIES_MAX:
            return replies + self._fail(Timeout(f"{work.request.url}: no cut in {work.tries} tries: {why}"))
        # Uneven pauses: at even ones workers whose batches are as long would be at the same place each time.
        uneven = 0.5 + work.tries * _GOLDEN % 1
        work.stage, work.stage_until = "pause", now + _PAUSE_S * uneven
        work.waiting, work.held, work.parts, work.clocks = set(), set(), {}, ()
        return replies

    def _next(self, work: _Work) -> Replies:
        if work.stage == "begin":
            released: Replies = [(peer, PulseOrder(False, work.number)) for peer in work.held]
            work.stage, work.held = "write", set()
            work.stage_until += COPIES_S
            if isinstance(work.request, m.SaveStore) and work.request.call_s > 0:
                work.workers = self._call.made(work.clocks)
            work.restored, work.came = self._call.news.restored, self._call.came
            work.waiting = set(work.shards) - set(work.parts)
            return released if work.waiting else released + self._next(work)
        if work.stage == "check":
            work.stage, work.waiting = "load", set(work.shards)
            return self._orders(work, "load")
        self._work = None
        if getattr(work.request, "resume", False) or getattr(work.request, "together", False):
            self._call.restored(f"{work.request.url}/{work.request.name}")
        if isinstance(work.request, m.ReloadStore):
            self.reloaded = (work.peer, work.request)
            return []
        if work.stage == "load":
            return [(work.peer, m.Done())]
        parts = tuple(part for _, part in sorted(work.parts.items()) if part is not None)
        if len(parts) < len(work.shards):
            parts = ()  # some base is not to be had: the caller makes a whole one instead
        saved = m.StoreSaved(
            parts=parts,
            clocks=work.clocks,
            shards=self._shards,
            workers=work.workers,
            restored=work.restored,
            came=work.came,
        )
        return [(work.peer, saved)]

    def _orders(self, work: _Work, do: Literal["save", "check", "load"]) -> Replies:
        request = work.request
        self.number += do == "check"
        work.number = self.number
        more: dict[str, Any]
        match request:
            case m.SaveStore():
                more = {"base": request.base}
            case m.LoadStore():
                more = {"tables": request.tables, "resume": request.resume}
            case m.ReloadStore():
                more = {"resume": True, "reload": "together" if request.together else "alone"}
        return [
            (
                work.servers[index],
                m.PartOrder(
                    number=work.number,
                    do=do,
                    url=request.url,
                    name=request.name,
                    index=index,
                    shards=shards,
                    **more,
                ),
            )
            for index, shards in work.shards.items()
        ]

    def _stop(self, work: _Work) -> Replies:
        replies: Replies = [(peer, PulseOrder(False, work.number)) for peer in work.held]
        if work.stage not in _NO_IMAGES:
            order = m.PartOrder(number=work.number, do="stop")
            replies += [(peer, order) for peer in work.servers.values()]
        return replies

    def _fail(self, error: ShoalError | None) -> Replies:
        work, self._work = self._work, None
        assert work is not None
        self._call.end()
        replies = self._stop(work)
        if error is not None:
            replies.append((work.peer, m.Failure(code=code_of(error), message=str(error))))
        return replies


def _list(numbers: Set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
