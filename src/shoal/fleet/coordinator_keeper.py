"""The coordinators of a cluster on this machine: whatever ends one, it is started again.

Their listening sockets stay open here. So an address stays what it was, and who connects while nobody is
there waits a moment instead of being refused. One that ends by itself as soon as it is started, again and
again, as with a damaged journal, is given up, and its socket closed. One that stands still by a signal is
killed after a few seconds: its connections stay open, so that whoever asks it would wait in vain.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from shoal.fleet.child import Child, close_stdin, stands_still, stop_children

_log = logging.getLogger("shoal.cluster")
_YOUNG_S = 5.0
_FAILURES_MAX = 5
_JOIN_S = 10.0
# So many looks, one a second at most, find it standing still before it is killed. Where they are farther
# apart than that, whoever looks has slept, too: all may have been stopped, and wake together.
_STILL_LOOKS, _LOOK_EVERY_S, _SLEPT_S = 6, 1.0, 5.0


class CoordinatorKeeper:
    """One process for each listening socket. `start(index, descriptor)` starts one."""

    def __init__(self, start: Callable[[int, int], Child], listeners: Sequence[socket.socket]) -> None:
        self._start = start
        self._listeners = list(listeners)
        self._failures = [0] * len(listeners)
        self._still = [0] * len(listeners)
        self._looked_at = -math.inf
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._woken, self._wake = socket.socketpair()
        self.children = [start(index, one.fileno()) for index, one in enumerate(listeners)]

    @property
    def pids(self) -> tuple[int, ...]:
        """Of their present processes."""
        return tuple(child.process.pid for child in self.children)

    def look(self) -> list[int]:
        """Start those again that have ended; which were."""
        with self._lock:
            if self._closed:
                return []
            return [index for index, child in enumerate(self.children) if self._again(index, child)]

    def kill_still(self, now: float) -> list[int]:
        """Kill those that have stood still by a signal for about five seconds; their pids. `look` starts them
        again. For who calls it at least every five seconds; more often than once a second costs nothing.
        """
        with self._lock:
            if self._closed or now < self._looked_at + _LOOK_EVERY_S:
                return []
            slept, self._looked_at = now > self._looked_at + _SLEPT_S, now
            return [
                child.process.pid
                for index, child in enumerate(self.children)
                if self._stood_still(index, child, slept=slept)
            ]

    def watch(self) -> None:
        """Look whenever one ends, and once a second for one that stands still, by a thread, until `close`."""
        self._thread = threading.Thread(target=self._run, name="shoal-coordinators", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End them all. Twice is harmless."""
        with self._lock:
            self._closed = True
        self._wake.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        stop_children(self.children, by_stdin=True)  # then what they keep elsewhere goes, too
        for listener in [*self._listeners, self._woken]:
            listener.close()

    def _again(self, index: int, child: Child) -> bool:
        code = child.process.poll()
        listener = self._listeners[index]
        if code is None or listener.fileno() == -1:
            return False
        failed = code > 0 and time.monotonic() - child.started < _YOUNG_S  # below 0: somebody killed it
        self._failures[index] = self._failures[index] + 1 if failed else 0
        why = f"the {child.role} (pid {child.process.pid}) has ended with code {code}"
        close_stdin(child)
        if self._failures[index] > _FAILURES_MAX:
            _log.error("%s, again and again, and is given up: %s", why, child.why_ended())
            listener.close()
            return False
        _log.warning("%s and is started again", why)
        self.children[index] = self._start(index, listener.fileno())
        return True

    def _stood_still(self, index: int, child: Child, *, slept: bool) -> bool:
        still = child.process.poll() is None and stands_still(child.process.pid)
        self._still[index] = (0 if slept else self._still[index]) + 1 if still else 0
        if self._still[index] < _STILL_LOOKS:
            return False
        self._still[index] = 0
        _log.warning("the %s (pid %d) stands still and is killed", child.role, child.process.pid)
        child.process.kill()
        return True

    def _run(self) -> None:
        while not self._closed:
            poller = select.poll()
            poller.register(self._woken.fileno(), select.POLLIN)
            with self._lock:  # what is reaped under it is replaced, or given up
                kept = [
                    pid for pid, one in zip(self.pids, self._listeners, strict=True) if one.fileno() != -1
                ]
                descriptors = [os.pidfd_open(pid) for pid in kept]
            for descriptor in descriptors:
                poller.register(descriptor, select.POLLIN)
            try:
                poller.poll(_LOOK_EVERY_S * 1000)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self.kill_still(time.monotonic())
            self.look()
