"""`shoal up` and `shoal server`: processes that stay."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from shoal.config import read_environment
from shoal.fleet import server_process
from shoal.fleet.local import LocalCluster
from shoal.fleet.token import check_bind, generate, write_token_file

_LOOK_EVERY_S = 1.0


def up(*, bind: str, token_file: Path | None, replicas: int, **options: Any) -> None:
    """Start a cluster of these options of `LocalCluster`, say where it is, and wait for SIGINT or SIGTERM."""
    console = Console(soft_wrap=True, highlight=False)
    stop = threading.Event()

    def stopped(number: int, frame: FrameType | None) -> None:
        stop.set()

    token = _token(bind, token_file)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stopped)
    with LocalCluster(replicas=replicas, bind=bind, token=token, **options) as cluster:
        path = token_file or cluster.token_file
        console.print(f"address     {cluster.address}")
        console.print(f"token file  {path}")
        console.print("To connect, then shoal.connect() in Python, or `shoal status`:")
        console.print(f"export SHOAL_ADDRESS={cluster.address} SHOAL_TOKEN_FILE={path.absolute()}")
        console.print("Ctrl-C stops all.")
        console.file.flush()
        _watch(cluster, console, stop, copies=replicas > 0)
    console.print("stopped")


def _token(bind: str, token_file: Path | None) -> str | None:
    """The token that the user chose; None lets the cluster make one."""
    if token_file is None or token_file.exists():
        return read_environment().find_token(file=token_file)
    token = generate()
    check_bind(bind, token)
    write_token_file(token_file, token)
    return token


def _watch(cluster: LocalCluster, console: Console, stop: threading.Event, *, copies: bool) -> None:
    """Wait for the signal, and say once when a server has ended."""
    known = {server.index for server in cluster.servers}
    while not stop.wait(_LOOK_EVERY_S):
        for server in cluster.servers:
            if server.index in known and not server.alive:
                known.discard(server.index)
                then = (
                    "; the copies of its rows go on. `shoal server --join ADDR` adds another"
                    if copies
                    else " and its rows are gone; Ctrl-C and start again"
                )
                console.print(
                    f"[bold red]lost[/]        server {server.index} (pid {server.pid}) has ended{then}"
                )
                console.file.flush()


def server(
    *, join: str, bind: str, port: int, token_file: Path | None, advertise: str | None, threads: int
) -> int:
    """Run one server in this process; one that was given up, as after a sleep, joins again."""
    arguments = ["--join", join, "--host", bind, "--port", str(port), "--threads", str(threads)]
    if token_file is not None:
        arguments += ["--token-file", str(token_file)]
    if advertise is not None:
        arguments += ["--advertise", advertise]
    return server_process.main(arguments, comes_back=True)
