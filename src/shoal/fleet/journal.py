"""The coordinator's memory, as an interface: `shoal.fleet.sqlite_journal`, or `etcd_journal` for several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from shoal.fleet.decisions import Decision


class JournalLost(Exception):  # noqa: N818  # as the errors of Shoal are called
    """Whether the last decisions are kept is not known, or they are not: who made them must stop."""


class Journal(Protocol):
    """The decisions in force. Whoever has one that holds is the only one that decides."""

    def append(self, decisions: Sequence[Decision]) -> None:
        """Return when they are kept; only then may they be answered. One replaces the older one of its key.

        Raises JournalLost.
        """

    def __iter__(self) -> Iterator[Decision]:
        """All that are in force, in the order in which they were made."""

    @property
    def holds(self) -> bool:
        """Whether nobody else can be writing it now."""

    def close(self) -> None:
        """Let go of it. Twice is harmless."""
