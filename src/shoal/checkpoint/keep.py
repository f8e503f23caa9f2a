"""Checkpoints of a job, made while it runs: a process of its own beside the supervisor.

    python -m shoal.checkpoint.keep --url URL --every 300 --left DIRECTORY

It joins the cluster of SHOAL_ADDRESS and saves every so many seconds, with the state of the workers (of those
that have left the job what they put into DIRECTORY): the whole store at first, then only
what changed, and the whole again when that has become as large. The newest two that stand by themselves are
kept (four until it has made two), with what is based on them, and the one that the job went on from. On stdin
`last` asks for a last one, `needs 1` (or 0) for none without the state of a worker; the end of stdin ends it
at once. What came of each is a line on stdout: `saved` and its name, or `failed` and why.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.client import CALL_S, save
from shoal.checkpoint.place import Place
from shoal.config import read_environment
from shoal.errors import Refused, ShoalError
from shoal.store.client import Client
from shoal.store.connect import connect
from shoal.store.messages import AttendCut

_log = logging.getLogger("shoal.checkpoint")
_SAVE_S = 3600.0
_WHOLE_KEPT = 2
_FOUND_KEPT = 4  # while some were there before: nobody has read those since, and they may be damaged


class Keeper:
    """Makes one checkpoint after the other at `url`."""

    def __init__(self, client: Client, url: str, left: Place | None = None, needs: bool = False) -> None:
        self._client = client
        self._left = left
        self.needs = needs
        self._place = Place(url)
        self._base: str | None = None
        self._made: set[str] = set()  # the whole ones
        self._whole_bytes = 0
        self._bytes_since = 0

    def save(self) -> str:
        """One more: of what changed, where that is less than the whole."""
        began = time.monotonic()
        base = self._base if self._bytes_since < self._whole_bytes else None
        try:
            name = self._save(base)
        except Refused:
            if base is None:
                raise
            base = None  # what it would be based on is gone
            name = self._save(None)
        written = manifest_.find(self._place, name)
        if base is None:
            self._made.add(name)
            self._whole_bytes, self._bytes_since = written.bytes, 0
        else:
            self._bytes_since += written.bytes
        self._base = name
        seconds = time.monotonic() - began
        _log.info("saved %s: %d rows, %d bytes in %.2f s", name, written.rows, written.bytes, seconds)
        for state in written.workers:
            if state.why:
                _log.warning("%s is without the state of worker %d: %s", name, state.rank, state.why)
        try:
            self._remove_old()
        except ShoalError as error:  # this one is made; and another time they go
            _log.warning("older ones than %s stay: %s", name, error)
        return name

    def _save(self, base: str | None) -> str:
        url, needs = self._place.url, self.needs
        return save(self._client, url, _SAVE_S, base, call_s=CALL_S, left=self._left, needs=needs)

    def _remove_old(self) -> None:
        """What is older than the last that stand by themselves; also what was broken off before them."""
        names = manifest_.names(self._place)
        whole = [name for name in names if self._stands(name)]
        kept = _WHOLE_KEPT if self._made.issuperset(whole[-_WHOLE_KEPT:]) else _FOUND_KEPT
        if len(whole) < kept:
            return
        # Workers that are still starting take their state from the one that the job went on from.
        news = cast(Any, self._client._directory).attend(AttendCut(rank=0, here=False))
        for name in names[: names.index(whole[-kept])]:
            if news.restored.endswith(f"/{name}"):
                continue
            _log.info("removing %s", name)
            self._place.remove(name)

    def _stands(self, name: str) -> bool:
        try:
            return manifest_.find(self._place, name).base is None
        except ShoalError:
            return False


class Orders:
    """What was said on stdin so far: whether a last checkpoint is to be made, and what all of them need."""

    def __init__(self, needs: bool) -> None:
        self.last = threading.Event()
        self.needs = needs

    def hear(self, line: str) -> None:
        """The next line."""
        word, _, value = line.strip().partition(" ")
        if word == "needs":
            self.needs = value == "1"
        else:
            self.last.set()


def _run(url: str, every_s: float, left: str, needs: bool) -> None:
    orders = Orders(needs)
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    with connect() as client:
        keeper = Keeper(client, url, Place(left))
        while True:
            last = orders.last.wait(every_s)
            keeper.needs = orders.needs
            try:
                _tell(f"saved {keeper.save()}")
            except ShoalError as error:
                # The next one may succeed; the one before is as it was.
                _log.error("no checkpoint was made: %s", error)
                _tell(f"failed {error}")
            if last:
                return


def _listen(orders: Orders) -> None:
    for line in sys.stdin:
        orders.hear(line)
    os._exit(0)  # nobody is there any more; whatever is being saved, the one before is whole


def _tell(text: str) -> None:
    with suppress(BrokenPipeError):  # who asked is gone, as the end of stdin says next
        os.write(sys.stdout.fileno(), f"{' '.join(text.split())}\n".encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Save until told to end; 1 if it could not begin."""
    parser = argparse.ArgumentParser(prog="shoal.checkpoint.keep")
    parser.add_argument("--url", required=True)
    parser.add_argument("--every", type=float, required=True, help="seconds")
    parser.add_argument("--left", required=True, help="a directory")
    parser.add_argument("--needs", action="store_true", help="the model lies on the workers")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=read_environment().log, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        _run(parsed.url, parsed.every, parsed.left, parsed.needs)
    except (ShoalError, KeyboardInterrupt) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
