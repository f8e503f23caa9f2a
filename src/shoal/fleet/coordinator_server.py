"""The coordinator's connections, deadlines and journal, around the pure `shoal.fleet.coordinator`.

One asyncio loop. A connection must prove the token within a deadline and with small messages; what is
not a control message closes that connection and is logged, and all others go on. A decision is journaled
before its reply is sent; where that fails, all connections end: the journal is the truth, and whoever holds
it next goes on from there. Without a journal this one only stands by: it says who leads, and takes no pulse.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from shoal.config import CoordinatorOptions
from shoal.errors import Refused, code_of
from shoal.fleet import pulse
from shoal.fleet.coordinator import Coordinator
from shoal.fleet.decisions import Decision
from shoal.fleet.evict import evict_in_background
from shoal.fleet.journal import Journal, JournalLost
from shoal.fleet.leases import LEASE_S
from shoal.fleet.outcome import Outcome
from shoal.store import messages as m
from shoal.store.control import Address, keep_alive
from shoal.store.proof import NONCE_BYTES, prove

_log = logging.getLogger("shoal.coordinator")
_BODY_S = 10.0
_DRAIN_S = 10.0
_STOP_S = 1.0
# How often it looks at the clock while somebody's time runs; more than _LATE_S later it must have slept.
_PACE_S = 0.5
_LATE_S = 0.2


class CoordinatorServer:
    """Serves control connections on one listening socket until `stop` is set."""

    def __init__(self, options: CoordinatorOptions, token: str, *, several: bool = False) -> None:
        self._options = options
        self._token = token
        self._several = several
        self._journal: Journal | None = None
        self._coordinator: Coordinator | None = None
        self._lost: Callable[[str], None] = lambda why: None
        self.leader = ""  # who leads, while it is another
        self._pulses: set[int] = set()
        self._not_holding = asyncio.Event()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._rings = 0.0
        self.stop = asyncio.Event()
        self._address = Address("127.0.0.1", 0)  # by which this process reaches itself

    def lead(self, journal: Journal, restored: Sequence[Decision], lost: Callable[[str], None]) -> None:
        """Go on from that journal, until it is lost, of which `lost` is told why. Raises JournalLost."""
        # Of an earlier life there may be clients that have not found this one yet.
        since = time.monotonic() - (0.0 if restored else LEASE_S)
        coordinator = Coordinator(
            self._options, pid=os.getpid(), client_ids_from=secrets.randbits(31) << 32, now=since
        )
        for decision in restored:
            coordinator.restore(decision)
        journal.append(coordinator.begin().decisions)
        self._hang_up()  # whoever was told of another leader asks again
        self._journal, self._coordinator, self._lost = journal, coordinator, lost
        self._not_holding.set()
        self._set_timer()

    def stand_by(self) -> None:
        """Decide nothing any more."""
        self._journal = self._coordinator = None
        self._set_timer()
        self._hang_up()

    def _hang_up(self) -> None:
        for writer in list(self._writers.values()):
            writer.transport.abort()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until stopped."""
        host, port = listener.getsockname()[:2]
        self._address = Address("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)
        server = await asyncio.start_server(self._connected, sock=listener, limit=m.FRAME_BYTES_MAX)
        try:
            await self.stop.wait()
        finally:
            server.close()
            self._hang_up()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_STOP_S)

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
            if self._coordinator is not None:
                self._carry_out(self._coordinator.closed(peer, self._now()))
            writer.close()

    async def _open_pulse(
        self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._coordinator is None:
            raise ConnectionAbortedError("no pulse is taken by one that stands by")
        hello = pulse.Hello.decode(await reader.readexactly(pulse.Hello.BYTES))
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        proof = await reader.readexactly(hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, pulse.prove(self._token, "client", hello, nonce)):
            raise Refused("wrong token")
        # Its client pushes once it is welcome, and must not within a cut.
        await self._not_holding.wait()
        if self._coordinator is None:
            raise ConnectionAbortedError("this coordinator leads no more")
        self._pulses.add(peer)
        self._coordinator.open_pulse(peer, hello, self._now())
        self._set_timer()
        writer.write(pulse.prove(self._token, "server", hello, nonce))

    async def _beat(self, peer: int, reader: asyncio.StreamReader) -> None:
        beat = pulse.Beat.decode(await reader.readexactly(pulse.Beat.BYTES))
        if self._coordinator is None:
            raise ConnectionAbortedError("this coordinator leads no more")
        self._carry_out(self._coordinator.beat(peer, beat, self._now()))
        if self._several and peer in self._writers:
            # A release of nothing: by it the other end knows that somebody leads here.
            self._writers[peer].write(pulse.PulseOrder(False, 0).encode())

    async def _handshake(
        self, first: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        hello = await _receive_body(reader, first, m.HANDSHAKE_BYTES_MAX)
        if not isinstance(hello, m.Hello):
            raise Refused(f"a connection begins with Hello, not {type(hello).__name__}")
        if hello.version != m.VERSION:
            raise Refused(f"control protocol {hello.version}; this coordinator speaks {m.VERSION}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        expected = prove(self._token, "client", hello.nonce, nonce)
        await _send(writer, m.Challenge(nonce=nonce))
        proof = await _receive(reader, m.HANDSHAKE_BYTES_MAX)
        if not isinstance(proof, m.Proof) or not hmac.compare_digest(proof.mac, expected):
            raise Refused("wrong token")
        await _send(writer, m.Welcome(mac=prove(self._token, "coordinator", hello.nonce, nonce)))

    async def _request(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await _receive(reader, m.FRAME_BYTES_MAX)
        if not isinstance(request, m.Request):
            raise Refused(f"{type(request).__name__} is not a request")
        if self._coordinator is None:
            writer.write(m.encode(m.NotLeader(leader=self.leader, pid=os.getpid())))
        else:
            self._carry_out(self._coordinator.handle(peer, request, self._now()))
        async with asyncio.timeout(_DRAIN_S):
            await writer.drain()

    def _carry_out(self, outcome: Outcome) -> None:
        """Journal, then answer; then set the clock for the next deadline."""
        if self._coordinator is None or self._journal is None:
            return
        try:
            self._journal.append(outcome.decisions)
            if not self._journal.holds:
                raise JournalLost("another one may lead by now")
        except JournalLost as error:
            _log.critical("this coordinator decides no more: %s", error)
            self.stand_by()
            self._lost(str(error))
            return
        for peer, reply in outcome.replies:
            writer = self._writers.get(peer)
            if writer is not None:
                writer.write(reply.encode() if isinstance(reply, pulse.PulseOrder) else m.encode(reply))
        for name, grant in outcome.evictions:
            self._evict(name, grant)
        if self._coordinator.holding:
            self._not_holding.clear()
        else:
            self._not_holding.set()
        self._set_timer()

    def _evict(self, name: str, grant: m.ClientGrant) -> None:
        loop, leader = asyncio.get_running_loop(), self._coordinator

        def wanted() -> bool:
            return self._coordinator is leader and not self.stop.is_set()

        def left() -> None:
            if leader is not None and wanted():
                self._carry_out(leader.left(grant.client_id, grant.incarnation, "evicting"))

        def done() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(left)

        evict_in_background(self._address, self._token, name, grant, wanted, done)

    # Time.

    def _set_timer(self) -> None:
        now = self._now()
        self._due = None
        deadline = None if self._coordinator is None else self._coordinator.next_deadline()
        if deadline is None:
            self._stop_timer()
            return
        self._due = min(max(deadline, now), now + _PACE_S)
        # One that is due already stays: set anew with each message it would never ring while those come.
        if self._timer is None or self._due < self._rings:
            self._stop_timer()
            self._rings = self._due
            self._timer = asyncio.get_running_loop().call_later(self._due - now, self._tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _now(self) -> float:
        """The time; nobody's lease ran while this process slept, or waited for its journal.

        What happens next is due at once, until `_set_timer` says when.
        """
        now = time.monotonic()
        if self._due is not None and now > self._due + _LATE_S and self._coordinator is not None:
            self._coordinator.late(now - self._due)
        self._due = now
        return now

    def _tick(self) -> None:
        self._timer = None
        if self._coordinator is not None:
            self._carry_out(self._coordinator.tick(self._now()))


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
