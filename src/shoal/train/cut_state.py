"""What lies on a worker alone, as a part of checkpoints; `shoal.train.taken_back` is the way back.

A thread asks now and then whether a cut is wanted (`shoal.store.cut_call`). From then on the script's thread
copies the worker's state at the end of each step, and goes on; only the last few copies are kept: a cut is of
the clocks of now, or later ones. When it is made the thread writes the copy that was taken at the worker's
clock in it. So rows and what is written here are of the same step, and no step waits for a checkpoint.

Where several steps are made with a batch, by several optimizers or one, a copy counts once the next batch is
drawn: a cut within a batch is given up, for nobody could go on from there, and another is tried. Who draws a
batch meanwhile rests for a moment, so that the cut finds it between two, however short that time is.

A worker that went on from a checkpoint, and has made no step since, copies nothing: its state is in that one.
What the script has drawn of random numbers since then is drawn again.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save as to_safetensors

from shoal.checkpoint import states
from shoal.checkpoint.client import CALL_S, find_origin
from shoal.checkpoint.place import Place
from shoal.errors import ShoalError
from shoal.nn.module import table_modules
from shoal.store.messages import AttendCut, CutNews
from shoal.train.parameters import uncompiled
from shoal.train.progress import left_path
from shoal.train.random_state import random_state
from shoal.train.state_bytes import copied

if TYPE_CHECKING:
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.checkpoint")
_Copy = dict[str, torch.Tensor]
_AS_RESTORED: _Copy = {}
_COPIES_MAX = 8
# For a cut, before a batch whose steps it must not lie between; and for each in all.
_REST_S, _REST_S_MAX = 0.08, 5.0
# For the thread, to learn which copies are needed no more.
_GIVE_WAY_S = 0.25
_LOOK_EVERY_S = 0.01
_CLOSE_S = 5.0
# A step whose end takes longer than this may be waiting for others.
_WAITS_S = 1.0


def _state(worker: Worker) -> dict[str, Any]:
    assert worker.strategy is not None
    return {
        "word": str(worker.policy),
        "random": random_state(),
        "buffers": worker.fixed.named,
        "names": _names(worker),
        "made": [worker.steps_made, worker.schedules.due()],
        "stepped": worker.strategy.state(),
    }


def _names(worker: Worker) -> dict[str, str]:
    """By which table or tensor each key of the models' `state_dict`, uncompiled, is known, for exports."""
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for lead, model in zip(worker.model_names, worker.models, strict=True):
        tables = {id(module.weight): module.table_name for _, module in table_modules(model)}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            own = first.setdefault(id(parameter), lead + uncompiled(name))
            names[lead + uncompiled(name)] = tables.get(id(parameter), own)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            names[lead + uncompiled(name)] = first.setdefault(id(buffer), lead + uncompiled(name))
    return names


