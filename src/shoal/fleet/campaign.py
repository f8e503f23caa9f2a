"""One of several coordinators: a thread that looks who leads, takes over when nobody does, and stays on.

It owns all waiting for etcd but the journal's own writes. What it finds out it tells the server, by the
server's loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import ShoalError, Unavailable
from shoal.fleet.coordinator_server import CoordinatorServer
from shoal.fleet.etcd_journal import LEADER_S, Etcd, EtcdJournal, forget, revoke, take_over
from shoal.fleet.journal import JournalLost

_log = logging.getLogger("shoal.coordinator")
_LOOK_S = 0.3
_RENEW_S = LEADER_S / 5
_CALL_S = 5.0
_CLOSE_S = 10.0


class Campaign:
    """For the leadership of `cluster`, until `close`. `error`: why this process cannot take part."""

    def __init__(self, urls: str, cluster: str, address: str, server: CoordinatorServer) -> None:
        self._etcd = Etcd(urls)
        self._cluster = cluster
        self._address = address
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._lost = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-campaign", daemon=True)
        self._thread.start()

    def close(self, *, over: bool) -> None:
        """Give the leadership up. `over`: so is the whole cluster, and its journal may go."""
        self._stop.set()
        self._lost.set()
        self._thread.join(_CLOSE_S)
        if over:
            forget(self._etcd, self._cluster)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    found = take_over(self._etcd, self._cluster, self._address)
                    if isinstance(found, str):
                        self._server.leader = found
                    else:
                        self._reign(found)
                except (Unavailable, JournalLost, TimeoutError) as error:
                    _log.warning("%s", error)
                    self._server.leader = ""
                self._stop.wait(_LOOK_S)
        except ShoalError as error:  # such as a journal of another cluster
            _log.critical("this coordinator ends: %s", error)
            self.error = error
        finally:
            self._tell(self._server.stop.set)

    def _reign(self, journal: EtcdJournal) -> None:
        """Lead until the lease or the journal is lost."""
        self._lost.clear()
        try:
            restored = list(journal)
            self._call(lambda: self._server.lead(journal, restored, lambda _: self._lost.set()))
            _log.warning("this coordinator leads now, with %d decisions", len(restored))
            while not self._lost.wait(_RENEW_S) and not self._stop.is_set():
                journal.renew(self._etcd, journal.until)
        finally:
            journal.close()
            self._tell(self._server.stand_by)
            revoke(self._etcd, journal.lease)

    def _call(self, what: Callable[[], None]) -> None:
        """Do it in the server's loop, and wait until it is done."""

        async def done() -> None:
            what()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(_CALL_S)

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(what)
