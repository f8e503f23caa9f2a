"""`client.save` and `client.load`: who writes is whoever holds the rows; the manifest comes last."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import suppress
from typing import Any, NamedTuple, cast

import msgspec

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint import shards, states
from shoal.checkpoint.manifest import Manifest, WorkerState
from shoal.checkpoint.place import Place, in_time
from shoal.errors import BadInput, Mismatch, Refused, ShoalError, Timeout, Unavailable
from shoal.store.catalogue import TableEntry, TableRequest
from shoal.store.client import Client
from shoal.store.connect import RemoteDirectory
from shoal.store.messages import Done, LoadStore, SaveStore, StoreSaved
from shoal.store.rounds import Rounds

_log = logging.getLogger("shoal.checkpoint")
# Tables of Shoal's own hold what workers say to each other, and nothing of a model.
_OWN = "shoal."
_SHOWN_MAX = 12
# Nobody but who saves waits meanwhile.
CALL_S = 60.0
_CHECK_S = 30.0
_HOLD_S = 1.0
_PAUSE_S = 0.002


def save(
    client: Client,
    url: str,
    timeout_s: float,
    base: str | None = None,
    *,
    call_s: float = 0.0,
    left: Place | None = None,
    needs: bool = False,
) -> str:
    """Save the store; the name of the new checkpoint. `base`: only what changed since that one.

    `call_s`: workers add their state, and have so long to come to the end of a step, and again to write it;
    `left`: where those that have left the job have put theirs. 0: the store alone. `needs`: without any state
    of a worker that has made steps it would be no checkpoint, and is none.
    """
    place = Place(url)
    end = time.monotonic() + timeout_s
    for gives_way in (True, False):
        name = manifest_.new_name(place)
        request = SaveStore(
            url=place.url,
            name=name,
            base=base,
            wait_s=max(0.0, end - time.monotonic()),
            call_s=call_s,
            gives_way=gives_way,
        )
        try:
            _save(client, place, request, left, needs)
            break
        except ShoalError as error:
            # On a disk that is full the rest would be in the way of the next one.
            with suppress(Unavailable):
                place.remove(name)
            if not isinstance(error, _Again):
                raise
            _log.warning("%s is made again: %s", name, error)
    return name


class _Again(Unavailable):
    """Something more urgent had to be done; that is done at most once."""


def _save(
    client: Client,
    place: Place,
    request: SaveStore,
    left: Place | None,
    needs: bool,
) -> None:
    directory: Any = client._directory
    name, base, timeout_s, call_s = request.name, request.base, request.wait_s, request.call_s
    if isinstance(directory, RemoteDirectory):
        _check_shared(place)
        saved = directory.order(request, StoreSaved, timeout_s)
        if saved.again:
            raise _Again(saved.again)
    else:
        with directory.calling(place.url, name, call_s):
            saving, saved = _cut(client, timeout_s)
        since = None if base is None else manifest_.find(place, base)
        part = saving.write(place, name, 0, since)
        parts, shards_ = () if part is None else (part,), client._session.core.shards
        saved = msgspec.structs.replace(saved, parts=parts, shards=shards_)
    if not saved.parts:
        raise Refused(
            f"checkpoint {place.url}/{base} is of another life of this store: rows were loaded since"
        )
    added = _states(client, place, name, saved, call_s, left) if call_s > 0 else ()
    if needs and added and not any(state.bytes for state in added):
        reasons = "; ".join(f"worker {state.rank}: {state.why}" for state in added)
        raise Unavailable(
            f"{place.url}: the model lies on the workers, and none has added its state: {reasons}"
        )
    written = Manifest(
        name=name,
        time=time.time(),
        shards=saved.shards,
        tables=tuple(directory.entries(timeout_s)),
        parts=saved.parts,
        clocks=saved.clocks,
        base=base,
        workers=added,
    )
    manifest_.write(place, written)


def _states(
    client: Client, place: Place, name: str, saved: StoreSaved, call_s: float, left: Place | None
) -> tuple[WorkerState, ...]:
    """What workers add."""

    def phases() -> list[str]:
        with suppress(ShoalError):  # it is for a message
            return list(Rounds(client, 0, 1).state()["phases"])
        return []

    return states.collect(place, name, saved, call_s, left, find_origin(saved.restored), phases)


def find_origin(restored: str) -> states.Origin | None:
    """The checkpoint (URL/NAME) that a job went on from; none if there is none, or it is gone."""
    if not restored:
        return None
    place, name = split(restored)
    assert name is not None
    try:
        return states.Origin(place, manifest_.find(place, name))
    except (BadInput, Refused) as error:
        _log.warning("what workers are that have not come yet is not known: %s", error)
        return None


class Loaded(NamedTuple):
    """The name of the checkpoint that was loaded, and why newer ones were not, by their names."""

    name: str
    passed_over: dict[str, str]


def load(client: Client, url: str, timeout_s: float, *, resume: bool = False) -> Loaded:
    """Make the store what the checkpoint is. See `Client.load`.

    Without a name, what is damaged is passed over. What cannot be read now (Unavailable) is not: it may be
    whole, and an older one would silently take its place.
    """
    place, name = split(url)
    if isinstance(client._directory, RemoteDirectory):
        _check_shared(place)
    if name is not None:
        return Loaded(_load(client, place, manifest_.find(place, name), timeout_s, resume), {})
    tried = manifest_.names(place)
    if not tried:
        raise BadInput(f"there is no checkpoint at {place.url}")
    reasons: dict[str, str] = {}
    for each in reversed(tried):
        try:
            return Loaded(_load(client, place, manifest_.find(place, each), timeout_s, resume), reasons)
        except Refused as error:
            reasons[each] = str(error)  # which may be of one that it is based on
            _log.warning("%s: %s; trying the one before", each, error)
    shown = [f"{each}: {reason}" for each, reason in reasons.items()][:_SHOWN_MAX]
    raise Refused(f"no checkpoint at {place.url} can be loaded: " + "; ".join(shown))


def split(url: str) -> tuple[Place, str | None]:
    """The place, and which checkpoint there if the URL ends with its name."""
    before, _, last = url.rstrip("/").rpartition("/")
    if before and manifest_.is_name(last):
        return Place(before), last
    return Place(url), None


def _cut(client: Client, timeout_s: float) -> tuple[shards.Saving, StoreSaved]:
    """Images of an embedded store, begun while all its clients are kept from pushing; a thread that dwells
    within a step is let go on. And what is to be known of the workers.
    """
    core, directory = client._session.core, cast(Any, client._directory)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not core.hold(_HOLD_S):
            continue
        try:
            saving = shards.Saving(core.store(), range(core.shards), directory.life)
        finally:
            core.release()
        saved: StoreSaved | None = directory.cut(saving.clocks)
        if saved is not None:
            return saving, saved
        saving.end()
        time.sleep(_PAUSE_S)
    raise Timeout(f"no cut within {timeout_s:g} s: a thread is in the middle of a step all the time")


def _check_shared(place: Place) -> None:
    if place.is_private:
        raise BadInput(
            f"{place.url}: servers are other processes, and cannot reach the memory of this one; "
            f"use file://, s3:// or another place that all of them reach"
        )


def _load(client: Client, place: Place, manifest: Manifest, timeout_s: float, resume: bool) -> str:
    directory: Any = client._directory
    if isinstance(directory, RemoteDirectory):
        tables = _open_tables(client, place, manifest, timeout_s, resume)
        request = LoadStore(url=place.url, name=manifest.name, tables=tables, resume=resume, wait_s=timeout_s)
        directory.order(request, Done, timeout_s)
    else:
        store = client._session.core.store()
        _check_shards(place, manifest, store.shards)
        shards.check(place, manifest.name)
        tables = _open_tables(client, place, manifest, timeout_s, resume)
        directory.life = secrets.token_hex(8)
        shards.load(store, place, manifest.name, range(store.shards), tables, resume=resume)
        if resume:
            directory.call.restored(f"{place.url}/{manifest.name}")
    for entry in manifest.tables:
        if entry.shape is not None and entry.written:
            directory.written(entry.name, timeout_s)
    return manifest.name


def _check_shards(place: Place, manifest: Manifest, here: int) -> None:
    if manifest.shards != here:
        raise Mismatch(
            f"checkpoint {place.url}/{manifest.name} has {manifest.shards} shards, this store {here}; "
            f"start it with --shards {manifest.shards}"
        )


def _open_tables(
    client: Client, place: Place, manifest: Manifest, timeout_s: float, resume: bool
) -> dict[int, int]:
    """Create what is missing here; ids of the checkpoint -> ids here. Mismatch lists all that differs."""
    here = {entry.name: entry for entry in client._directory.entries(timeout_s)}
    there = {entry.name: entry for entry in manifest.tables}
    found = [
        f"{entry.what} is not in the checkpoint"
        for name, entry in here.items()
        if name not in there and not name.startswith(_OWN)
    ]
    for name in here.keys() & there.keys():
        found += differences(here[name], there[name])
    if found:
        shown = found[:_SHOWN_MAX] + ["..."] * (len(found) > _SHOWN_MAX)
        raise Mismatch(
            f"checkpoint {place.url}/{manifest.name} is of another model:\n  " + "\n  ".join(sorted(shown))
        )
    tables: dict[int, int] = {}
    for entry in sorted(manifest.tables, key=lambda entry: entry.id):
        opened = client._open(_request(entry, entry.name not in here), timeout_s)
        tables[entry.id] = opened.entry.id
        if resume and opened.entry.id != entry.id:
            raise Mismatch(
                f"{entry.what} has id {opened.entry.id} here and {entry.id} in the checkpoint: a job is gone "
                f"on with in a store that has no tables yet"
            )
    return tables


def _request(entry: TableEntry, create: bool) -> TableRequest:
    if not create:
        return TableRequest(name=entry.name, dense=entry.shape is not None)
    table: dict[str, Any] = {"dim": entry.dim, "init": entry.init, "seed": entry.seed}
    return TableRequest(
        name=entry.name,
        dense=entry.shape is not None,
        shape=entry.shape,
        optimizer=entry.optimizer,
        placement=entry.placement,
        brings_value=entry.shape is not None,
        **(table if entry.shape is None else {}),
    )


def differences(here: TableEntry, there: TableEntry) -> list[str]:
    """Why rows of the one cannot be those of the other."""
    compared = {
        "dim": (here.dim, there.dim),
        "shape": (here.shape, there.shape),
        "optimizer": (here.optimizer.layout(), there.optimizer.layout()),
        "placement": (here.placement, there.placement),
    }
    return [
        f"{here.what}: {what} is {ours} here, {theirs} in the checkpoint"
        for what, (ours, theirs) in compared.items()
        if ours != theirs
    ]


def check_writable(url: str, wait_s: float = _CHECK_S) -> None:
    """Raise BadInput if checkpoints cannot be written there, or nobody there answers in time."""
    try:
        in_time(lambda: _probe(url), url, wait_s)
    except Unavailable as error:
        raise BadInput(f"no checkpoint can be written: {error}") from None


def _probe(url: str) -> None:
    place = Place(url)  # some clients already speak to their service here
    _check_shared(place)
    place.check()
