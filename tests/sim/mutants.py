"""Deliberate bugs in Python, put in place of what is right; those of the core are compiled into its build.

A process that hunts switches one on and ends: nothing is ever put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal import _core
from shoal.checkpoint import keep, manifest, place, shards


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


CHECKPOINT_MUTANTS = (
    manifest_first,
    delta_of_unsaved,
    checksums_off,
    names_not_synced,
    new_directory_not_synced,
    one_whole_kept,
    heads_not_loaded,
)
PYTHON_MUTANTS: dict[str, Callable[[], None]] = {each.__name__: each for each in CHECKPOINT_MUTANTS}


def switch_on(name: str) -> None:
    """One of these, or of those that were compiled in."""
    if name in PYTHON_MUTANTS:
        PYTHON_MUTANTS[name]()
    else:
        _core.protocol.set_mutant(name)
