"""The blocking control client: one connection to the coordinator, made when needed and made again.

Every request of `messages` may be repeated without harm, so a broken connection is answered by a new one
and the request sent again, until the deadline. Where there are several coordinators it goes to the one that
leads, and from one that does not answer to the next. Refusals are not repeated. Safe from many threads: one
request at a time.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shoal.config import TOKEN_SOURCES
from shoal.errors import BadInput, Internal, Refused, Timeout, Unavailable, from_code
from shoal.store.catalogue import TableEntry
from shoal.store.messages import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    VERSION,
    Challenge,
    Failure,
    Hello,
    ListTables,
    Message,
    NotLeader,
    Proof,
    Reply,
    Request,
    TablePage,
    Welcome,
    decode,
    encode,
)
from shoal.store.proof import NONCE_BYTES, prove

_RETRY_FIRST_S = 0.01
_RETRY_MAX_S = 0.25
_TELL_S = 5.0
# Where there are others to ask: one that does not answer within this, or this after it said that it would.
_ATTEMPT_S = 2.0

ReplyT = TypeVar("ReplyT", bound=Reply)


@dataclass(frozen=True)
class Address:
    """Where a coordinator listens, and where `others` of the same cluster do.

    >>> Address.parse("shoal://127.0.0.1:7700")
    Address(host='127.0.0.1', port=7700)
    >>> str(Address("::1", 7700))
    'shoal://[::1]:7700'
    >>> [one.port for one in Address.parse("shoal://a:7700,b:7701").all]
    [7700, 7701]
    """

    host: str
    port: int
    others: tuple[Address, ...] = field(default=(), repr=False)

    @staticmethod
    def parse(text: str) -> Address:
        """Read "shoal://host:port", also several with commas; "shoal://" may be left out."""
        first, *others = (_parse_one(text, one) for one in text.removeprefix("shoal://").split(","))
        return replace(first, others=tuple(others))

    @property
    def all(self) -> tuple[Address, ...]:
        """Each by itself."""
        return (replace(self, others=()), *self.others)

    def __str__(self) -> str:
        names = (f"[{one.host}]" if ":" in one.host else one.host for one in self.all)
        return "shoal://" + ",".join(f"{name}:{one.port}" for name, one in zip(names, self.all, strict=True))


def _parse_one(text: str, one: str) -> Address:
    host, colon, port = one.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    digits = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    if not colon or not digits or not host or any(c in host for c in "/@ []"):
        raise BadInput(f"address is {text!r}; allowed: 'shoal://host:port', as in 'shoal://127.0.0.1:7700'")
    return Address(host, int(port))


def keep_alive(sock: socket.socket) -> None:
    """Notice within about 15 s that the other host is gone; send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


