"""A group whose members come and go: workers of `shoal run` that exchange dense values among themselves.

Members exchange in *generations*, each with a group of its own. The sync shard says who lives (a worker that
died is evicted there, and fenced); notes at the servers say who wants the next generation. It is made when
all who live have come for it:

1. a worker wants it: a member died, so that an exchange broke; a member rests (at the end of a pass, at a
   barrier) while this one exchanges; this one has just joined, or rested and goes on. It says so in its note;
2. the others see that where they wait, or by their own broken exchange, and come, too;
3. the most senior of them proposes members and a store; they tell each other how far they are; whoever is
   behind, or new, copies the state of the one that is farthest; those who do not rest have a group again.

A worker joins between steps only: while the others have a sum that they have not applied they let it sit out
the round. Whoever has come to the script's end stays until the others have, too: the model lies on workers
alone, and one of them may die and be replaced meanwhile. Nobody waits without an end.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.collective.group import Broken, GlooGroup, Group, Lone
from shoal.errors import Fenced, ShoalError, Timeout, Unavailable
from shoal.train.state_bytes import from_bytes, to_bytes
from shoal.train.waits import doing

if TYPE_CHECKING:
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.worker")

# Topics of notes; `Meeting` has the one above, models and loaders those below.
_MARKS, _PROPOSALS = (1 << 16) - 2, (1 << 16) - 3
_LOOK_EVERY_S = 0.25
_COME_EVERY_S = 0.01
# For all who have come to connect. One of them may die meanwhile; then it is tried again.
_CONNECT_S = 10.0
_COMES_S = 60.0  # until a worker that replaces another has come; else it never will
_SIT_OUT_S = 0.05
_HALF = 1 << 20  # of a step's number: a note holds whole numbers up to 2^24
_LIVING = ("working", "waiting", "at_end")
_LAST = 1 << 62  # the barriers at a script's end, behind all others


@dataclass(frozen=True)
class _Mark:
    """What a worker says of itself, in numbers."""

    life: int
    wants: int = 0  # this generation, at least
    since: int = 0  # the generation in which it became a member; 0: it is new
    summed: int = 0
    proposed: int = 0  # this generation
    high: int = 0
    low: int = 0
    number: int = 0  # the generation that it is in, whoever proposed it

    @property
    def sits_out(self) -> int:
        """The steps below this one: new workers are asked to let them end without them."""
        return self.high * _HALF + self.low


@dataclass(frozen=True)
class _Seen:
    """All workers at one moment: phases and clocks by rank, marks of those that have put one down."""

    state: dict[str, Any]
    marks: Mapping[int, _Mark]

    @property
    def living(self) -> list[int]:
        return [rank for rank, phase in enumerate(self.state["phases"]) if phase in _LIVING]

    def want(self, number: int, *, new: bool | None = None) -> bool:
        """Whether somebody wants a later generation than `number`: of the members, of the new, or any."""
        marks = [mark for rank, mark in self.marks.items() if rank in self.living]
        return any(m.wants > number and new in (None, m.since == 0) for m in marks)

    @property
    def leader(self) -> int:
        """The most senior: who is new has nothing to give."""
        members = [rank for rank in self.living if self._since(rank)]
        return min(members or self.living, key=lambda rank: (self._since(rank), rank))

    def coming(self) -> list[int]:
        """Who is evicted, and may be replaced, and who has come and is no member yet."""
        phases = enumerate(self.state["phases"])
        new = [rank for rank in self.living if not self._since(rank)]
        return [rank for rank, phase in phases if phase in ("gone", "away")] + new

    def mark(self, rank: int) -> _Mark:
        return self.marks.get(rank, _Mark(0))

    def _since(self, rank: int) -> int:
        return self.mark(rank).since

    def members(self) -> list[int]:
        """Those of the next generation, by seniority; a sum that is not applied keeps the new ones out."""
        summed = any(self.mark(rank).summed for rank in self.living)
        ranks = [rank for rank in self.living if self._since(rank) or not summed]
        return sorted(ranks, key=lambda rank: (self._since(rank) == 0, self._since(rank), rank))


class Regroup(Group):
    """The group of one worker over all generations."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._board = worker.board = worker.notes
        self._group: Group = Lone()
        self._store: Store | None = None  # kept: the leader's serves the others
        self._number = 0  # of the generation
        self._since = 0
        self._lives: dict[int, int] = {}  # of those who exchange, by rank
        self._tried = 0  # the last generation that was proposed
        self._proposed = 0
        self._sits_out = 0
        self._look_at = 0.0
        self.partial = False
        self.given: Sequence[Any] = ()
        self.stepping = False
        worker.waits.interrupt(self._called, _LOOK_EVERY_S)
        while not self._since:
            self.reform()

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._group.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._group.size

    def sum_(self, values: torch.Tensor) -> None:
        self._group.sum_(values)

    def swap(self, values: torch.Tensor, peers: Sequence[int]) -> list[torch.Tensor]:
        return self._group.swap(values, peers)

    def copy_from_(self, values: torch.Tensor, root: int) -> None:
        self._group.copy_from_(values, root)

    def meet(self) -> None:
        self._group.meet()

    def close(self) -> None:
        self._group.close()

    def ready(self) -> None:
        now = monotonic()
        if self._worker.rank not in self._lives:
            self.reform()
        elif now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            if self._see().want(self._number):
                self.reform()

    def finished(self, step: int) -> bool:
        if self.size == 1 or not self._worker.policy.clock.meets:
            return True
        clocks = self._worker.rounds.state()["clocks"]
        return all(clocks[rank] > step for rank in self._lives)

    def reform(self, *, rests: bool = False) -> None:
        worker, until = self._worker, monotonic() + self._worker.waits.seconds
        self._group.close()
        with worker.waiting():
            while True:
                found = self._agree(until)
                if worker.rank not in found["ranks"]:
                    return  # this worker is new, and not let in yet
                try:
                    self._form(found, rests)
                    return
                except RuntimeError as error:  # one of them has died meanwhile, or has left
                    if monotonic() > until:
                        raise Unavailable(
                            f"worker {worker.rank}, step {worker.step}: no group could be made with workers "
                            f"{found['ranks']} within {worker.waits.seconds:g} s ({error})"
                        ) from error

    def stay(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # the script has failed, and the job ends for it
        worker, until = self._worker, inf
        missing: list[int] = []
        self.staying = True
        try:
            while self._since and monotonic() < until:
                number, _ = worker.rounds.resume(_LAST)
                ended = worker.waits.end_of_pass(number, "the script")
                assert ended is not None, "a barrier has no units that could be late"
                worker.goes_on(ended[0])  # a barrier sets clocks, and a checkpoint's copies go by them
                worker.between_steps()
                before, seen = missing, self._see()
                missing = seen.coming()
                if not missing:
                    return
                if missing != before:  # each has its minute
                    until = monotonic() + _COMES_S
                worker.progress.update(state="waiting", waiting_for=tuple(missing))
                if seen.want(self._number):
                    self.reform(rests=True)
                sleep(_LOOK_EVERY_S)
        except Fenced:
            return  # another has its place
        except ShoalError as error:  # whoever comes now finds out by itself; leaving goes on
            _log.warning("worker %d leaves though others are at work: %s", worker.rank, error)

    # While others are waited for.

    def _see(self) -> _Seen:
        state = self._worker.rounds.state()
        marks = self._board.marks(_MARKS, range(len(state["phases"])))
        return _Seen(state, {rank: _Mark(*numbers[:8]) for rank, numbers in marks.items()})

    def _mark(self, wants: int = 0) -> None:
        high, low = divmod(self._sits_out, _HALF)
        self._board.mark(_MARKS, wants, self._since, self.summed, self._proposed, high, low, self._number)

    def _called(self, rests: bool) -> None:
        """A wait at the servers takes long: does somebody need this worker?"""
        if not self._since:
            return
        seen = self._see()
        if not self.stepping:
            if seen.want(self._number):
                self.reform(rests=rests)
        elif seen.want(self._number, new=False):
            raise Broken("others make a new group")
        elif seen.want(self._number, new=True) and self._sits_out <= self._worker.step:
            self._sits_out, self._look_at = self._worker.step + 1, 0.0
            self._mark()

    def _look(self, seconds: float) -> None:
        """An exchange takes long: will those who are missing come at all?"""
        worker, seen = self._worker, self._see()
        phases = seen.state["phases"]
        others = [rank for rank in self._lives if rank != worker.rank]
        away = [
            rank
            for rank in others
            if phases[rank] not in ("working", "waiting") or seen.mark(rank).life != self._lives[rank]
        ]
        if away or seen.want(self._number, new=False):
            raise Broken(f"not here: {doing(seen.state, away)}")
        worker.progress.update(state="waiting", waiting_for=tuple(others))
        if seconds > worker.waits.seconds:
            raise self._too_long(seconds, doing(seen.state, others))

    def _too_long(self, seconds: float, what: str) -> Timeout:
        worker = self._worker
        return Timeout(
            f"worker {worker.rank}, step {worker.step}: the exchange with the others waited {seconds:.0f} s "
            f"for {what}. Does it call optimizer.step() as often as the others? SHOAL_WAIT_S (now "
            f"{worker.waits.seconds:g}) allows more time"
        )

    # The next generation.

    def _agree(self, until: float) -> dict[str, Any]:
        """Wait until all who live have come: what the leader proposes."""
        worker, wanted, seen = self._worker, 0, self._see()
        # What was proposed before this worker came is not for it; who did so may have died since.
        past = [max(mark.proposed, mark.number) for mark in seen.marks.values()]
        self._tried = max(self._tried, self._number, *past)
        while True:
            leader = seen.leader
            # Beyond whatever was tried, also by one who has died since.
            known = [mark.proposed for rank, mark in seen.marks.items() if rank != leader]
            want = max(max([self._tried, *known]) + 1, *(mark.wants for mark in seen.marks.values()))
            if want != wanted:
                wanted = want
                self._mark(wants=want)
                seen = self._see()
                continue
            if leader == worker.rank:
                missing = [
                    rank
                    for rank, phase in enumerate(seen.state["phases"])
                    if phase == "absent" or (rank in seen.living and seen.mark(rank).wants != want)
                ]
                if not missing:
                    return self._propose(want, seen)
            else:
                missing = [leader]
                if seen.mark(leader).proposed == want and (note := self._board.note(leader, _PROPOSALS)):
                    found: dict[str, Any] = json.loads(note)
                    if found["number"] == want:
                        self._tried = want
                        return found
            if not self._since:
                self._sit_out(seen)
            worker.progress.update(state="waiting", waiting_for=tuple(missing))
            if monotonic() > until:
                raise self._too_long(worker.waits.seconds, doing(seen.state, missing))
            sleep(_COME_EVERY_S)
            seen = self._see()

    def _sit_out(self, seen: _Seen) -> None:
        """The others have begun the step without this worker: let its round end."""
        worker = self._worker
        if any(mark.sits_out > worker.step for mark in seen.marks.values()):
            with suppress(Timeout):
                worker.goes_on(worker.rounds.advance(worker.step, weight=0.0, timeout=_SIT_OUT_S).step)

    def _propose(self, number: int, seen: _Seen) -> dict[str, Any]:
        # All workers of `shoal run` are on one host. The system chooses a port that nobody had before.
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        connect = timedelta(seconds=_CONNECT_S)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=connect)
        self._store = store
        ranks = seen.members()
        lives = [seen.mark(rank).life for rank in ranks]
        found = {"number": number, "ranks": ranks, "lives": lives, "host": host, "port": store.port}
        self._board.post(_PROPOSALS, json.dumps(found))
        self._proposed = self._tried = number
        self._mark(wants=number)
        return found

    def _form(self, found: dict[str, Any], rests: bool) -> None:
        worker, ranks, lives = self._worker, found["ranks"], found["lives"]
        at, number = ranks.index(worker.rank), found["number"]
        if self._proposed == number:
            store = self._store
        else:
            connect = timedelta(seconds=_CONNECT_S)
            store = TCPStore(found["host"], found["port"], is_master=False, timeout=connect)
        assert store is not None
        self._store = store
        store.set(str(at), json.dumps([*self._progress(), rests]))
        told = [json.loads(store.get(str(other))) for other in range(len(ranks))]
        group = self._connect(store, "all", list(range(len(ranks))), at)
        active = [other for other, (_, _, resting) in enumerate(told) if not resting]
        try:
            self._catch_up(group, told, at)
            if len(active) < len(ranks):
                group.meet()  # nobody leaves before all have what they were given
                group.close()
                group = self._connect(store, "active", active, at)
        except BaseException:
            group.close()
            raise
        self._group, self._number, self._since = group, number, self._since or number
        self._lives = {ranks[other]: lives[other] for other in active}
        self.partial = len(active) < len(ranks)
        self._look_at = monotonic() + _LOOK_EVERY_S
        self._mark()

    def _connect(self, store: Store, name: str, members: list[int], at: int) -> Group:
        if at not in members or len(members) == 1:
            return Lone()
        prefixed = PrefixStore(name, store)
        return GlooGroup(prefixed, members.index(at), len(members), _CONNECT_S, self._look)

    def _progress(self) -> tuple[int, int]:
        """How far this worker's state is; what is prepared comes with it."""
        strategy = self._worker.strategy
        return self.version if self._since else -1, 0 if strategy is None else len(strategy.stepped)

    def _has_begun(self) -> bool:
        """Whether somebody has trained, who had the model: this worker begins behind the first step."""
        worker = self._worker
        # Where there are no rounds, each life begins a step later, whether or not the one before made it.
        rounds = worker.policy.core_spec(worker.world_size)["take"] == "round"
        lives = 0 if rounds else worker.client.incarnation - 1
        return worker.progress.value.clock > 0 or worker.step > lives

    def _catch_up(self, group: Group, told: list[list[Any]], at: int) -> None:
        """Whoever is behind copies the state of the first of those who are farthest."""
        worker = self._worker
        progress = [tuple(numbers[:2]) for numbers in told]
        farthest = max(progress)
        if farthest[0] < 0 and worker.taken_back is None and self._has_begun():
            raise Unavailable(
                f"worker {worker.rank}: under {worker.policy} the model lies on the workers, and all that "
                "had it have died or ended. Start the job anew"
            )
        self.version = max(self.version, farthest[0])
        behind = [other for other, one in enumerate(progress) if one < farthest and farthest[1]]
        donor = progress.index(farthest)
        if not behind or at not in (*behind, donor):
            return
        assert isinstance(group, GlooGroup)
        if at == donor:
            assert worker.strategy is not None
            data = torch.frombuffer(bytearray(to_bytes(worker.strategy.state())), dtype=torch.uint8)
            length = torch.tensor([len(data)])
            group.transfer([(values, other) for other in behind for values in (length, data)], [])
        else:
            length = torch.zeros(1, dtype=torch.int64)
            group.transfer([], [(length, donor)])
            data = torch.empty(int(length), dtype=torch.uint8)
            group.transfer([], [(data, donor)])
            self.given = from_bytes(data.numpy().tobytes())
            if worker.strategy is not None:
                worker.strategy.take(self.given)
