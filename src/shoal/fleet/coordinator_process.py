"""The coordinator as a process.

    python -m shoal.fleet.coordinator_process --servers 2 --journal j.db --token-file token --port 7700

Alone it leads from its start, and its journal is a file. One of several has `--etcd` instead: all that name
the same cluster campaign for its journal there, and the others stand by.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.config import SHARDS, CoordinatorOptions, ServerOptions
from shoal.errors import BadInput, Unavailable
from shoal.fleet.coordinator_server import CoordinatorServer
from shoal.fleet.journal import JournalLost
from shoal.fleet.process import listen, run_process
from shoal.fleet.sqlite_journal import SqliteJournal
from shoal.fleet.token import reachable_host
from shoal.store.control import Address


async def _run(arguments: argparse.Namespace, token: str, listener: socket.socket) -> bool:
    options = CoordinatorOptions(
        servers=arguments.servers,
        shards=arguments.shards,
        replicas=arguments.replicas,
        weak=arguments.replication == "weak",
    )
    server = CoordinatorServer(options, token, several=arguments.etcd is not None)
    over = asyncio.Event()  # the whole cluster ends
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop.set)
    if arguments.watch_stdin:

        def parent_gone() -> None:
            # It holds the other end and never writes.
            over.set()
            server.stop.set()

        loop.add_reader(sys.stdin.fileno(), parent_gone)
    if arguments.etcd is None:
        return await _lead_alone(server, Path(arguments.journal), listener)
    from shoal.fleet.campaign import Campaign  # an extra, so perhaps not there

    address = Address(arguments.advertise or reachable_host(arguments.host), listener.getsockname()[1])
    campaign = Campaign(arguments.etcd, arguments.cluster, str(address), server)
    try:
        await server.serve(listener)
    finally:
        await asyncio.to_thread(campaign.close, over=over.is_set())
    return campaign.error is None


async def _lead_alone(server: CoordinatorServer, path: Path, listener: socket.socket) -> bool:
    failed = False

    def lost(why: str) -> None:
        nonlocal failed
        failed = True
        server.stop.set()

    with contextlib.closing(SqliteJournal(path)) as journal:
        try:
            server.lead(journal, list(journal), lost)
        except JournalLost as error:
            raise Unavailable(str(error)) from None
        await server.serve(listener)
    return not failed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shoal.fleet.coordinator_process")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--listen-fd", type=int, help="a listening socket that was passed on")
    parser.add_argument("--servers", type=int, default=1, help="servers to wait for")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--replicas", type=int, default=0, help="further copies of each shard")
    parser.add_argument("--replication", choices=["strong", "weak"], default="strong")
    parser.add_argument("--journal", help="SQLite file; continued if it exists")
    parser.add_argument("--etcd", help="instead: http://host:port of etcd's members, with commas")
    parser.add_argument("--cluster", default="default", help="the cluster's name in etcd")
    parser.add_argument("--advertise", help="the name by which others reach this host")
    parser.add_argument("--token-file", type=Path, help="default: SHOAL_TOKEN, SHOAL_TOKEN_FILE")
    parser.add_argument("--watch-stdin", action="store_true", help="end when stdin is closed")
    return parser.parse_args(arguments)


def _listen(arguments: argparse.Namespace) -> socket.socket:
    if arguments.listen_fd is not None:
        os.set_inheritable(arguments.listen_fd, False)
        return socket.socket(fileno=arguments.listen_fd)
    return listen(ServerOptions(host=arguments.host, port=arguments.port))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a coordinator until SIGTERM or SIGINT; 1 if it could not start or go on."""
    parsed = _parse(arguments)
    if (parsed.journal is None) == (parsed.etcd is None):
        raise BadInput("a coordinator has either --journal or --etcd")

    def serve(token: str) -> int:
        with _listen(parsed) as listener:
            print(Address(*listener.getsockname()[:2]), flush=True)
            return 0 if asyncio.run(_run(parsed, token, listener)) else 1

    return run_process("coordinator", parsed.host, parsed.token_file, serve)


if __name__ == "__main__":
    sys.exit(main())
