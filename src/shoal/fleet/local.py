"""`LocalCluster`: a coordinator and servers as real processes on this machine.

The parent makes the listening socket, so the address is known and a port in use is noticed before anything
starts; coordinator and servers then start side by side. Each child watches its stdin, whose other end only
the parent holds: whatever way the parent ends, they end too. No global state: any number of clusters may
live in one process.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.config import SHARDS, CoordinatorOptions, ServerOptions, check_timeout, check_token
from shoal.errors import BadInput, Closed, Timeout, Unavailable
from shoal.fleet.process import ERROR, listen
from shoal.fleet.token import check_bind, generate, is_loopback, reachable_host, write_token_file
from shoal.store.client import Client
from shoal.store.connect import connect
from shoal.store.control import Address, ControlClient
from shoal.store.messages import Done, EvictServer, GetStatus, RemoveServer, StatusInfo

__all__ = ["LocalCluster", "ServerHandle"]

_START_S = 30.0
_STOP_S = 5.0
_POLL_S = 0.01
_LOG_CHARS_SHOWN = 2000


@dataclass(frozen=True)
class _Child:
    """One process that was started here."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise if it has ended: with the reason that it gave, or with the end of its log."""
        code = self.process.poll()
        if code is not None:
            text = self.log.read_text(errors="replace").strip()
            last = text.rpartition("\n")[2]
            said = last.startswith(ERROR)
            why = last.removeprefix(ERROR) if said else text[-_LOG_CHARS_SHOWN:] or "no output"
            raise Unavailable(f"the {self.role} ended with code {code} while starting: {why}")


@dataclass(frozen=True)
class ServerHandle:
    """One server of a `LocalCluster`. It keeps its index, also when it has died."""

    index: int
    pid: int
    address: str
    _process: subprocess.Popen[bytes]

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def __repr__(self) -> str:
        state = "up" if self.alive else f"ended with code {self._process.returncode}"
        return f"<Server {self.index}: pid={self.pid}, {self.address}, {state}>"


