"""Control connections: the handshake, its refusals, and deadlines, over real sockets in one process."""

import asyncio
import logging
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal.config import CoordinatorOptions
from shoal.errors import BadInput, Refused, Timeout, Unavailable
from shoal.fleet.coordinator_server import CoordinatorServer
from shoal.fleet.sqlite_journal import SqliteJournal
from shoal.store import messages as m
from shoal.store.control import Address, ControlClient
from shoal.store.proof import prove

TOKEN = "the-token-of-these-tests"
OPTIONS = CoordinatorOptions(servers=1, shards=8, handshake_s=0.5, connections_max=8)


class Coordinator:
    """A coordinator on a thread of this process."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = Address(*self._listener.getsockname())
        self._journal_path = directory / "journal.db"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._started.wait(10)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        with closing(SqliteJournal(self._journal_path)) as journal:
            self._server = CoordinatorServer(OPTIONS, TOKEN)
            self._server.lead(journal, list(journal), lambda why: self._server.stop.set())
            self._started.set()
            await self._server.serve(self._listener)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.stop.set)
        self._thread.join(10)

    def client(self, token: str = TOKEN) -> ControlClient:
        return ControlClient(self.address, token)

    def raw(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=5)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with closing(Coordinator(tmp_path)) as coordinator:
        yield coordinator


class Counting(CoordinatorServer):
    """One that counts how often its clock has rung."""

    rung = 0

    def _tick(self) -> None:
        self.rung += 1
        super()._tick()


def test_its_clock_rings_however_many_messages_come(tmp_path: Path) -> None:
    async def run() -> int:
        server = Counting(OPTIONS, TOKEN)
        with closing(SqliteJournal(tmp_path / "journal.db")) as journal:
            server.lead(journal, list(journal), lambda why: None)
            assert server._coordinator is not None
            server._coordinator.handle(1, m.JoinCluster(name=None, wait_s=0.0), server._now())
            for _ in range(100):  # as often as its loop turns
                server._set_timer()
                await asyncio.sleep(0)
            server.stand_by()
        return server.rung

    assert asyncio.run(run()) == 1


def alive(coordinator: Coordinator) -> bool:
    with closing(coordinator.client()) as client:
        return client.ask(m.GetCluster(), m.ClusterInfo, 5) == m.ClusterInfo(shards=8, servers=1)


def closed_by_peer(sock: socket.socket) -> bool:
    """Whether the other end closes within its deadline, whatever it says before."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_the_right_token_is_welcome(coordinator: Coordinator) -> None:
    assert alive(coordinator)


