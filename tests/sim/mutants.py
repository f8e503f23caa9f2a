"""Deliberate bugs in Python, put in place of what is right; those of the core are compiled into its build.

A process that hunts switches one on and ends: nothing is ever put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from shoal import _core
from shoal.checkpoint import keep, manifest, place, shards
from shoal.fleet import (
    attendance,
    coordinator,
    coordinator_server,
    cuts,
    grants,
    losses,
    outcome,
    sqlite_journal,
)
from shoal.fleet.decisions import ClientGranted, ServerGone
from shoal.fleet.outcome import Outcome
from shoal.store import messages

HEAD_BYTES = 64  # of a shard's image, before the records


def manifest_first() -> None:
    """The manifest is written before the parts that it lists."""
    write = place.Place.write

    def hurried(self: place.Place, name: str, data: bytes) -> None:
        waiting = self.__dict__.setdefault("_waiting", [])
        waiting.append((name, data))
        if name.endswith(manifest.MANIFEST):
            for each in (waiting.pop(), *waiting):
                write(self, *each)
            waiting.clear()

    place.Place.write = hurried  # type: ignore[method-assign]


def delta_of_unsaved() -> None:
    """A delta has what changed since the last cut, whether or not that one was ever whole."""
    since, last = shards.Saving._since, {}

    def remembered(self: shards.Saving, at: place.Place, base: Any) -> dict[int, int] | None:
        found = since(self, at, base)
        if found:
            found |= last.get(self._life, {})
        last[self._life] = self._versions()
        return found

    shards.Saving._since = remembered  # type: ignore[method-assign]


def checksums_off() -> None:
    """What is read is taken for what was written."""

    def believing(at: place.Place, name: str, _sha256: str) -> bytes:
        return at.read(name)

    manifest.read_checked = shards.read_checked = believing  # type: ignore[attr-defined]


def names_not_synced() -> None:
    """A file's bytes are made durable, its name is not."""
    place._sync_directory = lambda _path: None


