"""The honest floor: a plain Python server over a socket and NumPy.

It knows a fixed array and a dense vector. It has no keys, no optimizer for rows, no retries and no security.
Rows are gathered into a reused buffer and sent by one call; requests go out in one system call. `pipelined`
gathers and sends in pieces that stay in the cache, so that gathering overlaps with the reader's copying:
more than plain, and shown beside it.
"""

import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from bench.contender import LR, Keys, Rows, Spec, first_rows
from bench.processes import Child, children

_HEADER = struct.Struct("<qq")  # operation, count
_PULL, _DENSE = 1, 2
_REQUEST_IDS_MAX = 1 << 18
_PIPELINED_BYTES = 1 << 20
_BUFFER_BYTES = 4 << 20
_ANSWER_S_MAX = 60


@dataclass(frozen=True)
class Sockets:
    lane: str  # "unix" or "tcp"
    pipelined: bool = False

    abilities = frozenset({"pull", "dense"})
    environment: ClassVar[dict[str, str]] = {}

    @property
    def name(self) -> str:
        return f"sockets+numpy {self.lane}{' pipelined' if self.pipelined else ''}"

    def missing(self) -> str | None:
        return None

    @contextmanager
    def serve(self, spec: Spec) -> Iterator[str | int]:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            path = str(Path(folder) / "floor") if self.lane == "unix" else None
            with children([lambda: Child(f"{self.name} server", _Server, spec, path, self.pipelined)]) as [
                server
            ]:
                yield server.call(_Server.listen)

    def connect(self, address: str | int, spec: Spec, rank: int) -> "_Store":
        return _Store(_connected(address), spec)


class _Server:
    """One thread per connection; NumPy and the socket calls release the GIL."""

    def __init__(self, spec: Spec, path: str | None, pipelined: bool) -> None:
        self._table = first_rows(np.arange(spec.rows), spec.dim)
        self._piece = _PIPELINED_BYTES // (4 * spec.dim) if pipelined else _REQUEST_IDS_MAX
        self._weight = np.zeros(spec.dense_elements, np.float32)
        self._listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self._listener.bind(path or ("127.0.0.1", 0))

    def listen(self) -> str | int:
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        name = self._listener.getsockname()
        return name if isinstance(name, str) else int(name[1])

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            _tune(link)
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        keys = np.empty(_REQUEST_IDS_MAX, np.int64)
        rows = np.empty((self._piece if len(self._table) else 0, self._table.shape[1]), np.float32)
        grad, header = np.empty_like(self._weight), bytearray(_HEADER.size)
        with link:
            while _receive(link, header):
                operation, count = _HEADER.unpack(header)
                if operation == _PULL:
                    _receive(link, keys[:count])
                    self._answer(link, keys[:count], rows)
                else:
                    self._exchange(link, grad)

    def _answer(self, link: socket.socket, keys: Keys, rows: Rows) -> None:
        for begin in range(0, keys.size, len(rows)):
            part = keys[begin : begin + len(rows)]
            # mode="clip" lets NumPy write straight into `out`; "raise" goes through a copy.
            np.take(self._table, part, axis=0, out=rows[: part.size], mode="clip")
            link.sendall(rows[: part.size])

    def _exchange(self, link: socket.socket, grad: Rows) -> None:
        _receive(link, grad)
        grad *= np.float32(LR)
        self._weight -= grad
        link.sendall(self._weight)


class _Store:
    def __init__(self, link: socket.socket, spec: Spec) -> None:
        self._link = link
        self._rows = np.empty((_REQUEST_IDS_MAX if spec.rows else 0, spec.dim), np.float32)
        self._weight = np.empty(spec.dense_elements, np.float32)

    def pull(self, keys: Keys) -> Rows:
        _send(self._link, _HEADER.pack(_PULL, keys.size), keys)
        return _received(self._link, self._rows[: keys.size])

    def push(self, keys: Keys, grads: Rows) -> None:
        raise NotImplementedError("the floor has no optimizer for rows")

    def exchange_dense(self, grad: Rows) -> Rows:
        _send(self._link, _HEADER.pack(_DENSE, grad.size), grad)
        return _received(self._link, self._weight)

    def close(self) -> None:
        self._link.close()


def _connected(address: str | int) -> socket.socket:
    unix = isinstance(address, str)
    link = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    link.connect(address if unix else ("127.0.0.1", address))
    _tune(link)
    # The kernel's own deadline; Python's settimeout would add a poll to every call.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _ANSWER_S_MAX, 0))
    return link


def _tune(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    if link.family == socket.AF_INET:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(link: socket.socket, header: bytes, array: Keys | Rows) -> None:
    view = memoryview(array).cast("B")
    sent = link.sendmsg([header, view]) - len(header)
    if sent < len(view):
        link.sendall(view[max(0, sent) :])


def _received(link: socket.socket, into: Rows) -> Rows:
    if not _receive(link, into):
        raise ConnectionError("the server closed the connection in the middle of an answer")
    return into


def _receive(link: socket.socket, into: bytearray | Keys | Rows) -> bool:
    """Fills `into`; False where the other side has closed."""
    view = memoryview(into).cast("B")
    while view:
        count = link.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True
