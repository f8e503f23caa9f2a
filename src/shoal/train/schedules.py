"""Learning-rate schedulers that were given to `prepare`, where the script of this worker did not move them.

A worker with an empty part takes part in the step, but the body of its loop, and a `scheduler.step()` in it,
does not run. And one that replaces a worker that died, goes on from a checkpoint or comes later has not made
the steps and passes before. What holds: **when pass k begins every scheduler is as it was in an undisturbed
worker at that place of the script, and within the pass it has made the moves of the steps that are made.**

So each worker notes how its schedulers are at two places: where `worker.epochs` gives k, and where the loop
of pass k begins. Notes lie on the noticeboard, and in what a worker adds to a checkpoint. Whoever begins in
the middle is *set* to what an earlier life of its rank, or another worker, has noted at the same place: so it
does not matter whether the script has moved it itself for passes that are over (it has in a `range`). Moves
within the pass follow: as many as came with the steps that an earlier life made in it, and in a worker that
is new, with those that the job made. Where nobody has come to that place yet (a death just behind a
pass), the moves from one pass to the next are those of the transition before; if there was none, a scheduler
that does not move within passes moves once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.train.schedule_state import KeptScheduler

if TYPE_CHECKING:
    from shoal.train.worker import Worker

_TOPIC = (1 << 16) - 6  # of the notices; `shoal.train.taken_back` has the one above
_ASKED_MAX = 8  # other workers, for their notes
_ROUNDING = 1e-6
# What checkpoints of earlier releases have of a scheduler that does not move with the steps.
_BY_PASSES = -1


class Schedules:
    """The schedulers of one worker. `before`: what `due` gave when a checkpoint was made."""

    def __init__(self, before: Mapping[str, Any] | Sequence[int] = ()) -> None:
        self._before = before
        self._worker: Worker | None = None
        self._joined_at = 0  # the worker's clock
        self._steps: Counter[int] = Counter()  # by id of the optimizer
        self._kept: list[KeptScheduler] = []
        self._open: set[int] = set()  # loaders whose loops run
        self._given: tuple[int, list[Any]] | None = None  # the epoch that `worker.epochs` gave last
        self._begun = False  # a pass of training, in this life
        self._places: dict[str, dict[str, Any]] = {}  # the last pass of each loader
        # Where rates are measured from: the clock and the moves there, and the clock of the last measurement.
        self._since: tuple[int, list[int], int] = (0, [], 0)
        self._drawn = self._used = 0  # units of data of the pass that runs, and those of its ended steps
        self._units = 1.0  # of a tick
        self._stepped_at = -1  # the clock of the last step
        self._noted: list[float | None] = []  # the rates

    def joins(self, worker: Worker) -> None:
        """They are of this worker, which has just joined."""
        self._worker, self._joined_at = worker, worker.step
        self._since = (worker.step, [], worker.step)

    def add(self, scheduler: Any, *, leased: bool = False) -> None:
        """Look after it; `leased`: so is data, to several workers. Moves within passes that are over are made
        here: no loop will make them.
        """
        if any(scheduler is one.scheduler for one in self._kept):
            return
        one, at = KeptScheduler(scheduler), len(self._kept)
        self._kept.append(one)
        if leased:
            one.end_quietly()
        if isinstance(self._before, Mapping) or not self._before:
            for record in self._records() if self._joined_at else ():
                if at < len(record["kinds"]) and record["kinds"][at] == one.kind:
                    self._learn(one, record, at)
                    ticks = max(0, self._joined_at - record["clock"])
                    one.move(inside=record["now"][at]["inside"] + record["due"][at] + _moves(one.rate, ticks))
                    break
        elif at < len(self._before) and self._before[at] != _BY_PASSES:
            one.rate, one.by_steps = 1.0, True
            one.move(inside=self._before[at])
        one.ahead = one.count - self._steps[id(scheduler.optimizer)]
        self._since = (self._since[0], [kept.inside for kept in self._kept], self._since[2])

    def due(self) -> dict[str, Any]:
        """All that is to be known of them, for one that goes on before the next step."""
        self._look()
        return self._record()

    # The script goes on.

    def drew(self) -> None:
        """A unit of data was handed out."""
        self._drawn += 1

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer makes a step."""
        self._look()
        if self._within:
            self._measure()
        for one in self._kept:
            if one.scheduler.optimizer is optimizer and (steps := self._steps[id(optimizer)]):
                one.by_steps = one.inside > 0 and one.count - one.ahead == steps
        self._steps[id(optimizer)] += 1
        self._used = self._drawn
        self._stepped_at = -1 if self._worker is None else self._worker.step

    def catch_up(self) -> None:
        """The step just made had no batch."""
        for one in self._kept:
            before = self._steps[id(one.scheduler.optimizer)] - 1
            # With one step in a pass one that moves behind passes has moved as often.
            if before > 0 and one.inside > 0 and one.count - one.ahead == before:
                one.move(inside=1)

    def missed(self, ticks: int) -> None:
        """The worker stood still while others made these steps."""
        self._look()
        for one in self._kept:
            if one.by_steps:
                one.move(inside=_moves(one.rate, ticks))
                one.ahead = one.count - self._steps[id(one.scheduler.optimizer)]

    def rested(self, ticks: int) -> None:
        """Others made these steps while it waited. One that has just come begins with the step of now."""
        if not self._steps and not self._replaces:
            self.missed(ticks)

    def gives(self, epoch: int) -> None:
        """`worker.epochs` gives this number."""
        if not self._kept:
            return
        self._open.clear()
        self._look()
        assert self._worker is not None
        first = [at for at, passes in enumerate(self._worker.passes) if passes.loader.begins == epoch]
        if epoch > 0 and first and self._given is None and not self._begun:
            self._set("given", str(first[0]), epoch, self._worker.passes[first[0]].done)
        self._given = (epoch, [one.state() for one in self._kept])

    def begins(self, loader: int, epoch: int, *, first: int, done: int, trains: bool) -> None:
        """A loop over the loader begins pass `epoch`.

        `first`: the one that this life begins with; `done`: how many units of that one an earlier life has
        done.
        """
        if not self._kept:
            return
        assert self._worker is not None
        self._look()
        if trains:
            if not self._begun and epoch == first and (first or self._joined_at):
                self._set("begun", str(loader), epoch, done)
            self._begun = True
            self._since = (self._worker.step, [one.inside for one in self._kept], self._worker.step)
            for one in self._kept:
                one.measured = None
            self._drawn = self._used = 0
            before = done if epoch == first else 0
            self._places[str(loader)] = self._place(self._places.get(str(loader)), epoch, before)
            self._note()
        self._open.add(loader)

    def ends(self, loader: int) -> None:
        """The loop is over, or was left."""
        self._look()
        self._open.discard(loader)
        begin, before, _ = self._since
        ticks = self._stepped_at + 1 - begin  # at its end a pass can set clocks to that of the first
        if self._open or ticks <= 0:
            return
        for one, moved in zip(self._kept, before, strict=True):
            # The last block of a pass can be shorter than the others, and is not measured.
            one.rate = one.measured if _whole(one.measured) else (one.inside - moved) / ticks
        self._units = self._drawn / ticks if self._drawn else self._units
        if self._noted != [one.rate for one in self._kept]:
            self._note()

    @property
    def _within(self) -> bool:
        """Whether a move is one within a pass; where no loader was prepared nothing else is known."""
        return bool(self._open) or self._worker is None or not self._worker.passes

    def _look(self) -> None:
        for one in self._kept:
            one.look(inside=self._within)

    def _measure(self) -> None:
        assert self._worker is not None
        begin, before, last = self._since
        ticks = self._worker.step - begin
        if ticks <= 0 or self._worker.step == last:  # within a block
            return
        for one, moved in zip(self._kept, before, strict=True):
            one.measured = (one.inside - moved) / ticks
            # What was measured in a whole pass is better, unless it moves otherwise now.
            if not one.rate or (ticks > 1 and (_whole(one.rate) or _whole(one.measured))):
                one.rate = one.measured
        self._since = (begin, before, self._worker.step)
        self._units = self._used / ticks if self._used else self._units
        # Now and then: whoever replaces this worker in its first pass needs it.
        if ticks & (ticks - 1) == 0 and self._noted != [one.rate for one in self._kept]:
            self._note()

    # What is noted.

    def _place(self, before: dict[str, Any] | None, epoch: int, done: int) -> dict[str, Any]:
        begun = [one.state() for one in self._kept]
        given = self._given[1] if self._given is not None and self._given[0] == epoch else begun
        assert self._worker is not None
        if before is not None and before["epoch"] == epoch - 1:
            for one, now, last in zip(self._kept, given, before["given"], strict=False):
                one.between = now["outside"] - last["outside"]
        return {"epoch": epoch, "clock": self._worker.step, "done": done, "given": given, "begun": begun}

    def _record(self) -> dict[str, Any]:
        assert self._worker is not None
        # Behind a step a script has not moved them with that one yet.
        late = [self._steps[id(one.scheduler.optimizer)] - (one.count - one.ahead) for one in self._kept]
        return {
            "kinds": [one.kind for one in self._kept],
            "clock": self._worker.step,
            "now": [one.state() for one in self._kept],
            "due": [int(one.by_steps and behind == 1) for one, behind in zip(self._kept, late, strict=True)],
            "units": self._units,
            "rates": [one.rate for one in self._kept],
            "between": [one.between for one in self._kept],
            "by_steps": [one.by_steps for one in self._kept],
            "places": dict(self._places),
        }

    def _note(self) -> None:
        worker = self._worker
        assert worker is not None
        self._noted = [one.rate for one in self._kept]
        if not worker.has_own_store:  # which dies with it
            text = json.dumps(self._record())
            worker.lives.again(lambda: worker.state.board.post(_TOPIC, text))

    @property
    def _replaces(self) -> bool:
        """Whether it has the place of one that was in this job."""
        return self._worker is not None and self._worker.client.incarnation > 1

    def _records(self) -> Iterator[dict[str, Any]]:
        """Of the checkpoint, of an earlier life, of others: in the order in which they are believed."""
        worker = self._worker
        assert worker is not None
        if isinstance(self._before, Mapping):
            yield {**self._before, "whose": "its own, then"}
        if worker.has_own_store:
            return
        board, rank = worker.state.board, worker.rank
        if self._replaces and (own := board.text(rank, _TOPIC)):
            yield {**json.loads(own), "whose": "its own"}
        for other in [one for one in worker.rounds.joined() if one != rank][:_ASKED_MAX]:
            if note := board.note(other, _TOPIC):
                yield {**json.loads(note), "whose": "another's"}

    # Who begins in the middle.

    def _set(self, where: str, loader: str, epoch: int, done: int) -> None:
        """Make them what they were where pass `epoch` was given, or begun, of which that much is done."""
        if isinstance(self._before, Sequence) and self._before:
            if where == "given":
                for one, moved in zip(self._kept, self._before, strict=False):
                    one.move(outside=epoch if moved == _BY_PASSES else 0)
        else:
            kinds = [one.kind for one in self._kept]
            found = [one for one in self._records() if one["kinds"] == kinds and loader in one["places"]]
            reached = [one for one in found if one["places"][loader]["epoch"] == epoch]
            before = [one for one in found if one["places"][loader]["epoch"] < epoch]
            if reached:
                self._set_to(reached[0], reached[0]["places"][loader], where, done)
            elif before and where == "given":
                last = max(before, key=lambda one: int(one["places"][loader]["epoch"]))
                self._go_on_from(last, last["places"][loader], epoch)
        for one in self._kept:
            one.ahead = one.count - self._steps[id(one.scheduler.optimizer)]

    def _set_to(self, record: dict[str, Any], place: dict[str, Any], where: str, done: int) -> None:
        states, moves = place[where], self._moves_within(record, place, done)
        now, begun = record["now"], place["begun"]
        own = record["whose"] != "another's"
        if where == "begun" and own and _outside(now) == _outside(begun):  # it was noted within this pass
            states = now
            moves = [m - n["inside"] + b["inside"] for m, n, b in zip(moves, now, begun, strict=True)]
        self._load(record, states)
        for one, made in zip(self._kept, moves, strict=True):
            one.move(inside=made)

    def _go_on_from(self, record: dict[str, Any], place: dict[str, Any], epoch: int) -> None:
        """Nobody has noted that place: from the last one, as it went on from those before."""
        self._load(record, record["now"])
        within = self._moves_within(record, place, None)
        for at, (one, moved) in enumerate(zip(self._kept, within, strict=True)):
            begun, now = place["begun"][at], record["now"][at]
            between = one.between
            if between is None:  # the first pass: what does not move within it moves behind it
                between = int(moved == 0 and begun["inside"] == 0)
            made = now["outside"] - place["given"][at]["outside"]
            outside = between * (epoch - place["epoch"]) - made
            one.move(inside=max(0, moved - now["inside"] + begun["inside"]), outside=max(0, outside))

    def _load(self, record: dict[str, Any], states: list[Any]) -> None:
        # All, before any is moved: several can have one optimizer.
        for at, (one, state) in enumerate(zip(self._kept, states, strict=True)):
            one.load(state)
            self._learn(one, record, at)

    def _learn(self, one: KeptScheduler, record: dict[str, Any], at: int) -> None:
        one.rate, one.between = record["rates"][at], record["between"][at]
        one.by_steps = record["by_steps"][at]

    def _moves_within(self, record: dict[str, Any], place: dict[str, Any], done: int | None) -> list[int]:
        """How often each had moved since that pass began, when this worker joined."""
        whose, ticks = record["whose"], self._joined_at - place["clock"]
        if whose == "its own, then":  # nothing has happened since
            ticks = 0
        elif self._replaces and done is not None:  # the steps that others made meanwhile are made up for
            ticks = round((done - place["done"] * (whose == "its own")) / record["units"])
        found = []
        for at, (now, begun) in enumerate(zip(record["now"], place["begun"], strict=True)):
            noted = 0 if whose == "another's" else now["inside"] - begun["inside"] + record["due"][at]
            found.append(max(noted, _moves(record["rates"][at], ticks)))
        return found


def _moves(rate: float | None, ticks: int) -> int:
    return int((rate or 0.0) * max(0, ticks) + _ROUNDING)


def _whole(rate: float | None) -> bool:
    """Whether so many moves come with every step, or block of steps."""
    return bool(rate) and rate == int(rate or 0)


def _outside(states: list[Any]) -> list[int]:
    return [state["outside"] for state in states]