class CutState:
    """That of one worker, from the moment at which it has prepared a model."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._directory = cast(Any, worker.client._directory)
        self._aligned = worker.strategy is not None and worker.strategy.together
        self._changed = threading.Condition()
        self._call: CutNews | None = None  # that is open
        self._copies: list[tuple[int, _Copy]] = []  # by clock
        self._behind_step: tuple[int, _Copy] | None = None  # which may not be the last with its batch
        taken = worker.taken_back
        self._restored = taken.checkpoint if taken is not None and taken.own else ""
        self._stood = worker.clock, worker.steps_made  # when that was taken back
        self._until = 0.0
        self._rest_s = _REST_S_MAX  # that the script may still rest for the call
        self.stands = False  # the script's thread saves, and goes on when that is done
        self._within: float | None = None  # a step, since when
        self._seen = ""  # the name of the last call
        self._closed = False
        with suppress(ShoalError):  # before its first step: from then on it is no more what was restored
            self._attend()
        worker.waits.interrupt(lambda rests: self.boundary() if rests else None, _GIVE_WAY_S)
        self._thread = threading.Thread(target=self._run, name="shoal-cut-state", daemon=True)
        self._thread.start()

    def enters(self) -> None:
        """A step is being ended."""
        self._within = monotonic()

    def boundary(self, *, ends_batch: bool = True) -> None:
        """The script's thread is between two steps: copy what is here, if a cut is wanted."""
        worker, self._within, self._behind_step = self._worker, None, None
        if self._call is None or worker.strategy is None or not worker.strategy.between_steps:
            return
        taken = worker.clock, self._copy()
        if ends_batch:
            self._keep(taken)
        else:
            self._behind_step = taken

    def draws(self) -> None:
        """A batch begins: the last step was the last with the one before."""
        taken, self._behind_step = self._behind_step, None
        if taken is None:
            return
        self._keep(taken)
        began = monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._call is None, min(_REST_S, self._rest_s))
        self._rest_s -= monotonic() - began

    def _keep(self, taken: tuple[int, _Copy]) -> None:
        with self._changed:
            self._copies = [*(one for one in self._copies if one[0] != taken[0]), taken]
            self._changed.notify_all()
            room = lambda: len(self._copies) <= _COPIES_MAX or self._call is None  # noqa: E731
            self._changed.wait_for(room, _GIVE_WAY_S)
            del self._copies[:-_COPIES_MAX]

    @property
    def _unmoved(self) -> bool:
        """Whether it is still what the checkpoint says that it went on from."""
        return bool(self._restored) and (self._worker.clock, self._worker.steps_made) == self._stood

    def loaded(self) -> None:
        """It was made what another checkpoint says."""
        self._restored = ""

    def _copy(self) -> _Copy:
        return _AS_RESTORED if self._unmoved else copied(_state(self._worker))

    def close(self) -> None:
        """The worker leaves. A cut that is being made still gets its state, and so does the job's last."""
        self.boundary()
        with self._changed:
            self._changed.wait_for(lambda: self._call is None, _CLOSE_S)
            self._closed = True
            self._changed.notify_all()
        with suppress(ShoalError):
            self._attend(here=False)
        self._thread.join(_CLOSE_S)
        left = None if self._worker.job is None else left_path(self._worker.job)
        if left is not None and left.is_dir():
            self._write(Place(str(left)), "", self._worker.clock, self._copy())

    def _run(self) -> None:
        while not self._closed and not self._worker.client.closed:
            try:
                self._look()
            except ShoalError:  # nobody is there who could make one
                self._end()
            with self._changed:
                if not self._closed:
                    self._changed.wait(
                        _LOOK_EVERY_S if self._call is not None else self._directory.attend_every_s
                    )

    def _look(self) -> None:
        with self._changed:
            call, newest = self._call, self._copies[-1][0] if self._copies else None
        news = self._attend(ready="" if call is None or newest is None else call.name)
        if call is None or news.name != call.name:
            if news.name != self._seen and news.state in ("called", "begins"):
                clock = self._worker.clock
                with self._changed:
                    self._call, self._seen, self._rest_s = news, news.name, _REST_S_MAX
                    self._copies = [(clock, _AS_RESTORED)] if self._unmoved else []
            elif call is not None:
                self._end()
        elif news.state == "":
            self._end()
        elif news.state == "made":
            self._made(news)
        elif news.state == "called" and newest is not None:
            with self._changed:  # when that was said, the worker's clock was at `newest` at least
                self._copies = [one for one in self._copies if one[0] >= newest]
                self._changed.notify_all()
            self._until = monotonic() + CALL_S / 2

    def _made(self, news: CutNews) -> None:
        clock = news.clocks[self._worker.rank] if self._worker.rank < len(news.clocks) else 0
        with self._changed:
            found = next((one for at, one in self._copies if at == clock), None)
            late = bool(self._copies) and self._copies[-1][0] < clock
        if found is None and late and monotonic() < self._until and not self._closed:
            return  # it was about to end that step
        self._write(Place(news.url), news.name, clock, found)
        self._end()

    def _write(self, place: Place, name: str, clock: int, found: _Copy | None) -> None:
        rank = self._worker.rank
        try:
            if found is None:
                why = f"it has no copy of its state at the end of step {clock}"
                states.write(place, name, rank, clock, None, why)
            elif found is not _AS_RESTORED:
                states.write(place, name, rank, clock, to_safetensors(found))
            elif (origin := find_origin(self._restored)) is not None:
                origin.carry(place, name, rank, clock)
            else:
                states.write(place, name, rank, clock, None, f"checkpoint {self._restored} is gone")
        except ShoalError as error:
            _log.warning("worker %d: its state is not in checkpoint %s: %s", rank, name, error)

    def _end(self) -> None:
        with self._changed:
            self._call, self._copies, self._behind_step = None, [], None
            self._changed.notify_all()

    def _attend(self, ready: str = "", *, here: bool = True) -> CutNews:
        within = self._within
        request = AttendCut(
            rank=self._worker.rank,
            ready=ready,
            aligned=self._aligned and not self._worker.group.staying,
            stands=self.stands,
            waits=within is not None and monotonic() > within + _WAITS_S,
            here=here,
            whole=tuple(at for at, _ in self._copies) if self._worker.several_steps else None,
        )
        news: CutNews = self._directory.attend(request)
        return news
