"""One of several coordinators: a thread that looks who leads, takes over when nobody does, and stays on.

It owns all waiting for etcd but the journal's own writes. What it finds out it tells the server, by the
server's loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from etcd3gw.lease import Lease

from shoal.errors import ShoalError, Unavailable
from shoal.fleet.coordinator_server import CoordinatorServer
from shoal.fleet.etcd_journal import LEADER_S, Etcd, EtcdJournal, leader_key, text
from shoal.fleet.journal import JournalLost

__all__ = ["Campaign"]

_log = logging.getLogger("shoal.coordinator")
_LOOK_S = 0.3
_RENEW_S = LEADER_S / 5
_ASK_S = 5.0
_CLOSE_S = 10.0


class Campaign:
    """For the leadership of `cluster`, until `close`. `error`: why this process cannot take part."""

    def __init__(self, urls: str, cluster: str, address: str, server: CoordinatorServer) -> None:
        self._etcd = Etcd(urls)
        self._urls = urls
        self._cluster = cluster
        self._address = address
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._lost = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-campaign", daemon=True)
        self._thread.start()

    def close(self, *, forget: bool) -> None:
        """Give the leadership up. `forget`: the cluster is over, and so is its journal."""
        self._stop.set()
        self._lost.set()
        self._thread.join(_CLOSE_S)
        if forget:
            with suppress(Unavailable):  # then it stays there, and nobody reads it
                end = time.monotonic() + _ASK_S
                self._etcd.ask(lambda client: client.delete_prefix(f"/shoal/{self._cluster}/"), end)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    journal = self._take_over()
                    if journal is not None:
                        self._reign(journal)
                except (Unavailable, JournalLost, TimeoutError) as error:
                    _log.warning("%s", error)
                self._stop.wait(_LOOK_S)
        except ShoalError as error:  # such as a journal of another cluster
            _log.critical("this coordinator ends: %s", error)
            self.error = error
            self._tell(self._server.stop.set)

    def _take_over(self) -> EtcdJournal | None:
        """The journal, if nobody led."""
        end = time.monotonic() + _ASK_S
        key = leader_key(self._cluster)
        found = self._etcd.ask(lambda client: client.get(key), end)
        self._server.leader = found[0].decode() if found else ""
        if found:
            return None
        began = time.monotonic()
        lease = self._etcd.ask(lambda client: client.lease(LEADER_S), end)
        put = {"key": text(key), "value": text(self._address), "lease": str(lease.id)}
        won = self._etcd.transaction(
            {
                "compare": [
                    {"key": text(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
                ],
                "success": [{"request_put": put}],
                "failure": [],
            },
            end,
        )
        made = self._made(key, lease.id, end)
        if made is None:
            _log.info("another coordinator was sooner: %s", won)
            return None
        return EtcdJournal(Etcd(self._urls), self._cluster, lease.id, made, began + LEADER_S)

    def _made(self, key: str, lease: int, end: float) -> int | None:
        """The revision at which the key was made by us: also where the answer to that was lost."""
        found: list[Any] = self._etcd.ask(lambda client: client.get(key, metadata=True), end)
        mine = [about for _, about in found if int(about.get("lease", 0)) == lease]
        return int(mine[0]["create_revision"]) if mine else None

    def _reign(self, journal: EtcdJournal) -> None:
        """Lead until the lease or the journal is lost."""
        self._lost.clear()
        try:
            restored = list(journal)
            self._call(lambda: self._server.lead(journal, restored, lambda _: self._lost.set()))
            _log.warning("this coordinator leads now, with %d decisions", len(restored))
            while not self._lost.wait(_RENEW_S):
                journal.renew(self._etcd, journal.until)
        finally:
            journal.close()
            self._tell(self._server.stand_by)
            with suppress(Unavailable):  # or others wait for its end
                self._etcd.ask(lambda client: Lease(journal.lease, client).revoke(), time.monotonic())

    def _call(self, what: Callable[[], None]) -> None:
        """Do it in the server's loop, and wait until it is done."""

        async def done() -> None:
            what()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(_ASK_S)

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(what)
