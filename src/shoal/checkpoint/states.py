"""What workers add to a checkpoint: a file of each, written by itself, with what lies on it alone.

    URL/NAME/worker-0.safetensors    parameters, optimizer state, random state: `shoal.train.cut_state`
    URL/NAME/worker-0.json           rank, clock, size and checksum, or why there is none; written last

Who saves waits for them, and takes the second into the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from shoal.checkpoint.manifest import Manifest, WorkerState, digest, find, read_checked
from shoal.checkpoint.place import Place

_LOOK_EVERY_S = 0.02
TREE = "tree"  # the tensor of such a file that is JSON: nested values, with tensors by name


def write(place: Place, directory: str, rank: int, clock: int, data: bytes | None, why: str = "") -> None:
    """Add the state of one worker at the end of so many steps; None: it has none, since `why`."""
    if data is not None:
        place.write(_path(directory, rank), data)
    size, sha = (0, "") if data is None else (len(data), digest(data))
    state = WorkerState(rank=rank, clock=clock, bytes=size, sha256=sha, why=why)
    place.write(_path(directory, rank, "json"), msgspec.json.encode(state))


def collect(
    place: Place, name: str, expected: Iterable[int], clocks: Sequence[int], wait_s: float, left: Place | None
) -> tuple[WorkerState, ...]:
    """Those of all ranks that have made a step: wait for the expected, take those of workers that have `left`
    from there.
    """
    until, missing = time.monotonic() + wait_s, set(expected)
    while missing and time.monotonic() < until:
        there = place.names(name)
        missing = {rank for rank in missing if f"worker-{rank}.json" not in there}
        if missing:
            time.sleep(_LOOK_EVERY_S)
    found = {state.rank: state for state in _said(place, name)}
    for state in () if left is None else _said(left, ""):
        if clocks[state.rank : state.rank + 1] == (state.clock,) and state.rank not in found:
            assert left is not None
            write(place, name, state.rank, state.clock, _data(left, "", state))
            found[state.rank] = state
    for rank, clock in enumerate(clocks):
        if clock > 0 and rank not in found:
            why = "it was not written in time" if rank in missing else "it was at the end of no step in time"
            found[rank] = WorkerState(rank=rank, clock=clock, why=why)
    return tuple(state for _, state in sorted(found.items()))


def read(place: Place, name: str, rank: int) -> tuple[WorkerState, bytes] | None:
    """The state of that rank, or else of the lowest that has one; None: of nobody."""
    there = [state for state in find(place, name).workers if state.bytes]
    state = min(there, key=lambda one: (one.rank != rank, one.rank), default=None)
    return None if state is None else (state, _data(place, name, state))


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
