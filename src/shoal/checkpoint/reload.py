"""Shards that went with their servers, read again from the last checkpoint: a process beside the supervisor.

    python -m shoal.checkpoint.reload --url URL --lost 1,2 [--together]

It speaks to the coordinator of SHOAL_ADDRESS, and ends when other servers have the shards: with a line about
it on stdout, and code 0. Code 3: not now, such as while another server goes; it may be tried again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.client import differences
from shoal.checkpoint.manifest import Manifest, describe_time
from shoal.checkpoint.place import Place
from shoal.config import read_environment
from shoal.errors import BadInput, Refused, ShoalError, Timeout, Unavailable
from shoal.store.catalogue import TableEntry
from shoal.store.control import Address, ControlClient, list_tables
from shoal.store.messages import Done, ReloadStore

AGAIN = 3
_log = logging.getLogger("shoal.checkpoint")
_ASK_S = 30.0
_RELOAD_S = 3600.0
_SHOWN_MAX = 4


def reload(
    control: ControlClient, url: str, lost: Collection[int], together: bool
) -> tuple[Manifest, list[str]]:
    """Have the shards of those servers read from the newest checkpoint that is whole.

    Which one it was, and why newer ones were passed over.
    """
    place = Place(url)
    here = list_tables(control, _ASK_S)
    reasons: list[str] = []
    for name in reversed(manifest_.names(place)):
        try:
            manifest = manifest_.find(place, name)
            if problems := list(_problems(manifest, here)):
                raise Refused(f"checkpoint {name} is of another state: {'; '.join(problems)}")
            request = ReloadStore(
                lost=tuple(lost), url=url, name=name, together=together, wait_s=0.9 * _RELOAD_S
            )
            control.ask(request, Done, _RELOAD_S)
            return manifest, reasons
        except Refused as error:
            reasons.append(f"{name}: {error}")
            _log.warning("%s; trying the one before", reasons[-1])
    raise BadInput("; ".join(reasons) or f"there is no checkpoint at {url} yet")


def _problems(manifest: Manifest, here: Sequence[TableEntry]) -> Iterator[str]:
    """Why rows of this checkpoint cannot stand beside what is here."""
    there = {entry.name: entry for entry in manifest.tables}
    for entry in here:
        old = there.get(entry.name)
        # Rows that it does not have are born again; a tensor's first value is written only once.
        if entry.shape is not None and entry.written and (old is None or not old.written):
            yield f"it has no value of {entry.what}"
        elif old is not None and old.id != entry.id:
            yield f"{entry.what} has id {entry.id} here, {old.id} there"
        elif old is not None:
            yield from differences(entry, old)


def _said(manifest: Manifest, reasons: Sequence[str], lost: Collection[int], together: bool) -> str:
    what = "all shards are" if together else f"the shards of server {', '.join(map(str, lost))} are"
    clocks = f", the workers' clocks at {', '.join(map(str, manifest.clocks))}" if together else ""
    newer = "".join(f"; passed over: {reason}" for reason in reasons[:_SHOWN_MAX])
    return f"{what} back at checkpoint {manifest.name} of {describe_time(manifest)}{clocks}{newer}"


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(AGAIN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reload them; see above."""
    parser = argparse.ArgumentParser(prog="shoal.checkpoint.reload")
    parser.add_argument("--url", required=True)
    parser.add_argument("--lost", required=True, help="indexes of servers, with commas")
    parser.add_argument("--together", action="store_true", help="all shards go back")
    parsed = parser.parse_args(arguments)
    environment = read_environment()
    logging.basicConfig(level=environment.log, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    lost = [int(index) for index in parsed.lost.split(",")]
    token = environment.find_token()
    assert environment.address is not None
    assert token is not None
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with closing(ControlClient(Address.parse(environment.address), token)) as control:
            found, reasons = reload(control, parsed.url, lost, parsed.together)
            print(_said(found, reasons, lost, parsed.together))
    except ShoalError as error:
        print(error)
        return AGAIN if isinstance(error, Unavailable | Timeout) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
