"""What workers add to a checkpoint: a file of each, written by itself, with what lies on it alone.

    URL/NAME/worker-0.safetensors    parameters, optimizer state, random state: `shoal.train.cut_state`
    URL/NAME/worker-0.json           rank, clock, size and checksum, or why there is none; written last

Who saves waits for them, and takes the second into the manifest. A worker that has made no step since the job
went on from a checkpoint is what that one says: its files are taken from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.checkpoint.manifest import Manifest, WorkerState, digest, find, read_checked
from shoal.checkpoint.place import Place
from shoal.errors import Refused, Unavailable
from shoal.store.messages import StoreSaved

_LOOK_EVERY_S = 0.02
LEFT = "it has left the job"
TREE = "tree"  # the tensor of such a file that is JSON: nested values, with tensors by name


def write(
    place: Place, directory: str, rank: int, clock: int, data: bytes | None, why: str = "", since: str = ""
) -> WorkerState:
    """Add the state of one worker at the end of so many steps; None: it has none, since `why`."""
    if data is not None:
        place.write(_path(directory, rank), data)
    size, sha = (0, "") if data is None else (len(data), digest(data))
    state = WorkerState(rank=rank, clock=clock, bytes=size, sha256=sha, why=why, since=since)
    place.write(_path(directory, rank, "json"), msgspec.json.encode(state))
    return state


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a job went on from."""

    place: Place
    manifest: Manifest

    def carry(self, place: Place, directory: str, rank: int, clock: int) -> WorkerState:
        """Add what it has of a worker that has made no step since: that is what the worker still is.

        Unavailable: it cannot be read now. A checkpoint without it would be less than this one.
        """
        name = self.manifest.name
        old = next((one for one in self.manifest.workers if one.rank == rank), None)
        data, why = None, f"checkpoint {name} has none, and it has made no step since"
        if old is not None and not old.bytes:
            why = old.why
        elif old is not None and _path("", rank) not in self.place.names(name):
            why = f"it has made no step since checkpoint {name}, of which that is gone"
        elif old is not None:
            try:
                data, why = _data(self.place, name, old), ""
            except (Refused, Unavailable) as error:
                raise Unavailable(f"worker {rank} has made no step since {name}: {error}") from None
        since = (old and old.since) or name
        return write(place, directory, rank, clock, data, why, since)

    def is_at(self, rank: int, clock: int) -> bool:
        """Whether it has the state of that worker at the end of so many steps."""
        has = any(one.rank == rank and one.bytes for one in self.manifest.workers)
        return has and self.manifest.clocks[rank : rank + 1] == (clock,)


def collect(
    place: Place,
    name: str,
    cut: StoreSaved,
    wait_s: float,
    left: Place | None,
    origin: Origin | None,
    phases: Callable[[], Sequence[str]],
) -> tuple[WorkerState, ...]:
    """Those of all ranks that have made a step: wait for those that write theirs, take those of workers that
    have `left` from there, and from `origin` those of ranks that have not come since. `phases`: what the
    ranks are doing (`shoal.store.rounds`).
    """
    until, missing = time.monotonic() + wait_s, set(cut.workers)
    while missing and time.monotonic() < until:
        there = place.names(name)
        missing = {rank for rank in missing if f"worker-{rank}.json" not in there}
        if missing:
            time.sleep(_LOOK_EVERY_S)
    said = {state.rank: state for state in _said(place, name)}
    found = {rank: state for rank, state in said.items() if state.bytes}
    for state in () if left is None else _said(left, ""):
        if cut.clocks[state.rank : state.rank + 1] == (state.clock,) and state.rank not in found:
            assert left is not None
            data = _data(left, "", state) if state.bytes else None
            found[state.rank] = write(place, name, state.rank, state.clock, data, state.why, state.since)
    absent = [rank for rank, clock in enumerate(cut.clocks) if clock > 0 and rank not in found]
    now = phases() if absent else ()
    for rank in absent:
        clock = cut.clocks[rank]
        if origin is not None and (rank not in cut.came or origin.is_at(rank, clock)):
            found[rank] = origin.carry(place, name, rank, clock)
        elif rank in said:
            found[rank] = said[rank]
        elif rank in missing:
            found[rank] = WorkerState(rank=rank, clock=clock, why="it was not written in time")
        elif now[rank : rank + 1] == ["left"]:
            found[rank] = WorkerState(rank=rank, clock=clock, why=LEFT)
        else:
            found[rank] = WorkerState(rank=rank, clock=clock, why="it was at the end of no step in time")
    if origin is not None and found and all(state.since for state in found.values()):
        # Nobody has made a step: that the job has fewer workers now may be a mistake.
        for old in origin.manifest.workers:
            if old.rank >= len(cut.clocks):
                found[old.rank] = origin.carry(place, name, old.rank, old.clock)
    return tuple(state for _, state in sorted(found.items()))


def read(place: Place, name: str, rank: int | None, *, common: bool) -> tuple[WorkerState, bytes] | None:
    """The state of that rank, or else of the lowest that has one; None: of nobody.

    Of a worker that has made no step since an earlier checkpoint, while others have, the model is an older
    one: where they have it in `common`, another's is taken.
    """
    there = [state for state in find(place, name).workers if state.bytes]
    since = {state.since for state in there}
    newest = "" if "" in since else max(since, default="")
    last = [state for state in there if state.since == newest]
    own = [state for state in (last if common else there) if state.rank == rank]
    state = min(own or last, key=lambda one: one.rank, default=None)
    return None if state is None else (state, _data(place, name, state))


def missing(manifest: Manifest, workers: int) -> dict[str, list[int]]:
    """Of so many workers, those whose state is not there, though they have made steps; by the reason."""
    found: dict[str, list[int]] = {}
    whys = {state.rank: state.why for state in manifest.workers}
    for rank, clock in enumerate(manifest.clocks[:workers]):
        if clock > 0 and (why := whys.get(rank, "the store alone was saved")):
            found.setdefault(why, []).append(rank)
    return found


def check(place: Place, manifest: Manifest) -> None:
    """Read all of them; Refused names one that is not as it was written."""
    for state in manifest.workers:
        if state.bytes:
            _data(place, manifest.name, state)


def from_plain(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """The nested values that a tree stands for: its lists begin with what they are, all else is itself."""
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "dict":
        return {key: from_plain(one, tensors) for key, one in rest}
    values = [from_plain(one, tensors) for one in rest]
    return values if kind == "list" else tuple(values)


def _data(place: Place, name: str, state: WorkerState) -> bytes:
    return read_checked(place, _path(name, state.rank), state.sha256)


def _path(directory: str, rank: int, kind: str = "safetensors") -> str:
    return f"{directory}/worker-{rank}.{kind}".removeprefix("/")


def _said(place: Place, directory: str) -> Iterator[WorkerState]:
    for file in place.names(directory):
        if file.startswith("worker-") and file.endswith(".json"):
            said = place.read(f"{directory}/{file}".removeprefix("/"))
            yield msgspec.json.decode(said, type=WorkerState)