def new_directory_not_synced() -> None:
    """As long as only names of files are: a directory that was just made is not there after a crash."""

    def make(path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    place._make_directory = make


def one_whole_kept() -> None:
    """The one before goes when the next is there."""
    keep._WHOLE_KEPT = keep._FOUND_KEPT = 1


def heads_not_loaded() -> None:
    """Rows come back without the dedupe records that belong to them."""
    shards._load_heads = lambda *_: None


def records_beyond_cut() -> None:
    """A server that goes back to a checkpoint keeps its dedupe records, of pushes that came since."""
    load_heads = shards._load_heads

    def keep_records(store: _core.Store, tensors: dict[str, Any], mine: set[int], clocks: Any) -> None:
        for shard in mine:
            image, head = store.begin_image(shard)
            store.end_image(shard, image)
            cut = tensors.get(f"{shard}/head")
            if cut is not None and any(head[HEAD_BYTES : HEAD_BYTES + 8]):
                kept = cut[:HEAD_BYTES].tobytes() + head[HEAD_BYTES:]
                tensors[f"{shard}/head"] = np.frombuffer(kept, np.uint8)
        load_heads(store, tensors, mine, clocks)

    shards._load_heads = keep_records


def last_takeover_only() -> None:
    """Clients hear only of the last server that took a shard over, not of those between."""
    news = losses.Losses.news

    def last(self: losses.Losses, request: Any) -> tuple[int, tuple[Any, ...]]:
        number, takeovers = news(self, request)
        return number, tuple({one.shard: one for one in takeovers}.values())

    losses.Losses.news = last  # type: ignore[method-assign]


def batch_in_pieces() -> None:
    """Decisions that belong together are made durable one by one."""
    append = sqlite_journal.SqliteJournal.append

    def piecemeal(self: sqlite_journal.SqliteJournal, decisions: Any) -> None:
        for decision in decisions:
            append(self, [decision])

    sqlite_journal.SqliteJournal.append = piecemeal  # type: ignore[method-assign]


def answered_first() -> None:
    """A coordinator answers, and then makes what it has said durable."""
    carry_out = coordinator_server.CoordinatorServer._carry_out

    def hurried(self: coordinator_server.CoordinatorServer, made: outcome.Outcome) -> None:
        for peer, reply in made.replies:
            if peer in self._writers and isinstance(reply, messages.Reply):
                self._writers[peer].write(messages.encode(reply))
        orders = [(peer, reply) for peer, reply in made.replies if not isinstance(reply, messages.Reply)]
        carry_out(self, outcome.Outcome(made.decisions, orders, made.evictions))

    coordinator_server.CoordinatorServer._carry_out = hurried  # type: ignore[method-assign]


def evicted_unfenced() -> None:
    """A worker is evicted under its own life: servers go on to take what it sends."""
    next_life = grants.Grants.next

    def the_same(
        self: grants.Grants, name: Any, state: Any = "here", instead_of: Any = None
    ) -> ClientGranted:
        known = None if name is None else self._clients.get(name)
        if state == "here" or known is None:
            return next_life(self, name, state, instead_of)
        return ClientGranted(name=name, client_id=known.client_id, incarnation=known.incarnation, state=state)

    grants.Grants.next = the_same  # type: ignore[method-assign]


def images_begun_early() -> None:
    """Servers begin their images when the first client has answered."""
    held = cuts.Cuts.held

    def hurried(self: cuts.Cuts, peer: int, number: int, now: float) -> cuts.Replies:
        if self._work is not None and self._work.stage == "hold" and self._work.number == number:
            self._work.waiting = {peer}
        return held(self, peer, number, now)

    cuts.Cuts.held = hurried  # type: ignore[method-assign]


def late_images_count() -> None:
    """Images count that were begun when the clients' holds had ended by themselves."""
    cuts.BEGIN_S = 10.0


def any_attempt() -> None:
    """What a server says of an earlier attempt is taken for what it does now."""
    report = cuts.Cuts.report

    def believing(self: cuts.Cuts, peer: int, said: messages.PartReport, now: float) -> cuts.Replies:
        number = said.number if self._work is None else self._work.number
        return report(self, peer, msgspec.structs.replace(said, number=number), now)

    cuts.Cuts.report = believing  # type: ignore[method-assign]


def cut_without_unseen() -> None:
    """Who is at work, and has not found a coordinator that was started again, is not waited for."""
    attendance.Attendance.unseen = lambda *_: set()  # type: ignore[method-assign,assignment]


def gone_untold() -> None:
    """A server is given up that has no shards any more, and no placement says so."""

    def silently(self: coordinator.Coordinator, index: int, why: str, outcome: Outcome) -> None:
        placed = self._placer.placed
        if placed is None or index in self._roster.gone or (index,) in placed.chains:
            return
        self._decide(outcome, ServerGone(index=index, why=why))
        if (without := self._placer.gone(index)) is not None:
            self._decide(outcome, without)
        self._changed(outcome)

    coordinator.Coordinator._evict = silently  # type: ignore[method-assign]


CUT_MUTANTS = (images_begun_early, late_images_count, any_attempt, cut_without_unseen)
COORDINATOR_MUTANTS = (answered_first, evicted_unfenced, gone_untold)
LOSS_MUTANTS = (records_beyond_cut, last_takeover_only)
CHECKPOINT_MUTANTS = (
    manifest_first,
    delta_of_unsaved,
    checksums_off,
    names_not_synced,
    new_directory_not_synced,
    one_whole_kept,
    heads_not_loaded,
)
PYTHON_MUTANTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (*CHECKPOINT_MUTANTS, *LOSS_MUTANTS, *COORDINATOR_MUTANTS, *CUT_MUTANTS, batch_in_pieces)
}


def switch_on(name: str) -> None:
    """One of these, or of those that were compiled in."""
    if name in PYTHON_MUTANTS:
        PYTHON_MUTANTS[name]()
    else:
        _core.protocol.set_mutant(name)
