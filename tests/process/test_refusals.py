"""Strangers at the door: whatever they say, their connection is refused and logged, and all others go on.

Raw sockets against a real server (tcp and unix) and a real coordinator, beside a client that works all the
time and counts exactly.
"""

import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import _core
from shoal.errors import BadInput, Refused
from shoal.fleet.token import check_bind, generate, write_token_file
from shoal.store import messages as m
from shoal.store.proof import prove

pytestmark = pytest.mark.process
TARGETS = ("server", "unix", "coordinator")
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "") or "tsan" in os.environ.get("LD_PRELOAD", "")
MAGIC, VERSION, HELLO, PULL = 0x4C414F48, 1, 1, 14


class Bystander:
    """A client that pushes without end to a row of its own, by a thread."""

    def __init__(self, cluster: shoal.LocalCluster) -> None:
        self._client = cluster.connect()
        self._table = self._client.table("bystander", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        self._before = self._table.pull([0])[0, 0]
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work)
        self.pushed = 0
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._stop.wait(0.001):
                self._table.push([0], -np.ones((1, 1), np.float32))
                self.pushed += 1
        except shoal.ShoalError as error:
            self._error = error

    def goes_on(self) -> bool:
        """Whether it gets something done from here on."""
        before = self.pushed
        return wait_until(lambda: self.pushed > before + 5 or self._error is not None) and self._error is None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        assert self._error is None
        assert self._table.pull([0])[0, 0] - self._before == self.pushed
        self._client.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    with shoal.LocalCluster() as cluster:
        yield cluster


@pytest.fixture
def bystander(cluster: shoal.LocalCluster) -> Iterator[Bystander]:
    bystander = Bystander(cluster)
    try:
        yield bystander
    finally:
        bystander.close()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def dial(cluster: shoal.LocalCluster, target: str) -> socket.socket:
    if target == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(next(cluster.directory.glob("*.sock"))))
    else:
        address = cluster.address if target == "coordinator" else cluster.servers[0].address
        host, _, port = address.removeprefix("shoal://").rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(20)
    return sock


def log_of(cluster: shoal.LocalCluster, target: str) -> str:
    name = "coordinator.log" if target == "coordinator" else "server-0.log"
    return (cluster.directory / name).read_text()


@contextmanager
def logged_refusal(cluster: shoal.LocalCluster, target: str) -> Iterator[None]:
    before = log_of(cluster, target).count("refused")
    yield
    assert wait_until(lambda: log_of(cluster, target).count("refused") > before)


