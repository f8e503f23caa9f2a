"""The simulated processes: clients and servers, each a driver around the compiled state machine.

A client's driver does what `RemoteClient` does with sockets: dials, greets, sends what the machine gives,
and after a loss dials again. It also has a timer, for a frame may vanish here without a connection ending:
when a server that owes an answer stays silent, all is sent again, on the same connection or on a new one.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from shoal import _core

from .ledger import KEY_ARRAY, Push, Read, Violation
from .network import TO_CLIENT, TO_SERVER, Connection
from .plan import KEYS, TABLES, Action

if TYPE_CHECKING:
    from .simulator import World

CHALLENGE, WELCOME, REFUSE, PUSH, REPLY = 2, 4, 5, 12, 32  # of wire/frame.h
FENCED = 5  # of base/status.h
TOKEN = b"simulated"
WINDOW = 256
TIMER_MS = 60.0
VERIFIER = 1_000_000


def table_specs(columns: tuple[int, ...]) -> list[_core.TableSpec]:
    """Tables of zeros under SGD(lr=1), a column for each push."""
    specs = []
    for identity, dim in zip(TABLES, columns, strict=True):
        spec = _core.TableSpec()
        spec.id, spec.name, spec.dim = identity, f"t{identity}", max(1, dim)
        spec.optimizer = _core.OptimizerSpec("sgd")
        spec.optimizer.lr = 1.0
        spec.init = _core.InitSpec("zeros")
        specs.append(spec)
    return specs


class SimulatedServer:
    """A server: its store, and a pause during which nothing is read."""

    def __init__(self, world: World, index: int) -> None:
        self._world = world
        self._index = index
        self._newest: dict[int, int] = {}  # client -> incarnation that was welcomed
        self._sessions: dict[int, Connection] = {}  # by number
        self.store = _core.protocol.Server(world.plan.shards, TOKEN)
        self.paused_until = 0.0
        self.fenced_frames = 0  # of clients that a newer incarnation has replaced here

    def on_frame(self, connection: Connection, frame: bytes) -> None:
        self.fenced_frames += connection.incarnation < self._newest.get(connection.who, 1)
        if connection.refused:
            return
        if connection.session is None:
            connection.session = _core.protocol.Session(self.store)
            self._sessions[connection.session.number()] = connection
        session = connection.session
        greeting = not session.proved()
        replies, still_open = session.feed(frame)
        if greeting and session.proved():
            self._welcomed(connection)
        for reply in replies:
            self._world.network.send(connection, TO_CLIENT, reply)
        self.deliver_mail()
        if not still_open:
            connection.refused = True
            self._world.closed_by_server(connection)

    def deliver_mail(self) -> list[tuple[int, bytes]]:
        """Answers that waited, and are ready; gives those to sessions that no connection is to."""
        others = []
        for number, reply in self.store.mail():
            if number in self._sessions:
                self._world.network.send(self._sessions[number], TO_CLIENT, reply)
            else:
                others.append((number, reply))
        return others

    def _welcomed(self, connection: Connection) -> None:
        before = self._newest.get(connection.who, 1)
        if connection.incarnation > before:
            self._newest[connection.who] = connection.incarnation
            tables = self._world.verifier.read_all()
            self._world.ledger.freeze(self._index, connection.who, connection.incarnation, tables)


class SimulatedClient:
    """A client process: crashes, and comes back under the same id as the next incarnation."""

    def __init__(self, world: World, who: int) -> None:
        self._world = world
        self._who = who
        self._rng = random.Random(f"client {who} {world.plan.seed}")
        self.incarnation = 0
        self.paused_until = 0.0
        self.blocked = 0  # how often the window was full
        self.down = True
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self._begin_life(self._who + 1)

    def _begin_life(self, client_id: int) -> None:
        world = self._world
        self.down = False
        self._machine = _core.protocol.Client(
            client_id, self.incarnation, world.plan.servers, world.placement
        )
        for spec in world.specs:
            self._machine.declare(spec)
        self._backlog: deque[Action] = deque()
        self._pushes: dict[int, tuple[int, Push]] = {}  # by seq: operation, push
        self._reads: dict[int, Read] = {}  # by operation
        self._seq = 0
        self._low = 1
        self._links: list[Connection | None] = [None] * world.plan.servers
        self._greeted = [False] * world.plan.servers
        self._heard = [True] * world.plan.servers
        for server in range(world.plan.servers):
            self._dial(server)
            self._arm(server, self.incarnation)

    def crash(self, back_after: float) -> None:
        if self.down:
            return
        self.down = True
        for link in self._links:
            if link is not None:
                self._world.network.cut(link)
        self._world.clock.at(self._world.clock.now + back_after, self.start)

    def idle(self) -> bool:
        return not self.down and not self._backlog and self._machine.open() == 0

    def link(self, server: int) -> Connection | None:
        return None if self.down else self._links[server]

    def work(self, action: Action) -> None:
        """Push or pull, as soon as the window has room. What a dead client would do is never begun."""
        if not self.down:
            self._backlog.append(action)
            self._pump()

    def on_frame(self, connection: Connection, frame: bytes) -> None:
        if self.down or connection.incarnation != self.incarnation:
            return
        server = connection.server
        current = connection is self._links[server]
        if self._world.plan.stream and not current:
            return  # nobody reads a socket that was closed
        kind, code, seq, _ = _core.protocol.head(frame)
        if kind == REPLY:
            self._heard[server] = True
            self._machine.incoming(server, frame)
            self._settle(seq)
            self._pump()
        elif kind == REFUSE and code == FENCED:
            self._fenced()
        elif current and kind == CHALLENGE and not self._greeted[server]:
            self._send(connection, self._machine.proof(TOKEN, frame))
        elif current and kind == WELCOME and not self._greeted[server]:
            self._greeted[server] = True
            self._flush(server)
        elif current and kind == REFUSE:
            self.on_loss(connection)

    def _fenced(self) -> None:
        raise Violation(f"client {self._who}: incarnation {self.incarnation} is fenced, and it is the newest")

    def on_loss(self, connection: Connection) -> None:
        """The connection is known to be gone."""
        if not self.down and connection is self._links[connection.server]:
            self._machine.lost(connection.server)
            self._dial(connection.server)

    def _dial(self, server: int) -> None:
        old = self._links[server]
        if old is not None:
            self._world.network.cut(old)
        connection = Connection(self._who, self.incarnation, server)
        self._links[server] = connection
        self._greeted[server] = False
        self._heard[server] = True
        self._send(connection, self._machine.hello())

    def _send(self, connection: Connection, frame: bytes) -> None:
        self._world.network.send(connection, TO_SERVER, frame)

    def _arm(self, server: int, incarnation: int) -> None:
        wait = TIMER_MS * self._rng.uniform(0.7, 1.5)
        self._world.clock.at(self._world.clock.now + wait, lambda: self._on_timer(server, incarnation))

    def _on_timer(self, server: int, incarnation: int) -> None:
        if self.down or incarnation != self.incarnation or self._world.finished():
            return
        if self._world.clock.now >= self.paused_until:
            silent = not self._heard[server]
            self._heard[server] = False
            if silent and (not self._greeted[server] or self._machine.waits_for(server)):
                self._try_again(server)
        self._arm(server, incarnation)

    def _try_again(self, server: int) -> None:
        self._machine.lost(server)
        link = self._links[server]
        if self._greeted[server] and link is not None and not link.cut and self._rng.random() < 0.5:
            self._flush(server)
        else:
            self._dial(server)

    def _pump(self) -> None:
        while self._backlog and self._begin(self._backlog[0]):
            self._backlog.popleft()
        for server in range(len(self._links)):
            self._flush(server)

    def _begin(self, action: Action) -> bool:
        if action.kind == "pull":
            table, *numbers = action.detail
            keys = np.array(numbers)
            operation = self._machine.pull(TABLES[table], KEY_ARRAY[keys])
            self._reads[operation] = self._world.ledger.begin_read(table, keys)
            return True
        table, column, *numbers = action.detail
        keys = np.array(numbers)
        grads = np.zeros((len(numbers), self._world.specs[table].dim), np.float32)
        grads[:, column] = -1.0
        operation = self._machine.push(TABLES[table], KEY_ARRAY[keys], grads)
        if operation == 0:
            if len(self._pushes) < WINDOW and self._seq + 1 < min(self._pushes) + WINDOW:
                raise Violation(f"client {self._who}: the window is closed with {len(self._pushes)} open")
            self.blocked += 1
            return False
        self._seq += 1
        weights = np.bincount(keys, minlength=len(KEYS)).astype(np.float32)
        push = Push(self._who, self.incarnation, table, column, weights, self._seq)
        self._pushes[self._seq] = (operation, push)
        self._world.ledger.begin_push(push)
        return True

    def _flush(self, server: int) -> None:
        connection = self._links[server]
        if not self._greeted[server] or connection is None:
            return
        for frame in self._machine.outgoing(server):
            kind, _, seq, low = _core.protocol.head(frame)
            if kind == PUSH:
                self._check_window(seq, low)
            self._send(connection, frame)

    def _check_window(self, seq: int, low: int) -> None:
        if not self._low <= low <= seq < low + WINDOW:
            raise Violation(f"client {self._who}: push {seq} is sent with low {low}, earlier was {self._low}")
        if self._pushes and low > min(self._pushes):
            raise Violation(f"client {self._who}: low is {low}, but push {min(self._pushes)} is open")
        self._low = low

    def _settle(self, seq: int) -> None:
        """A reply came: was something finished by it?"""
        if seq != 0:
            operation, push = self._pushes.get(seq, (0, None))
            if push is not None and self._machine.done(operation):
                self._succeeded(operation, f"push {seq}")
                del self._pushes[seq]
                self._world.ledger.ack(push)
            return
        for operation in [number for number in self._reads if self._machine.done(number)]:
            self._succeeded(operation, "a pull")
            self._world.ledger.end_read(self._reads.pop(operation), self._machine.rows(operation))

    def _succeeded(self, operation: int, what: str) -> None:
        if self._machine.code(operation) != 0:
            code = self._machine.code(operation)
            raise Violation(f"client {self._who}: {what} failed with code {code}")

    def check_end(self) -> None:
        """All is acknowledged: `low` has followed."""
        if self._machine.low() != self._seq + 1:
            raise Violation(f"client {self._who}: low is {self._machine.low()} after {self._seq} pushes")


class Verifier:
    """Declares the tables and reads them, with no network between."""

    def __init__(self, world: World, servers: list[SimulatedServer]) -> None:
        self._machine = _core.protocol.Client(VERIFIER, 1, len(servers), world.placement)
        self._sessions = [_core.protocol.Session(server.store) for server in servers]
        for session in self._sessions:
            [challenge], _ = session.feed(self._machine.hello())
            session.feed(self._machine.proof(TOKEN, challenge))
            for spec in world.specs:
                session.feed(self._machine.declare(spec))

    def read_all(self) -> list[np.ndarray]:
        """Every row of every table, now."""
        tables = []
        for table in TABLES:
            operation = self._machine.pull(table, KEY_ARRAY)
            for server, session in enumerate(self._sessions):
                for frame in self._machine.outgoing(server):
                    for reply in session.feed(frame)[0]:
                        self._machine.incoming(server, reply)
            assert self._machine.done(operation)
            tables.append(self._machine.rows(operation))
        return tables
