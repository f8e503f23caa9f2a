"""Who clients are: ids and incarnations. A known name gets its id again and the next incarnation. Pure."""

from __future__ import annotations

from typing import Literal

from shoal.config import check_name
from shoal.errors import Fenced, Refused
from shoal.fleet.decisions import ClientGranted

CLIENT_NAMES_MAX = 100_000


class Grants:
    """All clients that there ever were. Ids begin after `ids_from`."""

    def __init__(self, ids_from: int) -> None:
        self.ids_from = self._id_max = ids_from
        self._clients: dict[str, ClientGranted] = {}

    def __len__(self) -> int:
        return self._id_max - self.ids_from

    def check(self, name: str | None) -> None:
        """Raise if no client can have that name."""
        if name is None:
            return
        check_name("a client's name", name)
        if name not in self._clients and len(self._clients) >= CLIENT_NAMES_MAX:
            raise Refused(f"there are {CLIENT_NAMES_MAX} named clients already; join without a name")

    def check_place(self, name: str | None, incarnation: int | None) -> None:
        """Raise if another client has taken the place of that incarnation. One that got it itself, and did
        not hear of it, asks again."""
        newest = None if name is None or incarnation is None else self._clients.get(name)
        if newest is None or incarnation is None or newest.instead_of == incarnation:
            return
        if newest.incarnation > incarnation and newest.state == "here":
            raise Fenced(
                f"client {name!r} was evicted, and another process has its place (incarnation "
                f"{newest.incarnation}; this was {incarnation}). End this one: the other does its work"
            )

    def next(
        self,
        name: str | None,
        state: Literal["here", "evicting"] = "here",
        instead_of: int | None = None,
    ) -> ClientGranted:
        """What a client of that name, or of none, would get."""
        known = None if name is None else self._clients.get(name)
        if known is None:
            return ClientGranted(name=name, client_id=self._id_max + 1, incarnation=1)
        return ClientGranted(
            name=name,
            client_id=known.client_id,
            incarnation=known.incarnation + 1,
            state=state,
            instead_of=instead_of,
        )

    def apply(self, granted: ClientGranted) -> None:
        """It has got that."""
        self._id_max = max(self._id_max, granted.client_id)
        if granted.name is not None:
            self._clients[granted.name] = granted
