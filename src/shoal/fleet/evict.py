"""How a coordinator evicts a worker: by a client of its own, under the next life of the worker's name.

Servers fence the older life as soon as that client connects; it then takes the worker's leave at the sync
shard, which gives its units back and lets rounds close without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal.config import ClientOptions
from shoal.errors import BadInput, Fenced, ShoalError
from shoal.store.connect import client_of
from shoal.store.control import Address, ControlClient
from shoal.store.messages import ClientGrant
from shoal.store.rounds import Rounds, rank_of

_log = logging.getLogger("shoal.coordinator")
_TRY_S = 5.0
_PAUSE_S = 0.5


def evict_in_background(
    address: Address,
    token: str,
    name: str,
    grant: ClientGrant,
    wanted: Callable[[], bool],
    done: Callable[[], None],
) -> None:
    """Evict the worker of that name, whatever it takes, while it is `wanted`; then call `done`."""

    def run() -> None:
        pause = threading.Event()
        while wanted():
            try:
                _evict(address, token, name, grant)
                break
            except (Fenced, BadInput) as error:  # another has its place, or there is no such rank any more
                _log.info("%s needs no eviction: %s", name, error)
                break
            except ShoalError as error:
                _log.warning("%s could not be evicted yet: %s", name, error)
            pause.wait(_PAUSE_S)
        done()

    threading.Thread(target=run, name=f"shoal-evict-{name}", daemon=True).start()


def _evict(address: Address, token: str, name: str, grant: ClientGrant) -> None:
    rank = rank_of(name)
    assert rank is not None
    options = ClientOptions(timeout_s=_TRY_S)
    with client_of(ControlClient(address, token), token, name, options, grant) as here:
        Rounds(here, rank, rank + 1).leave(away=True)
    _log.warning("worker %d was evicted: its lease was over", rank)