class LocalCluster:
    """A coordinator and `servers` server processes on this machine, until `close`.

    Ready when the constructor returns. `close` (or the end of the `with` block, or of this process) stops
    and reaps every process; servers that are killed are not restarted. Unless `directory` is given, what
    the cluster writes is in a private temporary directory that is removed. Only this machine can connect
    unless `bind` says otherwise, which needs an explicit `token`.

    Its attributes, for other processes and for looking at it:

    - `address`: "shoal://host:port", for `shoal.connect` and `shoal status`
    - `token`, and `token_file`, a file of mode 0600 that holds it
    - `servers[i]`: `.index`, `.pid`, `.address` ("host:port") and `.alive` of server i
    - `pid`: of the coordinator
    - `directory`: the logs `coordinator.log` and `server-i.log`, the journal and the token file

    >>> import shoal
    >>> with shoal.LocalCluster(servers=2) as cluster:  # doctest: +SKIP
    ...     client = cluster.connect()
    ...     items = client.table("items", dim=4, optimizer=shoal.optim.SGD(lr=0.1))
    ...     items.pull([1, 2, 3]).shape
    (3, 4)
    """

    def __init__(
        self,
        servers: int = 1,
        *,
        replicas: int = 0,
        port: int = 0,
        token: str | None = None,
        shards: int = SHARDS,
        threads: int = 0,
        directory: str | os.PathLike[str] | None = None,
        bind: str = "127.0.0.1",
        replication: str = "strong",
    ) -> None:
        if replication not in ("strong", "weak"):
            raise BadInput(f"replication is {replication!r}; allowed: 'strong', 'weak'")
        weak = replication == "weak"
        options = CoordinatorOptions(servers=servers, shards=shards, replicas=replicas, weak=weak)
        server_options = ServerOptions(host=bind, port=port, threads=threads)
        check_bind(bind, token)
        self.token = generate() if token is None else check_token(token)
        listener = listen(server_options)
        children: list[_Child] = []
        self._children = children
        self._server_options = server_options
        with closing(listener):
            self.address = str(Address(reachable_host(bind), listener.getsockname()[1]))
            self._local = Address(_local_host(bind), listener.getsockname()[1])
            self.directory = _make_directory(directory)
            self._close = weakref.finalize(
                self, _stop, os.getpid(), children, self.directory, keep=directory is not None
            )
            try:
                self._spawn(children, listener, options)
                listener.close()  # or connections would wait here if the coordinator died
                self.servers: Sequence[ServerHandle] = self._await_ready(children, servers, _START_S)
            except BaseException:
                self._close()
                raise
        self.pid = children[0].process.pid

    @property
    def token_file(self) -> Path:
        """The file, mode 0600, that holds the token."""
        return self.directory / "token"

    def connect(self, **options: Any) -> Client:
        """A client of this cluster; takes what `shoal.connect` takes."""
        self._check_open()
        return connect(str(self._local), token=self.token, **options)

    def add_server(self) -> ServerHandle:
        """Start one more server. It gets its part of the shards while everything goes on."""
        self._check_open()
        index = len(self.servers)
        self._children.append(self._start_server(index))
        self.servers = self._await_ready(self._children[-1:], index + 1, _START_S)
        return self.servers[index]

    def evict_server(self, index: int, why: str) -> None:
        """Go on without that server at once, not when it is missed; Unavailable: it alone has rows."""
        with closing(ControlClient(self._local, self.token)) as control:
            control.ask(EvictServer(index=index, why=why), Done, _START_S)

    def remove_server(self, index: int, timeout: float = 60.0) -> None:
        """Move the shards of that server to the others, and end it; returns when it has ended."""
        self._check_open()
        if not any(server.index == index and server.alive for server in self.servers):
            up = [server.index for server in self.servers if server.alive]
            raise BadInput(f"server {index!r} is not one of those that are up, {up}")
        process = self._children[1 + index].process
        with closing(ControlClient(self._local, self.token)) as control:
            control.ask(RemoveServer(index=index), Done, check_timeout(timeout))
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Timeout(
                f"server {index} still holds shards after {timeout:g} s; it goes on leaving"
            ) from None

    def close(self) -> None:
        """Stop and reap all processes. Twice is harmless."""
        self._close()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise Closed(f"this cluster at {self.address} was closed")

    def _spawn(
        self,
        children: list[_Child],
        listener: socket.socket,
        options: CoordinatorOptions,
    ) -> None:
        write_token_file(self.token_file, self.token)
        descriptor = listener.fileno()
        coordinator = ["--listen-fd", str(descriptor), "--journal", str(self.directory / "journal.db")]
        counts = ["--servers", str(options.servers), "--shards", str(options.shards)]
        counts += ["--replicas", str(options.replicas), "--replication", "weak" if options.weak else "strong"]
        arguments = [*coordinator, *counts, *self._shared_arguments()]
        children.append(self._start("coordinator", "coordinator", arguments, [descriptor]))
        children.extend(self._start_server(index) for index in range(options.servers))

    def _shared_arguments(self) -> list[str]:
        return ["--token-file", str(self.token_file), "--watch-stdin", "--host", self._server_options.host]

    def _start_server(self, index: int) -> _Child:
        arguments = ["--join", str(self._local), "--index", str(index), *self._shared_arguments()]
        arguments += ["--threads", str(self._server_options.threads)]
        arguments += ["--unix-directory", str(self.directory)]
        return self._start(f"server {index}", "server", arguments, [])

    def _start(self, role: str, module: str, arguments: list[str], descriptors: list[int]) -> _Child:
        log = self.directory / f"{role.replace(' ', '-')}.log"
        with log.open("wb") as output:
            # -P: a file in the user's directory must not stand in for a module. A session of its own: Ctrl-C
            # is for the user's program, which closes the cluster when it is done.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"shoal.fleet.{module}_process", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=descriptors,
                # Without this NumPy starts threads for linear algebra, a third of a server's starting time.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return _Child(role, process, log)

    def _await_ready(
        self, starting: Sequence[_Child], servers: int, timeout_s: float
    ) -> tuple[ServerHandle, ...]:
        end = time.monotonic() + check_timeout(timeout_s)
        with closing(ControlClient(self._local, self.token)) as control:
            while True:
                status = self._status(control, starting)
                if status is not None and len(status.servers) == servers:
                    break
                if time.monotonic() > end:
                    missing = "the coordinator" if status is None else f"servers {list(status.waiting_for)}"
                    raise Timeout(f"the cluster did not start within {timeout_s:g} s: waited for {missing}")
                time.sleep(_POLL_S)
        return tuple(
            ServerHandle(info.index, info.pid, f"{info.host}:{info.port}", child.process)
            for info, child in zip(status.servers, self._children[1:], strict=True)
        )

    def _status(self, control: ControlClient, starting: Sequence[_Child]) -> StatusInfo | None:
        try:
            return control.ask(GetStatus(), StatusInfo, timeout_s=1.0, patience_s=0.0)
        except (Unavailable, Timeout):
            return None
        finally:
            for child in starting:
                child.check()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._close.alive:
            return f"<LocalCluster {self.address}: closed>"
        alive = sum(server.alive for server in self.servers)
        return f"<LocalCluster {self.address}: {alive} of {len(self.servers)} servers up>"


def _local_host(bind: str) -> str:
    """Where processes of this machine find what listens on `bind`."""
    if is_loopback(bind):
        return bind
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)


def _make_directory(parent: str | os.PathLike[str] | None) -> Path:
    """A new directory that only this user can enter."""
    try:
        if parent is not None:
            Path(parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="shoal-", dir=parent))
    except (OSError, TypeError) as error:
        raise BadInput(f"cannot make a directory in {parent or 'the temporary one'}: {error}") from None


def _stop(pid: int, children: Sequence[_Child], directory: Path, *, keep: bool) -> None:
    """End and reap every child. A forked copy of the parent must not: they are not its children."""
    if os.getpid() != pid:
        return
    # The servers first: the coordinator then sees them go and has nothing to say about it.
    for child in reversed(children):
        child.process.terminate()
    end = time.monotonic() + _STOP_S
    for child in reversed(children):
        try:
            child.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        if child.process.stdin is not None:
            with suppress(OSError):
                child.process.stdin.close()
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)
