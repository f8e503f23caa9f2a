"""`LocalCluster`: a coordinator and servers as real processes on this machine.

The parent makes the listening socket, so the address is known and a port in use is noticed before anything
starts; coordinator and servers then start side by side. Each child watches its stdin, whose other end only
the parent holds: whatever way the parent ends, they end too. A coordinator that dies is started again, by
`shoal.fleet.coordinator_keeper`. No global state: any number of clusters may live in one process.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config import SHARDS, CoordinatorOptions, ServerOptions, check_count, check_timeout, check_token
from shoal.errors import BadInput, Closed, Timeout, Unavailable
from shoal.fleet.child import Child, start_child, stop_children
from shoal.fleet.coordinator_keeper import CoordinatorKeeper
from shoal.fleet.process import listen
from shoal.fleet.token import check_bind, generate, is_loopback, reachable_host, write_token_file
from shoal.store.client import Client
from shoal.store.connect import connect
from shoal.store.control import Address, ControlClient
from shoal.store.messages import (
    Done,
    EvictServer,
    GetStatus,
    PlacementNews,
    RemoveServer,
    Request,
    StatusInfo,
    WatchPlacement,
)

_START_S = 30.0
_POLL_S = 0.01
_COORDINATORS_MAX = 9
# A coordinator that does not answer for so long is looked at.
_LOOK_S = 2.0


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
    and reaps every process. A coordinator that is killed is started again, one that stands still by a signal
    is killed first (by a thread, unless `watch` is False); servers are not. Unless `directory` is given, what
    the cluster writes is in a private temporary directory that is removed. Only this machine can connect
    unless `bind` says otherwise, which needs an explicit `token`.

    Its attributes, for other processes and for looking at it:

    - `address`: "shoal://host:port", for `shoal.connect` and `shoal status`; of several `coordinators`,
      which agree by an `etcd` ("http://host:2379"), all with commas
    - `token`, and `token_file`, a file of mode 0600 that holds it
    - `servers[i]`: `.index`, `.pid`, `.address` ("host:port") and `.alive` of server i
    - `pid`: of the coordinator, the first if there are several, as it is now
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
        coordinators: int = 1,
        etcd: str | None = None,
        watch: bool = True,
    ) -> None:
        if replication not in ("strong", "weak"):
            raise BadInput(f"replication is {replication!r}; allowed: 'strong', 'weak'")
        weak = replication == "weak"
        options = CoordinatorOptions(servers=servers, shards=shards, replicas=replicas, weak=weak)
        server_options = ServerOptions(host=bind, port=port, threads=threads)
        check_bind(bind, token)
        check_coordinators(coordinators, etcd)
        self.token = generate() if token is None else check_token(token)
        self._server_options = server_options
        listeners = _listen(server_options, coordinators)
        ports = [listener.getsockname()[1] for listener in listeners]
        everywhere, self._local = (
            Address(host, ports[0], tuple(Address(host, port) for port in ports[1:]))
            for host in (reachable_host(bind), _local_host(bind))
        )
        self.address = str(everywhere)
        try:
            self.directory = _make_directory(directory)
            write_token_file(self.token_file, self.token)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        start = _coordinator_starter(self.directory, options, etcd, self._shared_arguments())
        self._coordinators = CoordinatorKeeper(start, listeners)
        self._asked = self._local.all[0]  # last, of several coordinators
        children: list[Child] = []
        self._children = children
        self._close = weakref.finalize(
            self, _stop, os.getpid(), self._coordinators, children, self.directory, keep=directory is not None
        )
        try:
            children.extend(self._start_server(index) for index in range(servers))
            starting = [*self._coordinators.children, *children]
            self.servers: Sequence[ServerHandle] = self._await_ready(starting, children)
        except BaseException:
            self._close()
            raise
        if watch:
            self._coordinators.watch()

    @property
    def pid(self) -> int:
        """Of the coordinator, as it is now."""
        return self._coordinators.pids[0]

    @property
    def coordinator_pids(self) -> tuple[int, ...]:
        """Of all coordinators."""
        return self._coordinators.pids

    @property
    def token_file(self) -> Path:
        """The file, mode 0600, that holds the token."""
        return self.directory / "token"

    def connect(self, **options: Any) -> Client:
        """A client of this cluster; takes what `shoal.connect` takes."""
        self._check_open()
        self.look_after_coordinators()
        return connect(str(self._local), token=self.token, **options)

    def add_server(self) -> ServerHandle:
        """Start one more server. It gets its part of the shards while everything goes on."""
        new = self.begin_server()
        assert new.process.stdout is not None
        end = time.monotonic() + _START_S
        while not select.select([new.process.stdout], [], [], _LOOK_S)[0]:
            self.look_after_coordinators()
            if time.monotonic() > end:
                raise Timeout(f"{new.role} did not join within {_START_S:g} s; its log is {new.log}")
        return self.joined(new)

    def begin_server(self) -> Child:
        """Start one more server and do not wait: its stdout is readable when it has joined, or ended.

        One at a time: places are given in the order of joining.
        """
        self._check_open()
        self._children.append(self._start_server(len(self._children), subprocess.PIPE))
        return self._children[-1]

    def joined(self, new: Child) -> ServerHandle:
        """The server that was begun, when its stdout is readable; Unavailable: it has ended."""
        assert new.process.stdout is not None
        with new.process.stdout as said:
            index, _, address = said.readline().decode().strip().partition(" ")
        if not address:
            new.process.wait(_START_S)
            new.check()
        server = ServerHandle(int(index), new.process.pid, address, new.process)
        self.servers = (*self.servers, server)
        return server

    def evict_server(self, index: int, why: str, timeout: float = _START_S) -> None:
        """Go on without that server at once, not when it is missed; Refused: it alone has rows."""
        self._order(EvictServer(index=index, why=why), timeout)

    def status(self, timeout: float = _START_S) -> StatusInfo:
        """What the coordinator knows."""
        with self._asking() as control:
            return control.ask(GetStatus(), StatusInfo, timeout, patience_s=0.0)

    def shards_of(self, servers: Collection[int], timeout: float = _START_S) -> set[int]:
        """The shards that only these servers have."""
        with self._asking() as control:
            news = control.ask(WatchPlacement(after=0, wait_s=0.0), PlacementNews, timeout)
        chains = news.placement.chains if news.placement is not None else ()
        return {shard for shard, chain in enumerate(chains) if set(chain) <= set(servers)}

    def look_after_coordinators(self) -> list[int]:
        """Start those again that have ended; which were. For who has said `watch=False`."""
        return self._coordinators.look()

    def kill_still_coordinators(self, now: float) -> list[int]:
        """Kill those that have stood still by a signal for about five seconds, and are then started again;
        their pids. For who has said `watch=False`, and calls it at least every five seconds.
        """
        return self._coordinators.kill_still(now)

    def remove_server(self, index: int, timeout: float = 60.0) -> None:
        """Move the shards of that server to the others, and end it; returns when it has ended."""
        server = self.begin_removal(index, check_timeout(timeout))
        try:
            server._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Timeout(
                f"server {index} still holds shards after {timeout:g} s; it goes on leaving"
            ) from None

    def begin_removal(self, index: int, timeout: float = _START_S) -> ServerHandle:
        """Have a server leave: its shards move to the others, and then it ends by itself."""
        self._check_open()
        up = {server.index: server for server in self.servers if server.alive}
        if index not in up:
            raise BadInput(f"server {index!r} is not one of those that are up, {list(up)}")
        self._order(RemoveServer(index=index), timeout)
        return up[index]

    def close(self) -> None:
        """Stop and reap all processes. Twice is harmless."""
        self._close()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise Closed(f"this cluster at {self.address} was closed")

    def _order(self, request: Request, timeout_s: float) -> None:
        """Have the coordinator do something, also if it must be started again first."""
        end = time.monotonic() + timeout_s
        with self._asking() as control:
            while True:
                self.look_after_coordinators()
                left = end - time.monotonic()
                try:
                    control.ask(request, Done, max(_POLL_S, min(_LOOK_S, left)))
                    return
                except (Timeout, Unavailable):  # it stands still, or nobody leads
                    if left <= _LOOK_S:
                        raise

    @contextmanager
    def _asking(self) -> Iterator[ControlClient]:
        """Begins with the one that was asked last: within a short deadline nobody can ask all."""
        with closing(ControlClient(self._local, self.token)) as control:
            control.at = self._asked
            try:
                yield control
            finally:
                self._asked = control.at

    def _shared_arguments(self) -> list[str]:
        return ["--token-file", str(self.token_file), "--watch-stdin", "--host", self._server_options.host]

    def _start_server(self, index: int, stdout: int = subprocess.DEVNULL) -> Child:
        arguments = ["--join", str(self._local), "--index", str(index), *self._shared_arguments()]
        arguments += ["--threads", str(self._server_options.threads)]
        arguments += ["--unix-directory", str(self.directory)]
        return start_child(self.directory, f"server {index}", "server", arguments, stdout=stdout)

    def _await_ready(self, starting: Sequence[Child], servers: Sequence[Child]) -> tuple[ServerHandle, ...]:
        """Wait until these servers have joined; gives all of this parent's that have."""
        end = time.monotonic() + _START_S
        with closing(ControlClient(self._local, self.token)) as control:
            while True:
                status = self._status(control, starting)
                joined = {} if status is None else {info.pid: info for info in status.servers}
                missing = [child.role for child in servers if child.process.pid not in joined]
                if not missing:
                    break
                self.look_after_coordinators()
                if time.monotonic() > end:
                    who = "the coordinator" if status is None else ", ".join(missing)
                    raise Timeout(f"the cluster did not start within {_START_S:g} s: waited for {who}")
                time.sleep(_POLL_S)
        processes = {child.process.pid: child.process for child in self._children}
        return tuple(
            ServerHandle(info.index, pid, f"{info.host}:{info.port}", processes[pid])
            for pid, info in joined.items()
            if pid in processes
        )

    def _status(self, control: ControlClient, starting: Sequence[Child]) -> StatusInfo | None:
        try:
            return control.ask(GetStatus(), StatusInfo, timeout_s=1.0, patience_s=0.0)
        except (Unavailable, Timeout):
            return None
        finally:
            for child in starting:
                child.check()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._close.alive:
            return f"<LocalCluster {self.address}: closed>"
        alive = sum(server.alive for server in self.servers)
        return f"<LocalCluster {self.address}: {alive} of {len(self.servers)} servers up>"


