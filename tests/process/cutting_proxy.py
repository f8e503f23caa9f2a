"""A proxy between client and server that cuts connections at the worst moments, chosen by a seed.

It forwards bytes (and, on a unix socket, descriptors) both ways and follows the frames just far enough to
know where one ends. Each connection is cut once, in one of three ways, until `cuts` of them were made:

1. swallow: a reply has come, so the server has applied; the client never hears it;
2. tear_request: the server gets half of a request;
3. tear_reply: the client gets half of a reply.

The greeting always passes. One thread, from `with` to the end of the block.
"""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

_BODY_BYTES_AT, _PARTS_AT, _KIND_AT = 72, 84, 6  # of wire/frame.h
_HEADER_BYTES, _PART_BYTES = 128, 64
_GREETINGS = (1, 2, 3, 4)
_REPLY = 32
_READ_BYTES = 1 << 18
_DESCRIPTORS_MAX = 16
WAYS = ("swallow", "tear_request", "tear_reply")


class FrameCounter:
    """Follows a byte stream: `feed` gives (kind, end) for each frame that ends in the new bytes."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int]]:
        before = len(self._held)
        self._held += data
        ends, at = [], 0
        while len(self._held) - at >= _HEADER_BYTES:
            (kind,) = struct.unpack_from("<H", self._held, at + _KIND_AT)
            (body,) = struct.unpack_from("<Q", self._held, at + _BODY_BYTES_AT)
            (parts,) = struct.unpack_from("<I", self._held, at + _PARTS_AT)
            size = _HEADER_BYTES + _PART_BYTES * parts + body
            if len(self._held) - at < size:
                break
            at += size
            ends.append((kind, at - before))
        del self._held[:at]
        return ends


@dataclass(eq=False)
class _Pair:
    """One connection through the proxy, with how and when it will be cut."""

    client: socket.socket
    server: socket.socket
    way: str | None
    frames_left: int
    counters: dict[socket.socket, FrameCounter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counters = {self.client: FrameCounter(), self.server: FrameCounter()}


class CuttingProxy:
    """Listens where `address` says (a port, or a path for unix sockets) in front of `target`."""

    def __init__(
        self, target: tuple[str, int] | str, *, seed: int, cuts: int, path: str | None = None
    ) -> None:
        self._target = target
        self._family = socket.AF_UNIX if isinstance(target, str) else socket.AF_INET
        self._rng = random.Random(seed)
        self._cuts_left = cuts
        self.ways: tuple[str, ...] = WAYS  # those that are taken
        self.cuts = dict.fromkeys(WAYS, 0)
        self._listener = socket.socket(self._family, socket.SOCK_STREAM)
        self._listener.bind(("127.0.0.1", 0) if path is None else path)
        self._listener.listen(64)
        self.address = self._listener.getsockname()
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="cutting-proxy", daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop all connections, and take no more. Twice is harmless."""
        if self._stop.fileno() < 0:
            return
        self._stop.send(b"x")
        self._thread.join(10)
        assert not self._thread.is_alive()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._stop.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj.fileno() >= 0:  # type: ignore[union-attr]
                    self._forward(key.data, key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(self._family, socket.SOCK_STREAM)
        server.connect(self._target)
        way = self._rng.choice(self.ways) if self._cuts_left > 0 else None
        self._cuts_left -= 1
        pair = _Pair(client, server, way, self._rng.randint(1, 8))
        for end in (client, server):
            self._selector.register(end, selectors.EVENT_READ, pair)

    def _forward(self, pair: _Pair, source: socket.socket) -> None:
        try:
            if self._family == socket.AF_UNIX:
                data, descriptors, _, _ = socket.recv_fds(source, _READ_BYTES, _DESCRIPTORS_MAX)
            else:
                data, descriptors = source.recv(_READ_BYTES), []
            if not data:
                raise ConnectionError
            part, cut = self._judge(pair, source, data)
            self._send(pair.server if source is pair.client else pair.client, part, descriptors)
        except OSError:
            cut = True
        if cut:
            self._close(pair)

    def _send(self, to: socket.socket, data: bytes, descriptors: list[int]) -> None:
        try:
            if descriptors and data:
                data = data[socket.send_fds(to, [data], descriptors) :]
            to.sendall(data)
        finally:
            for descriptor in descriptors:
                socket.close(descriptor)

    def _judge(self, pair: _Pair, source: socket.socket, data: bytes) -> tuple[bytes, bool]:
        """What of `data` goes on, and whether the connection then ends."""
        ends = pair.counters[source].feed(data)
        requests = source is pair.client
        if pair.way is None or requests != (pair.way == "tear_request"):
            return data, False
        start = 0
        for kind, end in ends:
            if kind not in _GREETINGS:
                pair.frames_left -= 1
                if pair.frames_left == 0:
                    self.cuts[pair.way] += 1
                    keep = start if pair.way == "swallow" else (start + end) // 2
                    return data[:keep], True
            start = end
        return data, False

    def _close(self, pair: _Pair) -> None:
        for end in (pair.client, pair.server):
            with suppress(KeyError, ValueError):
                self._selector.unregister(end)
            with suppress(OSError):
                end.close()
