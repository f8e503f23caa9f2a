"""Which workers have gone without a word: their lease is over, and they did not take their leave. Pure.

A worker is a client with the name of one (`shoal.store.rounds.client_name`); the newest of a name counts.
Those of the journal, which come from an earlier life of the coordinator, get time to find this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shoal.fleet.decisions import ClientGranted
from shoal.fleet.leases import LEASE_S, Lease
from shoal.store.rounds import rank_of

# Until the first beat, for one that has just got its id: servers may answer it late. And until an eviction is
# made anew.
JOIN_S = 30.0
# The same for those of the journal: one lease in which nobody is evicted, and then their own.
RESTORED_S = 2 * LEASE_S
# Longer than steps and evaluations mostly take; it is only said.
STILL_S = 60.0


class Attendance:
    """Until when each worker must be heard of again, by client id."""

    def __init__(self) -> None:
        self._until: dict[int, tuple[ClientGranted, float]] = {}
        self._may_push: set[int] = set()  # they were heard of, now or by an earlier coordinator

    def granted(self, client: ClientGranted, until: float) -> None:
        """It is the newest of its name; one that has left is waited for no more."""
        self._until.pop(client.client_id, None)
        if rank_of(client.name) is not None and client.state != "left":
            self._until[client.client_id] = (client, until)
        else:
            self._may_push.discard(client.client_id)

    def restored(self, client: ClientGranted) -> None:
        """One of the journal's: it may be at work, and not have found this coordinator yet."""
        if client.state != "left":
            self._may_push.add(client.client_id)

    def unseen(self, reachable: Collection[int]) -> set[int]:
        """Those that may push while they cannot be told to hold: not here again, or not fenced yet."""
        return {
            client_id
            for client_id, (client, _) in self._until.items()
            if client_id in self._may_push and (client.state == "evicting" or client_id not in reachable)
        }

    def heard(self, client_id: int, incarnation: int, now: float) -> None:
        """Its pulse has come. One that is being evicted speaks for nobody."""
        client = self.newest(client_id)
        if client is not None and (client.incarnation, client.state) == (incarnation, "here"):
            self._until[client_id] = (client, now + LEASE_S)
            self._may_push.add(client_id)

    def newest(self, client_id: int) -> ClientGranted | None:
        """The worker's life of now, unless it has left."""
        client, _ = self._until.get(client_id, (None, 0.0))
        return client

    def was_late(self, seconds: float) -> None:
        """The coordinator itself stood still for so long."""
        self._until = {c: (client, until + seconds) for c, (client, until) in self._until.items()}

    def waits_until(self, time: float) -> None:
        """Nobody's time is over before."""
        self._until = {c: (client, max(until, time)) for c, (client, until) in self._until.items()}

    def missing(self, now: float) -> list[str]:
        """The names of those whose time is over."""
        return [client.name for client, until in self._until.values() if until <= now and client.name]

    def still(self, leases: Iterable[Lease], now: float) -> tuple[tuple[int, int, float], ...]:
        """Rank, clock and seconds of workers that are there, and have not pushed, pulled or ended a step."""
        found = (
            (rank, lease.clock, now - lease.progressed)
            for lease in leases
            if now - lease.progressed >= STILL_S and (client := self.newest(lease.client_id)) is not None
            if (rank := rank_of(client.name)) is not None
        )
        return tuple(sorted(found))

    @property
    def deadline(self) -> float | None:
        """When the first one's time is over."""
        return min((until for _, until in self._until.values()), default=None)
