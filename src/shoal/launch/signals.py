"""Signals to the supervisor, as something that its loop asks for."""

from __future__ import annotations

import signal
import socket
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal came while the cluster was starting."""


class Signals:
    """Signals as numbers to be asked for. While `raising`, the first one interrupts what is going on."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self.raising = False
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            # nohup: the job is to outlive its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as it was given
        signal.set_wakeup_fd(self._wakeup)
        self.receiver.close()
        self._sender.close()

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = number
            if self.raising:
                raise Stopped
