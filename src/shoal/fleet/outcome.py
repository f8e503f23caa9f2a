"""What a request to the coordinator leads to."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.fleet.cuts import Replies
from shoal.fleet.decisions import Decision
from shoal.store.messages import ClientGrant


@dataclass
class Outcome:
    """Decisions to journal first, then replies by connection; workers to evict, each under its next life."""

    decisions: list[Decision] = field(default_factory=list)
    replies: Replies = field(default_factory=list)
    evictions: list[tuple[str, ClientGrant]] = field(default_factory=list)