def is_closed(sock: socket.socket) -> bool:
    """Reads to the end, which must come by itself."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def frame(
    kind: int = HELLO, version: int = VERSION, body: bytes = b"", body_bytes: int | None = None
) -> bytes:
    """A frame with a right checksum, whatever it says."""
    announced = len(body) if body_bytes is None else body_bytes
    head = struct.pack(
        "<IHHIIQIIQQQQQQII", MAGIC, version, kind, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, announced, 0, 0
    )
    head = head.ljust(124, b"\0")
    return head + struct.pack("<I", crc32c(head + bytes(4))) + body


def control(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


def strangers(path: Path) -> dict[str, dict[str, bytes]]:
    """What is sent, by the name of the case, to servers and to the coordinator."""
    noise = random.Random(1).randbytes(5000)
    web = b"GET / HTTP/1.1\r\nHost: shoal\r\n\r\n".ljust(300)
    trap = pickle.dumps(Trap(path)).ljust(300, b".")
    hello = m.Hello(version=m.VERSION + 1, nonce=bytes(32))
    return {
        "garbage": {"server": noise, "coordinator": noise},
        "http": {"server": web, "coordinator": web},
        "pickle": {"server": trap, "coordinator": trap},
        "pickle in a frame": {"server": frame(body=trap), "coordinator": control(trap)},
        "pickle as the greeting": {"server": frame(body=trap[:200]) * 2, "coordinator": control(trap[:200])},
        "oversized": {"server": frame(body_bytes=1 << 40), "coordinator": b"\xff\xff\xff\x7f" + noise},
        "version": {"server": frame(version=2, body=bytes(64)), "coordinator": m.encode(hello)},
        "request first": {"server": frame(kind=PULL), "coordinator": m.encode(m.GetStatus())},
        "bad checksum": {"server": frame()[:-1] + b"\0", "coordinator": control(b"\xc1" * 100)},
    }


@pytest.mark.parametrize("case", sorted(strangers(Path())))
def test_a_stranger_is_refused_and_logged(cluster, bystander, target, case, tmp_path) -> None:
    trap = tmp_path / "was unpickled"
    bytes_sent = strangers(trap)[case]["coordinator" if target == "coordinator" else "server"]
    with logged_refusal(cluster, target), dial(cluster, target) as sock:
        sock.sendall(bytes_sent)
        assert is_closed(sock)
    assert bystander.goes_on()
    assert not trap.exists()


def test_a_wrong_token_is_refused_and_logged(cluster, bystander, target) -> None:
    with logged_refusal(cluster, target), dial(cluster, target) as sock:
        if target == "coordinator":
            with pytest.raises(Refused, match="wrong token"):
                shoal.connect(cluster.address, token="not the token")
            sock.close()
        else:
            assert b"the token is wrong" in greet(sock, "not the token")
            assert is_closed(sock)
    assert bystander.goes_on()


def greet(sock: socket.socket, token: str) -> bytes:
    """The handshake with a server; gives its last answer."""
    talk = _core.protocol.Client(99, int(time.monotonic() * 1000), 1, [0])
    sock.sendall(talk.hello())
    challenge = sock.recv(4096)
    sock.sendall(talk.proof(token.encode(), challenge))
    return sock.recv(4096)


def test_the_token_is_never_sent(cluster: shoal.LocalCluster) -> None:
    talk = _core.protocol.Client(99, 1, 1, [0])
    sent = talk.hello() + talk.proof(cluster.token.encode(), bytes(200))
    assert cluster.token.encode() not in sent
    proof = prove(cluster.token, "client", bytes(32), bytes(32))
    assert cluster.token.encode() not in proof


def test_a_frame_cut_short_harms_nobody(cluster, bystander, target) -> None:
    whole = m.encode(m.Hello(version=m.VERSION, nonce=bytes(32)))
    whole = whole if target == "coordinator" else frame(body=bytes(64))
    for length in range(0, len(whole), 7):
        with dial(cluster, target) as sock:
            sock.sendall(whole[:length])
            sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
    assert bystander.goes_on()


@pytest.mark.parametrize("target", ["server", "unix"])
def test_an_oversized_frame_after_the_proof_is_refused(cluster, bystander, target) -> None:
    with logged_refusal(cluster, target), dial(cluster, target) as sock:
        greet(sock, cluster.token)
        sock.sendall(frame(kind=PULL, body_bytes=(1 << 30) + 1))
        assert is_closed(sock)
    assert bystander.goes_on()


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def test_a_large_body_costs_nothing_before_it_comes(cluster, bystander) -> None:
    before = rss_mb(cluster.servers[0].pid)
    with ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(dial(cluster, "server"))
            greet(sock, cluster.token)
            sock.sendall(frame(kind=PULL, body=bytes(1000), body_bytes=1 << 30))
        assert bystander.goes_on()
        assert SANITIZED or rss_mb(cluster.servers[0].pid) - before < 50


def test_those_who_say_too_little_too_slowly_are_dropped(cluster, bystander) -> None:
    """A byte now and then keeps nobody in: the deadline is for the whole handshake."""
    greetings = {target: frame(body=bytes(64)) for target in ("server", "unix")}
    greetings["coordinator"] = m.encode(m.Hello(version=m.VERSION, nonce=bytes(32)))
    with ExitStack() as stack:
        socks = {target: stack.enter_context(dial(cluster, target)) for target in TARGETS}
        silent = [stack.enter_context(dial(cluster, target)) for target in TARGETS]
        began, at = time.monotonic(), 0
        gone: set[str] = set()
        while len(gone) < len(TARGETS) and time.monotonic() - began < 20:
            for target in set(TARGETS) - gone:
                try:
                    socks[target].sendall(greetings[target][at % 40 : at % 40 + 1])
                except OSError:
                    gone.add(target)
            at += 1
            time.sleep(0.1)
        assert gone == set(TARGETS)
        assert all(is_closed(sock) for sock in silent)
    assert bystander.goes_on()


@pytest.mark.parametrize("target", TARGETS)
def test_a_flood_of_connections_keeps_nobody_out(cluster, bystander, target) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(cluster, target)) for _ in range(200)]
        for sock in socks[::2]:
            with suppress(ConnectionError):  # pushed out by those who came later
                sock.sendall(b"\xff" * 300)
        assert bystander.goes_on()
        with cluster.connect(timeout=20) as client:
            assert client.table("bystander").pull([0]).shape == (1, 1)
        assert all(is_closed(sock) for sock in socks[::2])
    assert bystander.goes_on()


def test_strangers_push_each_other_out_and_nobody_else(cluster, bystander) -> None:
    with ExitStack() as stack:
        began = time.monotonic()
        socks = [stack.enter_context(dial(cluster, "server")) for _ in range(400)]
        assert is_closed(socks[0])
        assert time.monotonic() - began < 4.0, "its time to prove itself was over"
        assert bystander.goes_on()
        with cluster.connect(timeout=20) as client:
            assert client.table("bystander").pull([0]).shape == (1, 1)


@pytest.mark.skipif(SANITIZED, reason="a sanitizer keeps freed memory")
def test_refused_connections_leave_no_memory_and_no_descriptors(cluster, bystander) -> None:
    pids = [cluster.pid, cluster.servers[0].pid]
    sent = [case[kind] for case in strangers(Path("x")).values() for kind in ("server", "coordinator")]

    def attack(rounds: int) -> None:
        for number in range(rounds * len(sent)):
            with dial(cluster, TARGETS[number % 3]) as sock:
                sock.sendall(sent[number % len(sent)])
                sock.shutdown(socket.SHUT_WR)
                assert is_closed(sock)

    attack(3)
    memory, files = [rss_mb(pid) for pid in pids], [open_files(pid) for pid in pids]
    attack(12)
    assert [rss_mb(pid) - before < 5 for pid, before in zip(pids, memory, strict=True)] == [True, True]
    assert wait_until(lambda: all(open_files(pid) <= n for pid, n in zip(pids, files, strict=True)))


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_connection_left_half_open_harms_nobody(cluster, bystander, target) -> None:
    with dial(cluster, target) as sock:
        if target == "coordinator":
            sock.sendall(m.encode(m.Hello(version=m.VERSION, nonce=bytes(32))))
            sock.recv(4096)
        else:
            greet(sock, cluster.token)
            sock.sendall(frame(kind=PULL, body=bytes(64), body_bytes=4096))
        assert bystander.goes_on()
        # Ends with a reset, as the connection of a process that died.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert bystander.goes_on()


def test_a_token_file_is_for_its_owner_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        write_token_file(tmp_path / "token", generate())
    finally:
        os.umask(umask)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BadInput, match="exists"):
        write_token_file(tmp_path / "token", generate())


def test_the_socket_file_is_for_its_owner_only(cluster: shoal.LocalCluster) -> None:
    assert next(cluster.directory.glob("*.sock")).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
def test_a_public_bind_needs_a_token(host: str) -> None:
    with pytest.raises(BadInput, match="without a token"):
        check_bind(host, None)
    with pytest.raises(BadInput, match="at least 16"):
        check_bind(host, "short")
    check_bind(host, generate())


@pytest.mark.parametrize("role", ["coordinator", "server"])
def test_a_process_without_a_token_does_not_start(role: str, tmp_path: Path) -> None:
    where = ["--journal", str(tmp_path / "j")] if role == "coordinator" else ["--join", "127.0.0.1:1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    ended = subprocess.run(
        [sys.executable, "-m", f"shoal.fleet.{role}_process", "--host", "0.0.0.0", *where],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "token" in ended.stderr
