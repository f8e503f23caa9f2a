"""Where a client's pulse goes if there are several coordinators: to the one that leads.

The core has one place for its pulse, a thread that never needs the GIL. With several coordinators that place
is a socket of this process, and this thread passes the bytes on. (So it does need the GIL, once in half a
second.) A leader answers each beat; one that does not, or closes, is left for the next.
"""

from __future__ import annotations

import select
import socket
import threading
import time
import weakref
from contextlib import suppress

from shoal.store.control import Address, keep_alive

__all__ = ["PulseRelay"]

_HELLO_BYTES = 48
_NONCE_BYTES = 32
_CONNECT_S = 1.0
# Four beats.
_SILENCE_S = 2.0
_BYTES = 4096


class PulseRelay:
    """From `address` here to whichever of `coordinators` leads, until `close`."""

    def __init__(self, coordinators: Address) -> None:
        self._places = list(coordinators.all)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname()[:2])
        self.close = weakref.finalize(self, _close, self._listener)
        run = threading.Thread(
            target=_run, args=(self._listener, self._places), name="shoal-pulse-relay", daemon=True
        )
        run.start()


def _close(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    listener.close()


def _run(listener: socket.socket, places: list[Address]) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        with near:
            near.settimeout(_CONNECT_S)
            with suppress(OSError):
                hello = near.recv(_HELLO_BYTES, socket.MSG_WAITALL)
                far = _reach(places, hello)
                if far is not None:
                    with far:
                        _pass_on(near, far)


def _reach(places: list[Address], hello: bytes) -> socket.socket | None:
    """A connection to the one that leads, which has heard `hello`; it is the first of `places` then."""
    for _ in range(len(places)):
        try:
            far = socket.create_connection((places[0].host, places[0].port), timeout=_CONNECT_S)
            try:
                keep_alive(far)
                far.sendall(hello)
                # Only a leader answers that, by a nonce; it stays to be read.
                if len(far.recv(_NONCE_BYTES, socket.MSG_PEEK | socket.MSG_WAITALL)) == _NONCE_BYTES:
                    return far
            except BaseException:
                far.close()
                raise
            far.close()
        except OSError:
            pass
        places.append(places.pop(0))
    return None


def _pass_on(near: socket.socket, far: socket.socket) -> None:
    heard = time.monotonic()
    while time.monotonic() < heard + _SILENCE_S:
        ready, _, _ = select.select([near, far], [], [], _SILENCE_S / 4)
        for one in ready:
            data = one.recv(_BYTES)
            if not data:
                return
            (far if one is near else near).sendall(data)
            if one is far:
                heard = time.monotonic()
