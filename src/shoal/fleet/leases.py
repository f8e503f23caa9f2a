"""Which clients are there: a lease lasts 2.5 s and is renewed by the client's pulse. Pure: time is given.

A closed connection ends no lease: the client connects again, or the lease runs out. Workers whose lease is
over are evicted (`shoal.fleet.attendance`); no data path stops because one was not renewed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.fleet.pulse import Beat

LEASE_S = 2.5


@dataclass(frozen=True)
class Lease:
    """One life of a client, and how far it has come; `peer` is its connection, if it has one."""

    client_id: int
    incarnation: int
    renewed: float
    peer: int | None
    clock: int = 0
    pushes: int = 0
    pulls: int = 0
    progressed: float = 0.0  # when one of the three last grew


class Leases:
    """The leases that run, by client."""

    def __init__(self, now: float = 0.0) -> None:
        # After a start of the coordinator's own, clients get one lease to find it.
        self._quiet_until = now + LEASE_S
        self._leases: dict[int, Lease] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def open(self, peer: int, client_id: int, incarnation: int, now: float) -> None:
        """A client's pulse is connected; an older life of it has no lease any more."""
        known = self._leases.get(client_id)
        if known is None or known.incarnation <= incarnation:
            self._leases[client_id] = Lease(client_id, incarnation, now, peer, progressed=now)

    def renew(self, peer: int, beat: Beat, now: float) -> Lease | None:
        """A beat has come. None: its lease is over, or another life's by now."""
        for lease in self._of(peer):
            moved = (beat.clock, beat.pushes, beat.pulls) != (lease.clock, lease.pushes, lease.pulls)
            self._leases[lease.client_id] = replace(
                lease,
                renewed=now,
                clock=beat.clock,
                pushes=beat.pushes,
                pulls=beat.pulls,
                progressed=now if moved else lease.progressed,
            )
            return lease
        return None

    def closed(self, peer: int) -> None:
        """The connection ended; the lease runs on."""
        for lease in self._of(peer):
            self._leases[lease.client_id] = replace(lease, peer=None)

    def give_up(self, peer: int) -> Lease | None:
        """The client has ended in good order: what its lease was."""
        for lease in self._of(peer):
            return self._leases.pop(lease.client_id)
        return None

    def was_late(self, seconds: float) -> None:
        """The coordinator itself stood still for so long: nobody is to blame for that."""
        self._quiet_until += seconds
        self._leases = {
            c: replace(one, renewed=one.renewed + seconds, progressed=one.progressed + seconds)
            for c, one in self._leases.items()
        }

    def expired(self, now: float) -> list[Lease]:
        """Those whose time is over."""
        if now < self._quiet_until:
            return []
        return [lease for lease in self._leases.values() if now - lease.renewed > LEASE_S]

    def drop_expired(self, now: float) -> None:
        """Forget those; their clients may come back."""
        for lease in self.expired(now):
            del self._leases[lease.client_id]

    def unreachable(self) -> list[Lease]:
        """Clients that may be there, and cannot be told anything now."""
        return [lease for lease in self._leases.values() if lease.peer is None]

    def peers(self) -> dict[int, int]:
        """Connection -> client, of all that can be reached."""
        return {lease.peer: lease.client_id for lease in self._leases.values() if lease.peer is not None}

    def starting(self, now: float) -> bool:
        """Whether there may be clients that have not found this coordinator yet."""
        return now < self._quiet_until

    def _of(self, peer: int) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.peer == peer]