class ControlClient:
    """Asks the coordinator at `address`. Nothing is opened before the first request."""

    def __init__(self, address: Address, token: str) -> None:
        self.address = address
        self.at = address.all[0]  # where it asks
        self._token = token
        self._lock = threading.Lock()
        self._swapping = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def ask(
        self, request: Request, reply: type[ReplyT], timeout_s: float, patience_s: float | None = None
    ) -> ReplyT:
        """The answer to `request`, of type `reply`; a Failure raises its error.

        A coordinator that refuses connections is tried again for `patience_s` (default: the deadline).
        That it stands by is an answer only to who asks for NotLeader.
        """
        began = time.monotonic()
        end = began + timeout_s
        patience_end = end if patience_s is None else min(end, began + patience_s)
        # The lock is held by requests that have a deadline themselves.
        if not self._lock.acquire(timeout=timeout_s):
            raise self._late(request, timeout_s)
        try:
            answer = self._ask(request, end, patience_end, timeout_s, follow=reply is not NotLeader)
        finally:
            self._lock.release()
            if self._closed:
                self._drop_unused()
        if isinstance(answer, Failure):
            raise from_code(answer.code, answer.message)
        if not isinstance(answer, reply):
            raise Internal(f"{self.address} answered a {type(request).__name__} by {type(answer).__name__}")
        return answer

    def another(self) -> ControlClient:
        """One more, to the same coordinator."""
        return ControlClient(self.address, self._token)

    def tell(self, report: Request) -> None:
        """Send what gets no answer. OSError: nobody hears it."""
        if self._socket is not None:
            _send(self._socket, report, time.monotonic() + _TELL_S)

    def hear(self) -> Message:
        """What was sent unasked. EOFError or OSError: the connection has ended."""
        if self._socket is None:
            raise EOFError("not connected")
        return _receive(self._socket, time.monotonic() + _TELL_S)

    def fileno(self) -> int:
        """The descriptor of the connection, or -1: readable without a request means that it ended."""
        return -1 if self._socket is None else self._socket.fileno()

    def drop(self) -> None:
        """Close the connection, which no other thread uses; the next request makes another."""
        with self._swapping:
            sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Close for good."""
        self._closed = True
        self.hang_up()
        self._drop_unused()

    def hang_up(self) -> None:
        """End the connection for whoever waits for something by it, and then drops it."""
        with self._swapping:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _drop_unused(self) -> None:
        """Whoever is in the middle of a request drops it: a closed descriptor may be another's by then."""
        if self._lock.acquire(blocking=False):
            self.drop()
            self._lock.release()

    def _ask(
        self, request: Request, end: float, patience_end: float, timeout_s: float, *, follow: bool
    ) -> Message:
        pause_s = _RETRY_FIRST_S
        while True:
            try:
                answer = self._try(request, end)
                if not follow or not isinstance(answer, NotLeader):
                    return answer
                why = f"{self.at} stands by" + (
                    "" if answer.leader else ", and nobody leads (see their etcd)"
                )
                patience_end = end  # somebody is there: another will lead soon
                self.drop()
                self._move_on(answer.leader)
            except TimeoutError:
                self.drop()
                why = f"{self.at} does not answer"
                self._move_on()
                if time.monotonic() + pause_s >= end:
                    raise self._late(request, timeout_s) from None
            except (OSError, EOFError) as error:
                self.drop()
                why = _reason(error)
                self._move_on()
            except BaseException:
                # A half-read answer must not be taken for the next one's.
                self.drop()
                raise
            if self._closed or time.monotonic() + pause_s >= patience_end:
                raise Unavailable(f"no coordinator answers at {self.address}: {why}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    def _try(self, request: Request, end: float) -> Message:
        if not self.address.others:
            sock = self._socket or self._keep(self._connect(end))  # may be closed by another thread
            _send(sock, request, end)
            return _receive(sock, end)
        sock = self._socket or self._keep(self._connect(min(end, time.monotonic() + _ATTEMPT_S)))
        end = min(end, time.monotonic() + getattr(request, "wait_s", 0.0) + _ATTEMPT_S)
        _send(sock, request, end)
        return _receive(sock, end)

    def _move_on(self, leader: str = "") -> None:
        """To the one that leads, or to the next."""
        places = self.address.all
        if leader and leader != str(self.at):
            self.at = Address.parse(leader)
        elif len(places) > 1 or self.at not in places:
            self.at = places[(places.index(self.at) + 1) % len(places) if self.at in places else 0]

    def _keep(self, sock: socket.socket) -> socket.socket:
        with self._swapping:
            if not self._closed:
                self._socket = sock
                return sock
        sock.close()
        raise EOFError("this connection was closed here")

    def _connect(self, end: float) -> socket.socket:
        try:
            sock = _dial(self.at.host, self.at.port, end)
        except socket.gaierror as error:
            if self.address.others:
                raise
            raise Unavailable(f"no host {self.at.host!r} ({self.at}): {error.strerror}") from None
        try:
            keep_alive(sock)
            self._handshake(sock, end)
        except BaseException:
            sock.close()
            raise
        return sock

    def _handshake(self, sock: socket.socket, end: float) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        _send(sock, Hello(version=VERSION, nonce=nonce), end)
        challenge = self._expect(_receive(sock, end), Challenge)
        _send(sock, Proof(mac=prove(self._token, "client", nonce, challenge.nonce)), end)
        welcome = self._expect(_receive(sock, end), Welcome, f". {TOKEN_SOURCES}")
        if not hmac.compare_digest(welcome.mac, prove(self._token, "coordinator", nonce, challenge.nonce)):
            raise Refused(f"{self.address} does not have this token: not the cluster that was meant")

    def _expect(self, message: Message, kind: type[_HandshakeT], advice: str = "") -> _HandshakeT:
        if isinstance(message, kind):
            return message
        if isinstance(message, Failure):
            raise Refused(f"{self.address}: {message.message}{advice}")
        raise Refused(f"{self.address} does not speak Shoal's control protocol")

    def _late(self, request: Request, timeout_s: float) -> Timeout:
        what = type(request).__name__
        return Timeout(f"the coordinator at {self.address} did not answer {what} within {timeout_s:g} s")


_HandshakeT = TypeVar("_HandshakeT", Challenge, Welcome)


def list_tables(control: ControlClient, timeout_s: float) -> list[TableEntry]:
    """All tables and tensors of the cluster."""
    entries: list[TableEntry] = []
    more = True
    while more:
        page = control.ask(ListTables(after=entries[-1].id if entries else 0), TablePage, timeout_s)
        entries += page.entries
        more = page.more
    return entries


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _dial(host: str, port: int, end: float) -> socket.socket:
    error: OSError | None = None
    for family, kind, protocol, _, address in _resolve(host, port, end):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(end))
            sock.connect(address)
        except OSError as failure:
            sock.close()
            error = failure
        else:
            return sock
    assert error is not None, "a name is resolved to an address, or not at all"
    raise error


def _resolve(host: str, port: int, end: float) -> list[Any]:
    """Its addresses. A name server is asked by a thread of its own, as no deadline can be given to it."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as failure:
            found.put(failure)

    threading.Thread(target=ask, name="shoal-resolve", daemon=True).start()
    try:
        answer = found.get(timeout=_left(end))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _send(sock: socket.socket, message: Message, end: float) -> None:
    sock.settimeout(_left(end))
    sock.sendall(encode(message))


def _receive(sock: socket.socket, end: float) -> Message:
    length = int.from_bytes(_exactly(sock, LENGTH_BYTES, end), "little")
    if length > FRAME_BYTES_MAX:
        raise Refused(f"the answer is no control message: {length} bytes announced")
    return decode(_exactly(sock, length, end))


def _exactly(sock: socket.socket, count: int, end: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        sock.settimeout(_left(end))
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return bytes(data)
