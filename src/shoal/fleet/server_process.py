"""A server as a process: the C++ server, registered at a coordinator.

    python -m shoal.fleet.server_process --join shoal://127.0.0.1:7700 --token-file token

All serving is C++ threads; this file starts them, registers, and waits for a reason to end: SIGTERM,
SIGINT, or the end of stdin where a parent asked for that. When the coordinator goes away the server goes
on serving and registers again when it is back.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import secrets
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from shoal import _core
from shoal.config import ServerOptions
from shoal.errors import BadInput, Fenced, Refused, Timeout, Unavailable, from_core
from shoal.fleet.chain_duty import ChainDuty
from shoal.fleet.parts import Parts
from shoal.fleet.process import run_process
from shoal.fleet.token import reachable_host
from shoal.store.control import Address, ControlClient
from shoal.store.messages import ClusterInfo, GetCluster, PartOrder, RegisterServer, ServerAdmitted

_log = logging.getLogger("shoal.server")
_JOIN_S = 30.0
_REJOIN_S = 1.0
_REJOIN_EVERY_MS = 250
_COME_BACK_S, _LOOK_EVERY_S = 2.0, 0.05  # a new server has a new number, of which there are not many
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# A path of a unix socket has room for 107 bytes.
_UNIX_PATH_BYTES_MAX = 100


def run_server(
    join: Address,
    token: str,
    options: ServerOptions,
    *,
    index: int | None = None,
    advertise: str | None = None,
    unix_directory: Path | None = None,
    watch_stdin: bool = False,
) -> bool:
    """Serve until a signal (SystemExit) or, where asked for, until stdin ends. True: the cluster has given
    this server up, and it may come back as a new one.
    """
    server = None
    with _socket_path(unix_directory) as unix_path, closing(ControlClient(join, token)) as control:
        try:
            cluster = control.ask(GetCluster(), ClusterInfo, _JOIN_S)
            server = _start(options, token, cluster, unix_path)
            registration = RegisterServer(
                identity=secrets.token_hex(16),
                pid=os.getpid(),
                host=advertise or reachable_host(options.host),
                port=server.port,
                unix_path=unix_path,
                shards=cluster.shards,
                index=index,
            )
            admitted = control.ask(registration, ServerAdmitted, _JOIN_S)
            # For a parent that waits for it; nobody else reads it.
            print(admitted.index, f"{registration.host}:{server.port}", flush=True)
            _log.info("server %d listens on %s:%d", admitted.index, options.host, server.port)
            chains = ChainDuty(server, control.another(), control, admitted, registration.identity)
            _wait(control, registration, Parts(server.store(), control.another()), chains, watch_stdin)
            return chains.given_up
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, _stop_later)
            if server is not None:
                server.stop()


def _start(options: ServerOptions, token: str, cluster: ClusterInfo, unix_path: str) -> _core.Server:
    try:
        return _core.Server(
            host=options.host,
            port=options.port,
            unix_path=unix_path,
            token=token.encode(),
            shards=cluster.shards,
            threads=options.threads,
            frame_bytes_max=options.frame_bytes_max,
            placed=False,
            weak=cluster.weak,
        )
    except _core.CoreError as error:
        raise from_core(error, f"cannot start a server on {options.host}:{options.port}") from None


@contextmanager
def _socket_path(wanted: Path | None) -> Iterator[str]:
    """Where to put the unix socket: in `wanted` if the name is not too long, else in a private directory."""
    name = f"{os.getpid()}.sock"
    if wanted is not None and len(os.fsencode(wanted.absolute() / name)) <= _UNIX_PATH_BYTES_MAX:
        yield str(wanted.absolute() / name)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-server-") as directory:  # mode 0700
        path = str(Path(directory) / name)
        yield path if len(os.fsencode(path)) <= _UNIX_PATH_BYTES_MAX else ""


def _wait(
    control: ControlClient,
    registration: RegisterServer,
    parts: Parts,
    chains: ChainDuty,
    watch_stdin: bool,
) -> None:
    """Return when stdin ends or the cluster has given this server up.

    Meanwhile it does what the coordinator says, and keeps the registration alive.
    """
    stdin = sys.stdin.fileno() if watch_stdin else -1
    complained = False
    while True:
        connection = control.fileno()
        poller = select.poll()
        for descriptor in {stdin, connection, parts.fileno(), chains.over} - {-1}:
            poller.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(_REJOIN_EVERY_MS if connection == -1 else None)}
        if stdin in ready or chains.over in ready:
            return
        try:
            if parts.fileno() in ready:
                for report in parts.reports():
                    control.tell(report)
            if connection in ready:
                order = control.hear()
                if isinstance(order, PartOrder):
                    parts.take(order)
            if connection != -1:
                continue
        except (OSError, EOFError, Refused):
            control.drop()
        try:
            chains.life = control.ask(registration, ServerAdmitted, _REJOIN_S, patience_s=0.0).life
            _log.info("registered again at %s", control.address)
            complained = False
        except Fenced as error:
            chains.fenced(error)
            return
        except (Unavailable, Timeout, Refused, BadInput) as error:
            if not complained:
                _log.warning("the coordinator is gone, serving goes on: %s", error)
            complained = True


def _keep_memory() -> None:
    """What one request gives back is the next one's. glibc would hand it to the kernel and ask for it again,
    page by page."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, size in ((_M_TRIM_THRESHOLD, 256 << 20), (_M_MMAP_THRESHOLD, 32 << 20)):
            if not libc.mallopt(option, size):
                _log.debug("mallopt(%d, %d) was refused", option, size)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


_stopped: list[int] = []  # by these signals, while it was about to end


def _stop_later(number: int, frame: FrameType | None) -> None:
    _stopped.append(number)


def _come_back() -> None:
    """Begin anew, as another process in this one's place: threads that are still at work, and all memory, go
    with it. Not if it is told to stop meanwhile.
    """
    end = time.monotonic() + _COME_BACK_S
    while not _stopped and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if not _stopped:
        _log.warning("it joins again, as a new server without rows")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shoal.fleet.server_process")
    parser.add_argument(
        "--join", required=True, help="the coordinator: shoal://host:port, or several with commas"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--advertise", help="the name by which others reach this host")
    parser.add_argument("--index", type=int, help="place in the cluster; default: the first free one")
    parser.add_argument("--threads", type=int, default=0, help="0: by the number of cores")
    parser.add_argument("--unix-directory", type=Path, help="where to put the unix socket")
    parser.add_argument("--token-file", type=Path, help="default: SHOAL_TOKEN, SHOAL_TOKEN_FILE")
    parser.add_argument("--watch-stdin", action="store_true", help="end when stdin is closed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, *, comes_back: bool = False) -> int:
    """Run a server until SIGTERM or SIGINT; 1 if it could not start. `comes_back`: one that was given up
    joins again, as a new server without rows.
    """
    parsed = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    _keep_memory()

    def serve(token: str) -> int:
        given_up = run_server(
            Address.parse(parsed.join),
            token,
            ServerOptions(host=parsed.host, port=parsed.port, threads=parsed.threads),
            index=parsed.index,
            advertise=parsed.advertise,
            unix_directory=parsed.unix_directory,
            watch_stdin=parsed.watch_stdin,
        )
        if given_up and comes_back:
            _come_back()
        return 0

    return run_process("server", parsed.host, parsed.token_file, serve)


if __name__ == "__main__":
    sys.exit(main())