def check_coordinators(coordinators: int, etcd: str | None) -> None:
    """Raise BadInput unless so many coordinators can be, and their etcd answers."""
    check_count("coordinators", coordinators, 1, _COORDINATORS_MAX)
    if etcd is None:
        if coordinators > 1:
            raise BadInput(
                f"coordinators is {coordinators}, and several need an etcd to agree: etcd='http://host:2379' "
                "(--etcd of commands)"
            )
        return
    try:
        from shoal.fleet.etcd_journal import check_etcd  # an extra
    except ImportError as error:
        raise BadInput(f"several coordinators need {error.name}: pip install 'shoal[etcd]'") from None
    check_etcd(etcd)


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


def _listen(options: ServerOptions, count: int) -> list[socket.socket]:
    """Sockets for so many coordinators: on the port and those that follow it, or on any that are free."""
    listeners: list[socket.socket] = []
    try:
        for more in range(count):
            listeners.append(listen(replace(options, port=options.port and options.port + more)))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _coordinator_starter(
    directory: Path, options: CoordinatorOptions, etcd: str | None, shared: Sequence[str]
) -> Callable[[int, int], Child]:
    arguments = ["--servers", str(options.servers), "--shards", str(options.shards)]
    arguments += ["--replicas", str(options.replicas)]
    arguments += ["--replication", "weak" if options.weak else "strong", *shared]
    if etcd is None:
        arguments += ["--journal", str(directory / "journal.db")]
    else:
        arguments += ["--etcd", etcd, "--cluster", f"local-{secrets.token_hex(8)}"]

    def start(index: int, descriptor: int) -> Child:
        role = f"coordinator {index}" if index else "coordinator"
        return start_child(
            directory, role, "coordinator", [*arguments, "--listen-fd", str(descriptor)], [descriptor]
        )

    return start


def _stop(
    pid: int, coordinators: CoordinatorKeeper, servers: Sequence[Child], directory: Path, *, keep: bool
) -> None:
    """End and reap every child. A forked copy of the parent must not: they are not its children."""
    if os.getpid() != pid:
        return
    # The servers first: the coordinator then sees them go and has nothing to say about it.
    stop_children(servers)
    coordinators.close()
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)
