"""A client learns where shards have gone: one thread that asks the coordinator and tells the core."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from shoal import _core
from shoal.errors import Refused, ShoalError
from shoal.store.control import Address, ControlClient
from shoal.store.messages import ClientGrant, Lost, PlacementInfo, PlacementNews, Takeover, WatchPlacement

if TYPE_CHECKING:
    from shoal.store.client import Session

_log = logging.getLogger("shoal.client")
_WAIT_S = 60.0
# Where another may lead by now, and the one that is asked only sleeps.
_WAIT_SEVERAL_S = 5.0
_GRACE_S = 10.0
_PAUSE_S = 0.5
_CLOSE_S = 2.0


def core_placement(placement: PlacementInfo) -> _core.Placement:
    """The same as the core has it. Servers that are no more have no port."""
    return _core.Placement(
        version=placement.version,
        weak=placement.weak,
        servers=[
            _core.ServerAddress(s.index, s.host, 0 if s.state in ("evicted", "left") else s.port, s.unix_path)
            for s in placement.servers
        ],
        terms=list(placement.terms),
        chains=[list(chain) for chain in placement.chains],
    )


class PlacementWatch:
    """Until `close`, or until nobody has the session any more.

    While the coordinator is away everybody goes on with the placement that they have.
    """

    def __init__(self, address: Address, token: str, session: Session, grant: ClientGrant) -> None:
        self._control = ControlClient(address, token)
        self._session = weakref.ref(session)
        weakref.finalize(session, self._control.close)
        self._client = grant.client_id
        self._version = grant.placement.version
        self._heard = 0  # the last takeover that the coordinator has told of
        self._lost: list[Lost] = []  # not told yet
        self._wait_s = _WAIT_SEVERAL_S if address.others else _WAIT_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-placement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; it may be in the middle of a question."""
        self._closed.set()
        self._control.close()
        self._thread.join(_CLOSE_S)

    def aside(self) -> str:
        """What to add to an error if nobody could give a lost server's shards to another."""
        if self._closed.is_set() or self._control.fileno() != -1:
            return ""
        return (
            f"; the coordinator at {self._control.address} does not answer either: where a server was lost, "
            "its copies take over when it is back"
        )

    def _run(self) -> None:
        while not self._closed.is_set() and self._session() is not None:
            try:
                lost = tuple(self._lost)
                request = WatchPlacement(
                    after=self._version, wait_s=self._wait_s, heard=self._heard, lost=lost
                )
                news = self._control.ask(request, PlacementNews, self._wait_s + _GRACE_S)
            except Refused as error:
                if not self._closed.is_set():
                    _log.warning("no news of placements: %s", error)
                return
            except ShoalError:  # the coordinator is away, or this client was closed
                self._closed.wait(_PAUSE_S)
                continue
            del self._lost[: len(lost)]
            session = self._session()
            if session is None:
                return
            try:
                if news.placement is not None:
                    session.core.set_placement(core_placement(news.placement))
                    self._version = news.placement.version
                pushes = sum(self._count_lost(session, takeover) for takeover in news.takeovers)
                if pushes:  # what others have lost, too, the status tells
                    _log.warning("%d acknowledged pushes of this client were lost with a server", pushes)
            except _core.CoreError:  # closed meanwhile
                return
            except MemoryError:  # asked for again, and by then there may be some
                _log.warning("no memory for news of placements")
                self._closed.wait(_PAUSE_S)
                continue
            del session  # or it would live while this thread waits for the next
            self._heard = news.heard

    def _count_lost(self, session: Session, new: Takeover) -> int:
        last, pushes = session.core.taken_over(new.shard, new.term, new.version, new.entry)
        session.pushes_lost += pushes
        if last > new.version or pushes:
            lost = Lost(
                client=self._client,
                shard=new.shard,
                term=new.term,
                version=new.version,
                last=last,
                pushes=pushes,
            )
            self._lost.append(lost)
        return pushes
