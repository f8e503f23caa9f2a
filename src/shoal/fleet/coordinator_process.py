"""The coordinator as a process: sockets, deadlines and the journal around `shoal.fleet.coordinator`.

    python -m shoal.fleet.coordinator_process --servers 2 --journal j.db --token-file token --port 7700

One asyncio loop. A connection must prove the token within a deadline and with small messages; what is
not a control message closes that connection and is logged, and all others go on. A decision is journaled
before its reply is sent; if it cannot be, the process ends: its journal is the truth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import itertools
import logging
import os
import secrets
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.config import SHARDS, CoordinatorOptions, ServerOptions
from shoal.errors import Refused, Unavailable, code_of
from shoal.fleet import pulse
from shoal.fleet.coordinator import Coordinator, Outcome
from shoal.fleet.journal import Journal
from shoal.fleet.leases import LEASE_S
from shoal.fleet.process import listen, run_process
from shoal.store import messages as m
from shoal.store.control import Address, keep_alive

__all__ = ["CoordinatorServer", "main"]

_log = logging.getLogger("shoal.coordinator")
_BODY_S = 10.0
_DRAIN_S = 10.0
_STOP_S = 1.0
# This process slept: those who renew their leases had no chance to.
_LATE_S = 0.2


class CoordinatorServer:
    """Serves control connections on one listening socket until `stop` is set."""

    def __init__(self, options: CoordinatorOptions, token: str, journal: Journal) -> None:
        self._options = options
        self._token = token
        self._journal = journal
        restored = list(journal)
        # Of an earlier life there may be clients that have not found this one yet.
        since = time.monotonic() - (0.0 if restored else LEASE_S)
        self._coordinator = Coordinator(
            options, pid=os.getpid(), client_ids_from=secrets.randbits(31) << 32, now=since
        )
        self._pulses: set[int] = set()
        self._not_holding = asyncio.Event()
        self._not_holding.set()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._failed = False
        self.stop = asyncio.Event()
        for decision in restored:
            self._coordinator.restore(decision)
        journal.append(self._coordinator.form().decisions)

    async def serve(self, listener: socket.socket) -> bool:
        """Serve until stopped. False if the journal could not be written."""
        server = await asyncio.start_server(self._connected, sock=listener, limit=m.FRAME_BYTES_MAX)
        try:
            await self.stop.wait()
        finally:
            server.close()
            for writer in list(self._writers.values()):
                writer.transport.abort()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_STOP_S)
        return not self._failed

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = next(self._peers)
        name = writer.get_extra_info("peername")
        if len(self._writers) >= self._options.connections_max:
            _log.warning("refused %s: %d connections are open", name, len(self._writers))
            writer.transport.abort()
            return
        self._writers[peer] = writer
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            keep_alive(writer.get_extra_info("socket"))
            async with asyncio.timeout(self._options.handshake_s):
                first = int.from_bytes(await reader.readexactly(m.LENGTH_BYTES), "little")
                if first == pulse.MAGIC:
                    await self._open_pulse(peer, reader, writer)
                else:
                    await self._handshake(first, reader, writer)
            while True:
                if peer in self._pulses:
                    await self._beat(peer, reader)
                else:
                    await self._request(peer, reader, writer)
        except Refused as error:
            _log.warning("refused %s: %s", name, error)
            with contextlib.suppress(OSError):
                writer.write(m.encode(m.Failure(code=code_of(error), message=str(error))))
        except TimeoutError:
            _log.warning("refused %s: no complete message within the deadline", name)
        except (OSError, asyncio.IncompleteReadError) as error:
            _log.debug("%s is gone: %s", name, error)
        finally:
            del self._writers[peer]
            self._pulses.discard(peer)
            self._carry_out(self._coordinator.closed(peer, time.monotonic()))
            writer.close()

    async def _open_pulse(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        hello = pulse.Hello.decode(await reader.readexactly(pulse.Hello.BYTES))
        nonce = secrets.token_bytes(m.NONCE_BYTES)
        writer.write(nonce)
        proof = await reader.readexactly(hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, pulse.prove(self._token, "client", hello, nonce)):
            raise Refused("wrong token")
        # Its client pushes once it is welcome, and must not within a cut.
        await self._not_holding.wait()
        self._pulses.add(peer)
        self._coordinator.leases.open(peer, hello.client_id, hello.incarnation, time.monotonic())
        writer.write(pulse.prove(self._token, "server", hello, nonce))

    async def _beat(self, peer: int, reader: asyncio.StreamReader) -> None:
        beat = pulse.Beat.decode(await reader.readexactly(pulse.Beat.BYTES))
        self._carry_out(self._coordinator.beat(peer, beat, time.monotonic()))

    async def _handshake(
        self, first: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        hello = await _receive_body(reader, first, m.HANDSHAKE_BYTES_MAX)
        if not isinstance(hello, m.Hello):
            raise Refused(f"a connection begins with Hello, not {type(hello).__name__}")
        if hello.version != m.VERSION:
            raise Refused(f"control protocol {hello.version}; this coordinator speaks {m.VERSION}")
        nonce = secrets.token_bytes(m.NONCE_BYTES)
        expected = m.prove(self._token, "client", hello.nonce, nonce)
        await _send(writer, m.Challenge(nonce=nonce))
        proof = await _receive(reader, m.HANDSHAKE_BYTES_MAX)
        if not isinstance(proof, m.Proof) or not hmac.compare_digest(proof.mac, expected):
            raise Refused("wrong token")
        await _send(writer, m.Welcome(mac=m.prove(self._token, "coordinator", hello.nonce, nonce)))

    async def _request(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await _receive(reader, m.FRAME_BYTES_MAX)
        if not isinstance(request, m.Request):
            raise Refused(f"{type(request).__name__} is not a request")
        self._carry_out(self._coordinator.handle(peer, request, time.monotonic()))
        async with asyncio.timeout(_DRAIN_S):
            await writer.drain()

    def _carry_out(self, outcome: Outcome) -> None:
        """Journal, then answer; then set the clock for the next deadline."""
        try:
            self._journal.append(outcome.decisions)
        except (sqlite3.Error, OSError) as error:
            _log.critical("cannot write the journal, so this coordinator ends: %s", error)
            self._failed = True
            self.stop.set()
            return
        for peer, reply in outcome.replies:
            writer = self._writers.get(peer)
            if writer is not None:
                writer.write(reply.encode() if isinstance(reply, pulse.PulseOrder) else m.encode(reply))
        if self._coordinator.holding:
            self._not_holding.clear()
        else:
            self._not_holding.set()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._coordinator.next_deadline()
        if deadline is not None:
            delay_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick, deadline)

    def _tick(self, due: float) -> None:
        now = time.monotonic()
        if now > due + _LATE_S:
            self._coordinator.late(now - due)
        self._carry_out(self._coordinator.tick(now))


async def _receive(reader: asyncio.StreamReader, bytes_max: int) -> m.Message:
    length = int.from_bytes(await reader.readexactly(m.LENGTH_BYTES), "little")
    return await _receive_body(reader, length, bytes_max)


async def _receive_body(reader: asyncio.StreamReader, length: int, bytes_max: int) -> m.Message:
    if length > bytes_max:
        raise Refused(f"a message of {length} bytes; at most {bytes_max} are taken")
    async with asyncio.timeout(_BODY_S):
        return m.decode(await reader.readexactly(length))


async def _send(writer: asyncio.StreamWriter, message: m.Message) -> None:
    writer.write(m.encode(message))
    await writer.drain()


async def _run(arguments: argparse.Namespace, token: str, listener: socket.socket) -> bool:
    options = CoordinatorOptions(
        servers=arguments.servers,
        shards=arguments.shards,
        replicas=arguments.replicas,
        weak=arguments.replication == "weak",
    )
    with contextlib.closing(Journal(Path(arguments.journal))) as journal:
        try:
            server = CoordinatorServer(options, token, journal)
        except sqlite3.Error as error:
            raise Unavailable(f"cannot write the journal {arguments.journal}: {error}") from None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop.set)
        if arguments.watch_stdin:
            # The parent holds the other end and never writes: readable means that it is gone.
            loop.add_reader(sys.stdin.fileno(), server.stop.set)
        return await server.serve(listener)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shoal.fleet.coordinator_process")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--listen-fd", type=int, help="a listening socket that was passed on")
    parser.add_argument("--servers", type=int, default=1, help="servers to wait for")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--replicas", type=int, default=0, help="further copies of each shard")
    parser.add_argument("--replication", choices=["strong", "weak"], default="strong")
    parser.add_argument("--journal", required=True, help="SQLite file; continued if it exists")
    parser.add_argument("--token-file", type=Path, help="default: SHOAL_TOKEN, SHOAL_TOKEN_FILE")
    parser.add_argument("--watch-stdin", action="store_true", help="end when stdin is closed")
    return parser.parse_args(arguments)


def _listen(arguments: argparse.Namespace) -> socket.socket:
    if arguments.listen_fd is not None:
        return socket.socket(fileno=arguments.listen_fd)
    return listen(ServerOptions(host=arguments.host, port=arguments.port))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a coordinator until SIGTERM or SIGINT; 1 if it could not start or go on."""
    parsed = _parse(arguments)

    def serve(token: str) -> int:
        with _listen(parsed) as listener:
            print(Address(*listener.getsockname()[:2]), flush=True)
            return 0 if asyncio.run(_run(parsed, token, listener)) else 1

    return run_process("coordinator", parsed.host, parsed.token_file, serve)


if __name__ == "__main__":
    sys.exit(main())
