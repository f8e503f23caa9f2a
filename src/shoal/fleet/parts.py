"""A server's part in saving and loading, in a thread of its own: the server goes on serving meanwhile."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading

from shoal import _core
from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint import shards
from shoal.checkpoint.place import Place
from shoal.errors import Closed, ShoalError, code_of, from_core
from shoal.store.client import core_spec
from shoal.store.control import ControlClient, list_tables
from shoal.store.messages import PartOrder, PartReport

# Who trains goes first; yet not so much that a lock of this thread's would be waited for.
_NICE = 5
_log = logging.getLogger("shoal.server")
_LIST_S = 30.0


class Parts:
    """Carries out one order at a time. `fileno` is readable when there are reports to be sent."""

    def __init__(self, store: _core.Store, control: ControlClient) -> None:
        self._store = store
        self._control = control  # to ask by; orders come by another
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reports: queue.SimpleQueue[PartReport] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[PartOrder] = queue.SimpleQueue()
        self._newest = 0
        self._life = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._run, name="shoal-parts", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._wake

    def take(self, order: PartOrder) -> None:
        """Begin with this order; an earlier one is broken off."""
        self._newest = order.number if order.do != "stop" else order.number + 1
        self._orders.put(order)

    def reports(self) -> list[PartReport]:
        """What is to be sent."""
        os.eventfd_read(self._wake)
        found: list[PartReport] = []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # on Linux: of this thread alone
        while True:
            order = self._orders.get()
            if order.do == "stop" or order.number != self._newest:
                continue
            try:
                self._carry_out(order)
            except _core.CoreError as error:
                self._fail(order, from_core(error))
            except ShoalError as error:
                self._fail(order, error)
            except Exception as error:  # noqa: BLE001  # whatever it is, whoever asked must hear of it
                _log.exception("order %s", order)
                self._fail(order, Closed(f"{type(error).__name__}: {error}"))

    def _carry_out(self, order: PartOrder) -> None:
        place = Place(order.url)
        if order.do == "save":
            saving = shards.Saving(self._store, order.shards, self._life)
            self._report(PartReport(number=order.number, did="begun", clocks=tuple(saving.clocks)))
            base = None if order.base is None else manifest_.find(place, order.base)
            part = saving.write(place, order.name, order.index, base, lambda: self._check(order))
            self._report(PartReport(number=order.number, did="saved", part=part))
        elif order.do == "check":
            shards.check(place, order.name, order.shards)
            self._report(PartReport(number=order.number, did="checked"))
        else:
            self._life = secrets.token_hex(8)
            tables = self._leave_service(order) if order.reload else order.tables
            alone = order.reload == "alone"
            shards.load(
                self._store, place, order.name, order.shards, tables, resume=order.resume, alone=alone
            )
            self._report(PartReport(number=order.number, did="loaded"))

    def _leave_service(self, order: PartOrder) -> dict[int, int]:
        """Nobody reads or writes these shards until they are placed anew; the tables that they may have."""
        for shard in order.shards:
            self._store.unplace(shard)
        entries = list_tables(self._control, _LIST_S)
        for entry in entries:
            self._store.declare(core_spec(entry))
        return {entry.id: entry.id for entry in entries}

    def _check(self, order: PartOrder) -> None:
        if order.number != self._newest:
            raise Closed("broken off")

    def _fail(self, order: PartOrder, error: ShoalError) -> None:
        self._report(
            PartReport(number=order.number, did="failed", code=code_of(error), message=str(error)[:4096])
        )

    def _report(self, report: PartReport) -> None:
        self._reports.put(report)
        os.eventfd_write(self._wake, 1)
