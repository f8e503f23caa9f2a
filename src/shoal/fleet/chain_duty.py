"""What a server does for chains beside serving: learns its places, renews its lease, fills other servers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

from shoal import _core
from shoal.errors import Fenced, Refused, ShoalError
from shoal.fleet.decisions import LEFT
from shoal.store.control import ControlClient
from shoal.store.messages import (
    Done,
    Filled,
    FillOrder,
    PlacementInfo,
    PlacementNews,
    ServerAdmitted,
    Takeover,
    WatchPlacement,
)
from shoal.store.placement_watch import core_placement

_log = logging.getLogger("shoal.server")
# Well below a lease: asking renews it.
_WAIT_S = 0.5
_ASK_S = 5.0
_PAUSE_S = 0.1
_LOADS_EVERY_S = 2.0
_FILL_S = 600.0


class ChainDuty:
    """Threads of a server, for its life. `over` is readable when it is to end: `given_up` if for the cluster
    it is dead; otherwise it was removed, or has failed.

    `registration` is the connection by which the server has registered, at the coordinator of `life`: it is
    dropped when another one answers here.
    """

    def __init__(
        self,
        server: _core.Server,
        control: ControlClient,
        registration: ControlClient,
        admitted: ServerAdmitted,
        identity: str,
    ) -> None:
        self._server = server
        self._store = server.store()
        self._control = control
        self._reports = control.another()  # the other waits for news most of the time
        self._registration = registration
        self.life = admitted.life
        self._index = admitted.index
        self._identity = identity
        self._filling: set[int] = set()  # numbers of orders
        self._shards: list[int] = []
        self._loads_due = 0.0
        self.given_up = False
        self.over, self._ended = os.pipe()
        threading.Thread(target=self._run, name="shoal-chains", daemon=True).start()

    def fenced(self, error: Fenced) -> None:
        """The coordinator says that it is gone."""
        _log.warning("this server ends: %s", error)
        self.given_up = not str(error).endswith(LEFT)

    def _run(self) -> None:
        version = 0
        takeovers: list[Takeover] = []
        pause = threading.Event()
        while True:
            if self._server.diverged:
                # The copies of others are whole: they go on without this one once it is gone.
                _log.error("this server ends: it could not follow the one before it in a chain")
                os.write(self._ended, b".")
                return
            request = WatchPlacement(
                after=version,
                wait_s=_WAIT_S,
                server=self._index,
                identity=self._identity,
                filling=tuple(self._filling),
                loads=self._loads(),
                takeovers=tuple(takeovers),
            )
            try:
                news = self._control.ask(request, PlacementNews, _ASK_S)
            except Fenced as error:
                self.fenced(error)
                os.write(self._ended, b".")
                return
            except Refused as error:
                _log.error("the coordinator does not know this server: %s", error)
                pause.wait(_PAUSE_S)
                continue
            except ShoalError:  # away: the placement that is known holds until it is back
                pause.wait(_PAUSE_S)
                continue
            if news.life != self.life:
                self._registration.hang_up()
            takeovers.clear()
            if news.placement is not None:
                version = news.placement.version
                chains = enumerate(news.placement.chains)
                self._shards = [shard for shard, chain in chains if self._index in chain]
                self._server.place(self._index, core_placement(news.placement))
                takeovers += self._takeovers(news.placement)
            for order in news.fills:
                self._begin(order)

    def _loads(self) -> tuple[tuple[int, int, int], ...]:
        """What each shard here costs, now and then."""
        if time.monotonic() < self._loads_due:
            return ()
        self._loads_due = time.monotonic() + _LOADS_EVERY_S
        store = self._server.store()
        return tuple((shard, *store.load(shard)) for shard in self._shards)

    def _takeovers(self, placement: PlacementInfo) -> Iterator[Takeover]:
        """The shards that this server heads since this placement."""
        for shard, (chain, now) in enumerate(zip(placement.chains, placement.terms, strict=True)):
            term, version, entry = self._store.began(shard)
            if chain[0] == self._index and term == now > 1:
                yield Takeover(shard=shard, term=term, version=version, entry=entry)

    def _begin(self, order: FillOrder) -> None:
        self._filling.add(order.number)
        name = f"shoal-fill-{order.shard}"
        threading.Thread(target=self._fill, args=(order,), name=name, daemon=True).start()

    def _fill(self, order: FillOrder) -> None:
        error = ""
        try:
            self._server.fill(order.shard, order.target, order.term, timeout_s=_FILL_S)
        except _core.CoreError as failure:
            error = str(failure)
            _log.warning("filling server %d with shard %d: %s", order.target, order.shard, error)
            threading.Event().wait(_PAUSE_S)  # it is ordered again at once, also while the target is dead
        done = Filled(
            number=order.number, shard=order.shard, term=order.term, target=order.target, error=error
        )
        try:
            self._reports.ask(done, Done, _ASK_S)
        except ShoalError as failure:  # planned again by a coordinator that comes back
            _log.warning("shard %d: %s", order.shard, failure)
        finally:
            self._filling.discard(order.number)
