"""What lies on a worker alone, brought back from a checkpoint; `shoal.train.cut_state` puts it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint import states
from shoal.checkpoint.client import CALL_S, differences, split
from shoal.checkpoint.client import save as save_
from shoal.errors import BadInput, Mismatch, Refused
from shoal.store.catalogue import describe
from shoal.store.client import CHECKPOINT_S
from shoal.store.messages import AttendCut, CutNews
from shoal.train.parameters import LINES_MAX
from shoal.train.random_state import set_random_state
from shoal.train.schedules import Schedules
from shoal.train.state_bytes import from_bytes

if TYPE_CHECKING:
    from shoal.train.parameters import Stepped
    from shoal.train.worker import Worker

_CUT_EVERY_S = 0.01
_LOADED = (1 << 16) - 5  # the topic of the notice that names a checkpoint


class TakenBack:
    """The state of a worker in a checkpoint. Not `own`: another's, of which only the model is taken."""

    def __init__(self, checkpoint: str, state: dict[str, Any], own: bool) -> None:
        self.checkpoint = checkpoint
        self.word: str = state["word"]
        self.own = own
        self._state = state

    def made_before(self, steps: int) -> tuple[int, Schedules]:
        """The steps that the worker had made (these, if it is another's state), and where schedules were."""
        made, schedules = self._state["made"]
        return made if self.own else steps, Schedules(schedules)

    def values(self, stepped: Sequence[Stepped], since: int) -> None:
        """Parameters as they were: for a sync word that finds them nowhere else."""
        for one, state in zip(stepped, self._state["stepped"][since:], strict=False):
            if state["values"]:
                one.take_values(state)

    def take(self, worker: Worker, since: int = 0) -> list[torch.Tensor]:
        """Make the worker what it was; of its optimizers those from number `since` on. Gives the buffers."""
        strategy = worker.strategy
        assert strategy is not None
        there: list[Any] = self._state["stepped"]
        if strategy.alone and strategy.stepped[since:] and not any(one["values"] for one in there):
            raise Mismatch(
                f"checkpoint {self.checkpoint} was made under {self.word}, where the model lies at the "
                f"servers; under {worker.policy} it lies on the workers. Go on under {self.word}"
            )
        if there and (strategy.alone or (self.own and self.word == str(worker.policy))):
            strategy.take(there, since)
        known = {name: one for name, one in worker.fixed.named.items() if name in self._state["buffers"]}
        with torch.no_grad():
            for name, buffer in known.items():
                buffer.copy_(self._state["buffers"][name])
        self.random()
        return list(known.values())

    def random(self) -> None:
        """Random numbers go on where they were."""
        if self.own:
            set_random_state(self._state["random"])


def read_state(worker: Worker, checkpoint: str) -> TakenBack | None:
    """What this worker takes from a checkpoint (URL/NAME): its own state, or that of the lowest rank."""
    if not checkpoint:
        return None
    place, name = split(checkpoint)
    assert name is not None
    home = worker.policy.dense_home
    common = home == "shared" or (home == "peers" and worker.policy.clock.meets)
    found = states.read(place, name, worker.rank, common=common)
    if found is None:
        if home in ("peers", "shared"):
            raise Refused(
                f"checkpoint {checkpoint} has no state of any worker, and under {worker.policy} the model "
                f"lies there; it was saved by client.save, or by an earlier release"
            )
        return None
    state, data = found
    return TakenBack(checkpoint, from_bytes(data), state.rank == worker.rank)


def goes_on_from(worker: Worker) -> str:
    """The checkpoint (URL/NAME) whose clocks are those of the job that this worker joins. None for a later
    life of its rank, which begins as any that replaces another.
    """
    restored = _restored(worker)
    if not restored:
        return ""
    place, name = split(restored)
    clocks = manifest_.find(place, name or "").clocks
    begins = set(clocks[worker.rank : worker.rank + 1])
    if len(clocks) != worker.world_size or worker.policy.clock.meets:
        begins.add(max(clocks))  # all begin where the first was
    return restored if worker.step in begins else ""


def _restored(worker: Worker) -> str:
    """The checkpoint (URL/NAME) that the job goes on from, if any."""
    news: CutNews = cast(Any, worker.client._directory).attend(AttendCut(rank=worker.rank, here=False))
    return news.restored


def check_model(worker: Worker, model: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise Mismatch with all that differs, if the job goes on from a checkpoint of another model.

    `model`: the tables and tensors that are to be opened, by name, as fields of their `TableEntry`.
    """
    restored = _restored(worker)
    if not restored:
        return
    place, name = split(restored)
    manifest = manifest_.find(place, name or "")
    there = {entry.name: entry for entry in manifest.tables if not entry.is_own}
    if not any(manifest.clocks) or not there:  # of before there was a model
        return
    tensors = any(entry.shape is not None for entry in there.values())  # else they lay on the workers
    found: list[str] = []
    for opened, fields in model.items():
        if old := there.get(opened):
            found += differences(msgspec.structs.replace(old, **fields), old)
        elif tensors or fields["shape"] is None:
            found.append(f"{describe(opened, fields['shape'] is not None)} is not in the checkpoint")
    if found:
        found += [f"{old.what} is in the checkpoint alone" for old in there.values() if old.name not in model]
        shown = found[:LINES_MAX] + ["..."] * (len(found) > LINES_MAX)
        raise Mismatch(
            f"the job goes on from checkpoint {restored}, which is of another model:\n  "
            + "\n  ".join(shown)
            + "\nGive --checkpoint another place, or train the model that it is of"
        )


def save(worker: Worker, url: str) -> str:
    """See `Worker.save`."""
    if worker.strategy is not None and not worker.strategy.between_steps:
        raise BadInput(
            f"worker.save({url!r}): under {worker.policy} a checkpoint is of the end of a block of steps; "
            f"call it behind a pass, or when worker.step has changed"
        )
    worker.state.keep()
    if worker.cut_state is None:
        return save_(worker.client, url, CHECKPOINT_S, call_s=CALL_S)
    worker.cut_state.stands = True
    try:
        with ThreadPoolExecutor(1) as pool:
            saved = pool.submit(save_, worker.client, url, CHECKPOINT_S, call_s=CALL_S)
            while not saved.done():
                worker.between_steps()  # as long as this thread is here
                wait([saved], _CUT_EVERY_S)
        return saved.result()
    finally:
        worker.cut_state.stands = False


def load(worker: Worker, url: str) -> str:
    """See `Worker.load`."""
    if worker.cut_state is not None:
        worker.cut_state.loaded()
    name = worker.client.load(url) if worker.rank == 0 else ""
    if worker.board is not None:
        if worker.rank == 0:
            worker.board.announce()
            worker.board.post(_LOADED, name)
        worker.barrier()
        worker.board.announce()
        name = worker.board.text(0, _LOADED) or ""
    worker.state.bring_back()
    if worker.strategy is not None:
        worker.strategy.forget_rows()
        worker.strategy.refresh()
        worker.fixed.refresh()
        if (found := read_state(worker, f"{split(url)[0].url}/{name}")) is not None:
            found.take(worker)
        worker.barrier()
    return name