def test_a_wrong_token_is_refused_and_logged(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(coordinator.client("wrong")) as client, pytest.raises(Refused, match="wrong token"):
        client.ask(m.GetCluster(), m.ClusterInfo, 5)
    assert "wrong token" in caplog.text
    assert alive(coordinator)


GARBAGE = {
    "random bytes": os.urandom(64),
    "a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an oversized frame": struct.pack("<I", 1 << 31),
    "above the limit of a handshake": struct.pack("<I", 513),
    "an empty frame": struct.pack("<I", 0),
    "not msgpack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "a deep list": struct.pack("<I", 400) + b"\x91" * 400,
    "a pickle": struct.pack("<I", len(pickle.dumps(os.getcwd))) + pickle.dumps(os.getcwd),
    "a request before the handshake": m.encode(m.GetStatus()),
    "another version": m.encode(m.Hello(version=99, nonce=bytes(32))),
    "a short nonce": m.encode(m.Hello(version=m.VERSION, nonce=b"x")),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_that_connection_only(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with closing(coordinator.client()) as other, coordinator.raw() as sock:
        other.ask(m.GetCluster(), m.ClusterInfo, 5)
        sock.sendall(GARBAGE[name])
        assert closed_by_peer(sock)
        assert other.ask(m.GetCluster(), m.ClusterInfo, 5).shards == 8
    assert "refused" in caplog.text


def test_a_silent_connection_is_closed_by_the_deadline(coordinator: Coordinator) -> None:
    with coordinator.raw() as sock:
        sock.sendall(b"\x10")
        assert closed_by_peer(sock)


def test_garbage_after_the_handshake_is_refused_too(coordinator: Coordinator) -> None:
    with closing(coordinator.client()) as client:
        client.ask(m.GetCluster(), m.ClusterInfo, 5)
        raw = socket.socket(fileno=os.dup(client.fileno()))
        with raw:
            raw.settimeout(5)
            raw.sendall(struct.pack("<I", (1 << 20) + 1))
            assert closed_by_peer(raw)
    assert alive(coordinator)


def test_a_reply_is_not_a_request(coordinator: Coordinator) -> None:
    with closing(coordinator.client()) as client, pytest.raises(Refused, match="Done is not a request"):
        client.ask(m.Done(), m.Done, 5)  # type: ignore[arg-type]


def test_too_many_connections_are_refused_and_room_is_found_again(coordinator: Coordinator) -> None:
    socks = [coordinator.raw() for _ in range(9)]
    assert closed_by_peer(socks[8])
    for sock in socks:
        sock.close()
    assert alive(coordinator)


def test_a_late_answer_is_a_timeout_that_says_what_was_asked(coordinator: Coordinator) -> None:
    with closing(coordinator.client()) as client:
        with pytest.raises(Timeout, match=r"did not answer JoinCluster within 0\.2 s"):
            client.ask(m.JoinCluster(name=None, wait_s=60), m.ClientGrant, 0.2)
        assert client.ask(m.GetCluster(), m.ClusterInfo, 5).shards == 8


def test_the_coordinators_own_deadline_says_who_is_missing(coordinator: Coordinator) -> None:
    with closing(coordinator.client()) as client, pytest.raises(Timeout, match=r"servers \[0\] of 1"):
        client.ask(m.JoinCluster(name=None, wait_s=0.1), m.ClientGrant, 5)


def test_nobody_there_is_unavailable_after_the_patience() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
    began = time.monotonic()
    with closing(ControlClient(address, TOKEN)) as client, pytest.raises(Unavailable, match=str(address)):
        client.ask(m.GetCluster(), m.ClusterInfo, 30, patience_s=0.1)
    assert time.monotonic() - began < 10


def test_one_who_never_answers_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
        with closing(ControlClient(address, TOKEN)) as client, pytest.raises(Timeout):
            client.ask(m.GetCluster(), m.ClusterInfo, 0.2)


def test_another_kind_of_server_is_refused() -> None:
    def answer(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(100)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with (
            closing(ControlClient(Address(*listener.getsockname()), TOKEN)) as client,
            pytest.raises(Refused),
        ):
            client.ask(m.GetCluster(), m.ClusterInfo, 5)
        thread.join()


def test_a_coordinator_without_the_token_is_not_believed() -> None:
    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(m.encode(m.Challenge(nonce=bytes(32))))
            sock.recv(4096)
            sock.sendall(m.encode(m.Welcome(mac=bytes(32))))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        client = ControlClient(Address(*listener.getsockname()), TOKEN)
        with closing(client), pytest.raises(Refused, match="does not have this token"):
            client.ask(m.GetCluster(), m.ClusterInfo, 5)
        thread.join()


def test_proofs_of_the_two_sides_differ() -> None:
    nonces = bytes(32), bytes(range(32))
    assert prove(TOKEN, "client", *nonces) != prove(TOKEN, "coordinator", *nonces)


def test_a_restarted_coordinator_is_found_again_with_its_state(tmp_path: Path) -> None:
    first = Coordinator(tmp_path)
    server = m.RegisterServer(identity="s", pid=1, host="h", port=5, unix_path="", shards=8)
    with closing(ControlClient(first.address, TOKEN)) as client:
        client.ask(server, m.ServerAdmitted, 5)
        before = client.ask(m.JoinCluster(name="w", wait_s=1), m.ClientGrant, 5)
        first.close()
        with closing(Coordinator(tmp_path, first.address.port)):
            after = client.ask(m.JoinCluster(name="w", wait_s=1), m.ClientGrant, 10)
    assert (after.client_id, after.incarnation) == (before.client_id, before.incarnation + 1)
    assert after.placement.chains == before.placement.chains
    assert after.placement.version == before.placement.version


def test_many_threads_share_a_connection(coordinator: Coordinator) -> None:
    answers: list[int] = []
    with closing(coordinator.client()) as client:
        ask = lambda: answers.append(client.ask(m.GetCluster(), m.ClusterInfo, 5).shards)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [8] * 8


@pytest.mark.parametrize("text", ["h:1", "shoal://h:1", "shoal://[::1]:65535", "shoal://a.b-c.example:7700"])
def test_addresses_are_read_and_written_alike(text: str) -> None:
    assert str(Address.parse(text)).removeprefix("shoal://") == text.removeprefix("shoal://")


@pytest.mark.parametrize(
    "text", ["", "h", "h:", ":1", "h:0", "h:65536", "h:x", "a:b:1", "[::1]", "u@h:1", "h/p:1", "h:\u0661"]
)
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="allowed: 'shoal://host:port'"):
        Address.parse(text)


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "shoal.coordinator")
