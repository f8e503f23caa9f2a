"""The coordinator's decisions as a pure state machine: fed with messages and the time, it gives replies.

It knows no sockets, no files and no clock. A driver hands in each request with the number of the
connection it came by; what comes back are decisions, to be journaled, and replies, to be sent after that.
Feeding the journaled decisions to a new instance (`restore`) gives the same state.

What it decides:

1. servers get an index for the life of the cluster; an identity that registers again gets the same one;
2. when all expected servers are there, the shards are placed, by `shoal.fleet.placer`. Servers that come
   later get shards of the others. One that ends, or is not heard of for a lease, is given up where others
   hold copies; what it says afterwards is not heard;
3. clients get an id and an incarnation, by `shoal.fleet.grants`. Before the placement exists they wait, up
   to their own deadline. A worker that is not heard of for a lease is evicted;
4. tables and tensors, by `shoal.store.catalogue`; checkpoints, by `shoal.fleet.cuts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from typing import Literal

import msgspec

from shoal.config import CoordinatorOptions
from shoal.errors import BadInput, Refused, ShoalError, Unavailable, code_of
from shoal.fleet.attendance import JOIN_S, RESTORED_S, Attendance
from shoal.fleet.balance import Cost, ShardCosts
from shoal.fleet.cuts import Cuts
from shoal.fleet.decisions import (
    LEFT,
    ClientGranted,
    ClocksRestored,
    ClusterFormed,
    Decision,
    LifeBegan,
    LossesFolded,
    LossTold,
    Placed,
    ServerGone,
    ServerLeaving,
    ServerPlaced,
    TableDefined,
    TakenOver,
)
from shoal.fleet.grants import Grants
from shoal.fleet.leases import LEASE_S, Leases
from shoal.fleet.losses import Losses
from shoal.fleet.outcome import Outcome
from shoal.fleet.placer import Placer, by_owner
from shoal.fleet.pulse import Beat, BeatKind, Hello
from shoal.fleet.roster import Roster
from shoal.fleet.waiting import Waiting, Watching, what_is_new
from shoal.store import messages as m
from shoal.store.catalogue import Catalogue

TABLES_PER_PAGE = 200
# A closed connection is mostly that of a dead process; one that lives registers again at once.
_SUSPECT_S = 0.5


class Coordinator:
    """The state of one cluster."""

    def __init__(
        self, options: CoordinatorOptions, *, pid: int = 0, client_ids_from: int = 0, now: float = -LEASE_S
    ) -> None:
        self._options = options
        self._pid = pid
        self._formed = False
        self._life = 0
        self._roster = Roster(options)
        self._losses = Losses()
        self._adopting: dict[int, int] = {}  # shards of lost servers -> who reads them from a checkpoint
        self._placer = Placer(options.replicas, weak=options.weak)
        self._costs = ShardCosts(options.shards)
        self._shard_costs: tuple[Cost, ...] = ()
        self._heard: dict[int, float] = {}  # when each server was last heard of
        self._watching: list[Watching] = []
        self._grants = Grants(client_ids_from)
        self._attendance = Attendance()
        self._catalogue = Catalogue()
        self._waiting: list[Waiting] = []
        self._began = now
        self.leases = Leases(now)
        self._cuts = Cuts(
            options.shards,
            self.leases,
            lambda: self._placer.copying(self._roster.up),
            lambda: self._attendance.unseen(self.leases.peers().values()),
        )
        self._fills = self._cuts.fills  # when it last ticked

    @property
    def ready(self) -> bool:
        """Whether every shard has a server, so that clients may join."""
        return self._placer.placed is not None

    def begin(self) -> Outcome:
        """The first decisions of a coordinator's life, after it was restored."""
        outcome = Outcome()
        if not self._formed:
            self._decide(outcome, ClusterFormed.of(self._options, self._grants.ids_from))
        self._decide(outcome, LifeBegan(number=self._life + 1))
        self._placer.first_to_know -= self._roster.gone.keys()
        return outcome

    def restore(self, decision: Decision) -> None:
        """Take over one decision of an earlier life."""
        if isinstance(decision, ClusterFormed):
            decision.check(self._options)
        self._apply(decision)
        if isinstance(decision, ClientGranted):
            self._attendance.restored(decision)

    def handle(self, peer: int, request: m.Request, now: float) -> Outcome:
        """Decide on one request of the connection `peer`. A request that cannot be met gets a Failure."""
        outcome = Outcome()
        try:
            self._handle(request, peer, now, outcome)
            for decision in self._cuts.to_keep():
                self._decide(outcome, decision)
        except ShoalError as error:
            assert not outcome.decisions, "a refused request must change nothing"
            outcome.replies.append((peer, m.Failure(code=code_of(error), message=str(error))))
        return outcome

    def closed(self, peer: int, now: float) -> Outcome:
        """A connection ended. Its server is shown as gone, and is suspected of it."""
        self._waiting = [waiting for waiting in self._waiting if waiting.peer != peer]
        self._watching = [watching for watching in self._watching if watching.peer != peer]
        for index, its_peer in list(self._roster.peers.items()):
            if its_peer == peer:
                del self._roster.peers[index]
                if index in self._heard:
                    lease_ends = self._heard[index] + self._options.lease_s
                    self._heard[index] = min(lease_ends, now + _SUSPECT_S) - self._options.lease_s
        self._catalogue.opener_gone(peer)
        self.leases.closed(peer)
        return Outcome(replies=self._cuts.closed(peer, now))

    # The pulses of clients.

    @property
    def holding(self) -> bool:
        """Whether a cut is being made: a client that comes now must wait until it is."""
        return self._cuts.holding

    def open_pulse(self, peer: int, hello: Hello, now: float) -> None:
        """A client's pulse is connected."""
        self.leases.open(peer, hello.client_id, hello.incarnation, now)
        self._attendance.heard(hello.client_id, hello.incarnation, now)

    def beat(self, peer: int, beat: Beat, now: float) -> Outcome:
        """A client's pulse."""
        if beat.kind == BeatKind.BYE:
            ended = self.leases.give_up(peer)
            return Outcome() if ended is None else self.left(ended.client_id, ended.incarnation)
        lease = self.leases.renew(peer, beat, now)
        if lease is None:
            raise Refused("the lease is over; the client must connect its pulse again")
        self._attendance.heard(lease.client_id, lease.incarnation, now)
        held = beat.kind == BeatKind.HELD
        return Outcome(replies=self._cuts.held(peer, beat.number, now) if held else [])

    def left(self, client_id: int, incarnation: int, state: str = "here") -> Outcome:
        """A client is no more. If it was a worker, and no other has come since, its place is free."""
        outcome, client = Outcome(), self._attendance.newest(client_id)
        if client is not None and (client.incarnation, client.state) == (incarnation, state):
            self._decide(outcome, msgspec.structs.replace(client, state="left"))
        return outcome

    def tick(self, now: float) -> Outcome:
        """Answer those whose deadline passed while they waited; give up whose lease has ended."""
        outcome = Outcome(replies=self._cuts.tick(now))
        before, self._fills = self._fills, self._cuts.fills
        if self.ready and self._fills not in ("none", before):  # some have waited
            self._changed(outcome)
        for waiting in [waiting for waiting in self._waiting if waiting.until <= now]:
            self._waiting.remove(waiting)
            outcome.replies.append((waiting.peer, waiting.too_late(self._roster, now)))
        for index, heard in list(self._heard.items()):
            if heard + self._options.lease_s <= now:  # also one that comes, and dies before it has a shard
                self._evict(index, f"not heard of for {now - heard:.1f} s", outcome)
                if index in self._heard:  # it alone has a shard: perhaps it only sleeps
                    self._heard[index] = now
        self._tell_watchers(outcome, [w for w in self._watching if w.until <= now])
        if self._placer.lost(self._roster.away):  # nobody's leave could be taken; or workers begin again
            self._attendance.waits_until(now + LEASE_S)
        for name in self._attendance.missing(now):
            outcome.evictions.append((name, self._grant(name, now, outcome, "evicting")))
        return outcome

    def late(self, by: float) -> None:
        """The caller's clock went on while nobody was heard, such as on a stopped machine: leases grow."""
        self.leases.was_late(by)
        self._attendance.was_late(by)
        self._heard = {index: heard + by for index, heard in self._heard.items()}

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        deadlines = [waiting.until for waiting in self._waiting]
        deadlines += [watching.until for watching in self._watching]
        deadlines += [self._began] if self._fills != self._cuts.fills else []
        if self.ready:
            deadlines += [heard + self._options.lease_s for heard in self._heard.values()]
        deadlines += [at for at in (self._cuts.deadline, self._attendance.deadline) if at is not None]
        return min(deadlines, default=None)

    # Requests, one method each.

    @singledispatchmethod
    def _handle(self, request: m.Request, peer: int, now: float, outcome: Outcome) -> None:
        raise Refused(f"{type(request).__name__} is not a request")

    @_handle.register
    def _get_cluster(self, request: m.GetCluster, peer: int, now: float, outcome: Outcome) -> None:
        sizes = {name: getattr(self._options, name) for name in ("shards", "servers", "replicas", "weak")}
        outcome.replies.append((peer, m.ClusterInfo(**sizes)))

    @_handle.register
    def _register_server(self, request: m.RegisterServer, peer: int, now: float, outcome: Outcome) -> None:
        server = self._roster.place_for(request)
        index = server.index
        if self._roster.servers.get(index) != server:
            self._decide(outcome, server)
            if self._placer.placed is not None:
                self._decide(outcome, self._placer.joined())
        self._roster.peers[index] = peer
        self._heard[index] = now
        outcome.replies.append((peer, m.ServerAdmitted(index=index, life=self._life)))
        if self._placer.placed is None and not self._roster.missing:
            self._decide(outcome, self._placer.first(self._options.shards, self._options.servers))
            waiting, self._waiting = self._waiting, []
            for client in waiting:
                outcome.replies.append((client.peer, self._grant(client.name, now, outcome)))
        if self._placer.placed is not None:
            self._changed(outcome)

    @_handle.register
    def _watch(self, request: m.WatchPlacement, peer: int, now: float, outcome: Outcome) -> None:
        if request.server is not None:
            self._roster.check(request.server, request.identity)
            self._heard[request.server] = now
            if request.loads:
                self._costs.heard(request.server, request.loads, now)
                self._shard_costs = self._costs.of_shards(now)
        until = now + min(max(0.0, request.wait_s), 3600.0)
        self._watching.append(Watching(peer=peer, request=request, until=until))
        outcome.decisions += self._losses.hear(request)
        knows = request.server is not None and self._placer.knows(request.server, request.after)
        if knows or request.loads:
            self._changed(outcome)
        else:
            self._tell_news(outcome)

    @_handle.register
    def _filled(self, request: m.Filled, peer: int, now: float, outcome: Outcome) -> None:
        fill = self._placer.fills.get(request.shard)
        # An order of an earlier life may have been the same; its source has begun anew since, by that of now.
        current = fill is not None and fill.number == request.number
        if current and request.error:
            del self._placer.fills[request.shard]  # planned anew, with whoever is there then
        elif current and (placed := self._placer.filled(request.shard, request.term, request.target)):
            self._decide(outcome, placed)
        outcome.replies.append((peer, m.Done()))
        self._changed(outcome)

    @_handle.register
    def _evict_server(self, request: m.EvictServer, peer: int, now: float, outcome: Outcome) -> None:
        if request.index not in self._roster.servers:
            raise BadInput(f"server {request.index} is not one of {sorted(self._roster.servers)}")
        placed = self._placer.placed
        only = 0 if placed is None else placed.chains.count((request.index,))
        if only:
            raise Refused(f"server {request.index} has the only copy of {only} shards")
        self._evict(request.index, request.why, outcome)
        outcome.replies.append((peer, m.Done()))

    @_handle.register
    def _remove_server(self, request: m.RemoveServer, peer: int, now: float, outcome: Outcome) -> None:
        up = self._roster.up
        if request.index not in up:
            raise BadInput(f"server {request.index} is not one of those that are up, {sorted(up)}")
        stay = len(up - self._roster.leaving - {request.index})
        if stay < self._options.replicas + 1:
            raise BadInput(
                f"without server {request.index} there are {stay} servers, and {self._options.replicas + 1} "
                f"are needed for {self._options.replicas} replicas; add one first"
            )
        if request.index not in self._roster.leaving:
            self._decide(outcome, ServerLeaving(index=request.index))
        outcome.replies.append((peer, m.Done()))
        self._changed(outcome)

    @_handle.register
    def _join(self, request: m.JoinCluster, peer: int, now: float, outcome: Outcome) -> None:
        name = request.name
        self._grants.check(name)
        self._grants.check_place(name, request.instead_of)
        if self._placer.placed is not None:
            outcome.replies.append((peer, self._grant(name, now, outcome, "here", request.instead_of)))
            return
        until = now + max(0.0, request.wait_s)
        self._waiting.append(Waiting(peer=peer, name=name, since=now, until=until))

    @_handle.register
    def _open_table(self, request: m.OpenTable, peer: int, now: float, outcome: Outcome) -> None:
        opened = self._catalogue.open(request.request, peer)
        if opened.changed:
            outcome.decisions.append(TableDefined(entry=opened.entry))
        outcome.replies.append((peer, m.TableOpened(opened=opened)))

    @_handle.register
    def _tensor_written(self, request: m.TensorWritten, peer: int, now: float, outcome: Outcome) -> None:
        entry = self._catalogue.written(request.name)
        if entry is not None:
            outcome.decisions.append(TableDefined(entry=entry))
        outcome.replies.append((peer, m.Done()))

    @_handle.register
    def _list_tables(self, request: m.ListTables, peer: int, now: float, outcome: Outcome) -> None:
        later = sorted((one for one in self._catalogue if one.id > request.after), key=lambda one: one.id)
        page = m.TablePage(entries=tuple(later[:TABLES_PER_PAGE]), more=len(later) > TABLES_PER_PAGE)
        outcome.replies.append((peer, page))

    @_handle.register
    def _get_status(self, request: m.GetStatus, peer: int, now: float, outcome: Outcome) -> None:
        status = m.StatusInfo(
            pid=self._pid,
            shards=self._options.shards,
            servers=self._roster.infos(),
            waiting_for=self._roster.missing,
            tables=len(self._catalogue),
            clients=len(self._grants),
            replicas=self._options.replicas,
            degraded=self._placer.degraded(),
            filling=len(self._placer.fills),
            lost=self._losses.by_shard(),
            still=self._attendance.still(self.leases, now),
        )
        outcome.replies.append((peer, status))

    @_handle.register
    def _save(self, request: m.SaveStore, peer: int, now: float, outcome: Outcome) -> None:
        self._begin_cut(request, peer, now, outcome, lambda: [c[:1] for c in self._placement().chains])

    @_handle.register
    def _attend(self, request: m.AttendCut, peer: int, now: float, outcome: Outcome) -> None:
        outcome.replies += self._cuts.attend(peer, request, now)

    @_handle.register
    def _load(self, request: m.LoadStore, peer: int, now: float, outcome: Outcome) -> None:
        self._begin_cut(request, peer, now, outcome, lambda: self._placement().chains)

    def _begin_cut(
        self,
        request: m.SaveStore | m.LoadStore | m.ReloadStore,
        peer: int,
        now: float,
        outcome: Outcome,
        chains: Callable[[], Sequence[tuple[int, ...]]],
    ) -> None:
        self._placement()
        peers = self._roster.peers
        outcome.replies += self._cuts.begin(peer, request, peers, lambda: by_owner(chains()), now)

    @_handle.register
    def _reload(self, request: m.ReloadStore, peer: int, now: float, outcome: Outcome) -> None:
        self._placement()
        there = self._roster.up & self._roster.peers.keys() - self._roster.leaving
        adopted = self._placer.adopt(request.lost, there)
        if not adopted:  # done already
            outcome.replies.append((peer, m.Done()))
            return
        if 0 in adopted and not request.together:
            raise BadInput("the sync shard is among the lost: all shards must go back together")
        chains = self._placer.chains_without(request.lost, adopted)
        if not request.together:
            chains = [chain if shard in adopted else () for shard, chain in enumerate(chains)]
        self._begin_cut(request, peer, now, outcome, lambda: chains)
        self._adopting = adopted

    @_handle.register
    def _part(self, request: m.PartReport, peer: int, now: float, outcome: Outcome) -> None:
        outcome.replies += self._cuts.report(peer, request, now)
        if (reloaded := self._cuts.reloaded) is not None:
            self._cuts.reloaded = None
            self._adopted(*reloaded, outcome)
        elif self.ready and self._cuts.fills == "all":  # fills that waited for its end go before the next
            self._changed(outcome)

    def _adopted(self, peer: int, request: m.ReloadStore, outcome: Outcome) -> None:
        """What was lost has been read: from now on it is where it was read to."""
        there = self._roster.up & self._roster.peers.keys()
        if self._placer.lost(request.lost) != self._adopting.keys() or set(self._adopting.values()) - there:
            error = Unavailable("servers came or went while shards were reloaded; try again")
            outcome.replies.append((peer, m.Failure(code=code_of(error), message=str(error))))
            return
        for index in self._roster.up.intersection(request.lost):
            why = f"its process has ended; its shards were reloaded from {request.name}"
            self._decide(outcome, ServerGone(index=index, why=why))
        self._decide(outcome, self._placer.adopted(request.lost, self._adopting, request.together))
        self._attendance = Attendance() if request.together else self._attendance  # all begin again
        outcome.replies.append((peer, m.Done()))
        self._changed(outcome)

    def _placement(self) -> Placed:
        if self._placer.placed is None:
            missing = list(self._roster.missing)
            raise Unavailable(f"the cluster is not complete: servers {missing} are missing")
        return self._placer.placed

    # Decisions.

    def _decide(self, outcome: Outcome, decision: Decision) -> None:
        self._apply(decision)
        outcome.decisions.append(decision)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case ClusterFormed():
                self._formed = True
                self._grants = Grants(decision.client_ids_from)
            case LifeBegan():
                self._life = decision.number
                self._placer.number = self._life << 32
                self._cuts.number = self._life % (1 << 15) << 16  # of 32 bits, and 0 is none
            case ServerLeaving():
                self._roster.leaving.add(decision.index)
            case ServerPlaced():
                self._roster.servers[decision.index] = decision
                # After a restart, too: one that died meanwhile is missed.
                self._heard.setdefault(decision.index, self._began)
            case ServerGone():
                self._roster.gone[decision.index] = decision
                self._roster.leaving.discard(decision.index)
                self._heard.pop(decision.index, None)
                self._costs.gone(decision.index)
            case Placed():
                assert len(decision.chains) == len(decision.terms) == self._options.shards
                self._placer.apply(decision)
            case ClientGranted():
                self._grants.apply(decision)
                self._attendance.granted(decision, self._began + RESTORED_S)
            case TableDefined():
                self._catalogue.restore(decision.entry)
            case ClocksRestored():
                self._cuts.restore(decision)
            case TakenOver() | LossTold() | LossesFolded():
                self._losses.apply(decision)

    def _evict(self, index: int, why: str, outcome: Outcome) -> None:
        """Give a server up. Where it alone has a shard, it is kept: perhaps it only sleeps."""
        placed = self._placer.placed
        if placed is None or index in self._roster.gone or (index,) in placed.chains:
            return
        self._decide(outcome, ServerGone(index=index, why=why))
        # Also where it had no shards any more: who has yet to hear from it must know that it is gone.
        self._decide(outcome, self._placer.gone(index) or self._placer.joined())
        self._changed(outcome)

    def _changed(self, outcome: Outcome) -> None:
        """Plan what is to be done by the state of now, and tell everybody who watches."""
        # While a shard has no server nothing is moved: who takes it then may be the one that has least.
        if not self._placer.lost(self._roster.away) and self._cuts.fills != "none":
            roster, only = self._roster, self._cuts.fills == "copies"
            self._placer.plan(roster.up, roster.leaving, self._shard_costs, only_copies=only)
        for index in sorted(self._roster.leaving - self._placer.members() - self._placer.first_to_know):
            if not any(fill.target == index for fill in self._placer.fills.values()):
                self._decide(outcome, ServerGone(index=index, why=LEFT))
                self._decide(outcome, self._placer.joined())
        self._tell_news(outcome)

    def _tell_news(self, outcome: Outcome) -> None:
        news = [(watching, self._news(watching.request)) for watching in self._watching]
        told = [one for one, said in news if said.placement or said.fills or said.takeovers]
        self._tell_watchers(outcome, told)

    def _news(self, request: m.WatchPlacement) -> m.PlacementNews:
        tell, fills = what_is_new(request, self._placer)
        info = self._roster.placement(self._placement()) if tell else None
        heard, takeovers = self._losses.news(request)
        return m.PlacementNews(placement=info, fills=fills, life=self._life, heard=heard, takeovers=takeovers)

    def _tell_watchers(self, outcome: Outcome, watching: list[Watching]) -> None:
        for one in watching:
            self._watching.remove(one)
            outcome.replies.append((one.peer, self._news(one.request)))

    def _grant(
        self, name: str | None, now: float, outcome: Outcome,
        state: Literal["here", "evicting"] = "here", instead_of: int | None = None,
    ) -> m.ClientGrant:  # fmt: skip
        granted = self._grants.next(name, state, instead_of)
        self._decide(outcome, granted)
        self._attendance.granted(granted, now + JOIN_S)
        placed = self._roster.placement(self._placement())
        return m.ClientGrant(client_id=granted.client_id, incarnation=granted.incarnation, placement=placed)
