"""The shipped coordinator as a simulated process: `CoordinatorServer` under virtual time, its connections.

It journals, answers, sets its timer and evicts by its own code; only sockets and handshakes are left out.
Its journal is in memory and outlives it. It is killed before or after it journals, or between two answers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

from shoal.config import CoordinatorOptions
from shoal.errors import Refused
from shoal.fleet import coordinator_server
from shoal.fleet.coordinator import Coordinator
from shoal.fleet.coordinator_server import CoordinatorServer
from shoal.fleet.decisions import Decision, decode, encode
from shoal.fleet.pulse import Beat, Hello, PulseOrder
from shoal.store import messages as m

from .network import Clock

UP, DOWN = 0, 1  # to the coordinator, and from it
NOTICE_MS = 30.0  # until an end sees that its connection is gone
RETRY_MS = (50.0, 100.0, 200.0, 400.0, 800.0)
WELCOME = "welcome"  # to a pulse
_TICK_MS = 0.01  # a timer is not early by a rounding


class Killed(BaseException):
    """The process ended here."""


class MemoryJournal:
    """The decisions in force, as `shoal.fleet.journal` says."""

    holds = True

    def __init__(self, burn: Callable[[], None]) -> None:
        self._burn = burn
        self._kept: dict[str, bytes] = {}

    def append(self, decisions: Sequence[Decision]) -> None:
        if not decisions:
            return
        self._burn()
        for decision in decisions:
            self._kept.pop(decision.key, None)
            self._kept[decision.key] = encode(decision)
        self._burn()

    def __iter__(self) -> Iterator[Decision]:
        return map(decode, list(self._kept.values()))

    def close(self) -> None:
        """Nothing is open."""


class Node(Protocol):
    """Who has connections to the coordinator."""

    paused_until: float
    silent: list[float]  # by direction: until when nothing of it arrives


class Line:
    """A connection to the coordinator: in order, and lost as a whole; what is under way then may arrive."""

    def __init__(self, process: CoordinatorProcess, node: Node, heard: Callable[[Any], None],
                 lost: Callable[[], None]) -> None:  # fmt: skip
        self._process, self._clock, self._rng = process, process.clock, process.rng
        self.node, self._heard, self._lost = node, heard, lost
        self._due = [0.0, 0.0]
        self._reach = [float("inf"), float("inf")]
        self._cut = self._dropped = False
        self._pulse = False
        self.life = process.life
        self.peer = 0  # at the coordinator, once it has heard something
        process.lines[self] = None
        if process.down:
            self.cut()

    def send(self, message: Any) -> None:
        """To the coordinator."""
        self._pulse = self._pulse or isinstance(message, Hello)
        self._carry(UP, lambda: self._process.hear(self, message))

    def write(self, data: bytes) -> None:
        """From the coordinator: what it does with a StreamWriter."""
        self._process.burn()
        message: Any = m.decode(data[m.LENGTH_BYTES :]) if not self._pulse else _order(data)
        self._carry(DOWN, lambda: None if self._dropped else self._heard(message))

    def welcome(self) -> None:
        self._carry(DOWN, lambda: None if self._dropped else self._heard(WELCOME))

    def cut(self) -> None:
        """It ends, and both sides see that in their own time."""
        if self._cut:
            return
        self._cut = True
        self._process.lines.pop(self, None)
        now = self._clock.now
        self._reach = [self._rng.choice((now, float("inf"))) for _ in (UP, DOWN)]
        for direction, event in ((UP, lambda: self._process.closed(self)), (DOWN, self._noticed)):
            self._due[direction] = max(self._due[direction], now) + self._rng.uniform(0, NOTICE_MS)
            self._clock.at(self._due[direction], self._awake(direction, event))

    def drop(self) -> None:
        """The node ends it, or is no more."""
        self._dropped = True
        self.cut()

    def _noticed(self) -> None:
        if not self._dropped:
            self._dropped = True
            self._lost()

    def _carry(self, direction: int, event: Callable[[], None]) -> None:
        if self._cut:
            return
        now = self._clock.now
        due = now + self._rng.uniform(0, self._process.delay_ms)
        due = self._due[direction] = max(due, self.node.silent[direction], self._due[direction])
        arrive = self._awake(direction, event)
        self._clock.at(due, lambda: arrive() if due <= self._reach[direction] else None)

    def _awake(self, direction: int, event: Callable[[], None]) -> Callable[[], None]:
        node: Any = self._process if direction == UP else self.node

        def happen() -> None:
            if self._clock.now < node.paused_until:
                self._clock.at(node.paused_until, happen)
            else:
                event()

        return happen


def _order(data: bytes) -> PulseOrder:
    kind, number = int.from_bytes(data[:4], "little"), int.from_bytes(data[4:], "little")
    return PulseOrder(kind == 1, number)


class Asker:
    """What `ControlClient` does: one question at a time; where its connection ends it is asked again."""

    def __init__(self, process: CoordinatorProcess, node: Node) -> None:
        self._process, self._node = process, node
        self._line: Line | None = None
        self._numbers = itertools.count(1)
        self._now = 0  # the question that waits

    def ask(self, request: m.Request, seconds: float, answered: Callable[[Any], None]) -> None:
        """`answered` gets the reply, or None when the time is over."""
        number = self._now = next(self._numbers)
        pauses = iter(RETRY_MS)
        clock = self._process.clock

        def over(answer: Any) -> None:
            if self._now == number:
                self._now = 0
                answered(answer)

        def late() -> None:
            if clock.now < self._node.paused_until:
                clock.at(self._node.paused_until, late)
            elif self._now == number:
                self.drop()
                over(None)

        def lost() -> None:
            self._line = None
            clock.at(clock.now + next(pauses, RETRY_MS[-1]), ask)

        def ask() -> None:
            if self._now != number or self._process.over:
                return
            if self._line is None:
                self._line = Line(self._process, self._node, over, lost)
            else:
                self._line._heard, self._line._lost = over, lost
            self._line.send(request)

        clock.at(clock.now + 1000 * seconds, late)
        ask()

    def drop(self) -> None:
        """End the connection; the next question makes another."""
        if self._line is not None:
            self._line.drop()
            self._line = None

    def close(self) -> None:
        """Nobody waits any more."""
        self._now = 0
        self.drop()


class CoordinatorProcess:
    """Is killed and started again, sleeps, and otherwise does what `CoordinatorServer` does."""

    def __init__(self, clock: Clock, options: CoordinatorOptions, *, seed: str, delay_ms: float,
                 quiet_after: float) -> None:  # fmt: skip
        self.clock, self._options, self.delay_ms = clock, options, delay_ms
        self.rng = random.Random(f"coordinator {seed}")
        self._quiet_after = quiet_after
        self._fuse = 0
        self._away_ms = 0.0
        self.lines: dict[Line, None] = {}
        self.journal = MemoryJournal(self.burn)
        self.paused_until = 0.0
        self.life = self.deaths = 0
        self.down = True
        self.over = False  # the run ends: nothing is begun any more
        self.on_death: Callable[[], None] = lambda: None  # of its threads

    @property
    def coordinator(self) -> Coordinator | None:
        """The state machine of now, if it runs."""
        return None if self.down else self._server._coordinator

    def restored(self) -> Coordinator:
        """What another one would be that begins with the journal."""
        made = Coordinator(self._options)
        for decision in self.journal:
            made.restore(decision)
        return made

    def start(self) -> None:
        self.life += 1
        self.down = False
        self.paused_until = 0.0
        self._server = CoordinatorServer(self._options, "simulated")
        restored = list(self.journal)
        self.do(lambda: self._server.lead(self.journal, restored, lambda why: None))

    def light(self, operations: int, away_ms: float) -> None:
        """Killed after so many more operations: writes to the journal, and answers."""
        self._fuse, self._away_ms = operations, away_ms
        if operations == 0:
            self._die()

    def burn(self) -> None:
        """One operation."""
        if self._fuse > 0 and self.clock.now < self._quiet_after:
            self._fuse -= 1
            if self._fuse == 0:
                raise Killed

    def do(self, event: Callable[[], None]) -> None:
        try:
            if not self.down:
                event()
        except Killed:
            self._die()

    def _die(self) -> None:
        if self.down:
            return
        self.down = True
        self.deaths += 1
        self.on_death()
        for line in list(self.lines):
            line.cut()
        self.clock.at(self.clock.now + self._away_ms, self.start)

    def hear(self, line: Line, message: Any) -> None:
        """What CoordinatorServer does with a message."""
        if line.life != self.life or self.down:
            return
        server = self._server
        if line.peer == 0:
            line.peer = next(server._peers)
            server._writers[line.peer] = line  # type: ignore[assignment]
        peer, coordinator = line.peer, server._coordinator
        assert coordinator is not None

        def handle() -> None:
            if isinstance(message, Hello):
                self._open_pulse(line, message)
            elif isinstance(message, Beat):
                server._carry_out(coordinator.beat(peer, message, server._now()))
            else:
                server._carry_out(coordinator.handle(peer, message, server._now()))

        try:
            self.do(handle)
        except Refused:
            line.cut()

    def _open_pulse(self, line: Line, hello: Hello) -> None:
        server = self._server
        if line.life != self.life or self.down or line.peer not in server._writers:
            return
        if not server._not_holding.is_set():
            self.clock.at(self.clock.now + 5, lambda: self.do(lambda: self._open_pulse(line, hello)))
            return
        assert server._coordinator is not None
        server._coordinator.open_pulse(line.peer, hello, server._now())
        server._set_timer()
        line.welcome()

    def closed(self, line: Line) -> None:
        if line.life != self.life or self.down or self._server._writers.pop(line.peer, None) is None:
            return
        server, coordinator = self._server, self._server._coordinator
        assert coordinator is not None
        self.do(lambda: server._carry_out(coordinator.closed(line.peer, server._now())))

    # What its module takes for asyncio's loop.

    def call_later(self, seconds: float, event: Callable[[], None]) -> SimpleNamespace:
        timer, life = SimpleNamespace(off=False), self.life

        def happen() -> None:
            if timer.off or life != self.life or self.over:
                return
            if self.clock.now < self.paused_until:
                self.clock.at(self.paused_until, happen)
            else:
                self.do(event)

        self.clock.at(self.clock.now + 1000 * seconds + _TICK_MS, happen)

        def cancel() -> None:
            timer.off = True

        timer.cancel = cancel
        return timer

    def call_soon_threadsafe(self, event: Callable[[], None]) -> None:
        self.call_later(0.0, event)


class _Event:
    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False


class Stage:
    """What the coordinator's module takes for time, chance, threads: `process` is the one that runs."""

    process: CoordinatorProcess
    evict: Callable[..., None]

    def __init__(self) -> None:
        chance = random.Random("client ids")
        self.modules = {
            "time": SimpleNamespace(monotonic=lambda: self.process.clock.now / 1000),
            "asyncio": SimpleNamespace(Event=_Event, get_running_loop=lambda: self.process),
            "secrets": SimpleNamespace(randbits=chance.getrandbits),
            "evict_in_background": lambda _address, _token, *what: self.evict(*what),
        }


@contextmanager
def simulated_coordinator() -> Iterator[Stage]:
    """Until it ends, the coordinator's module is on a stage."""
    stage = Stage()
    kept = {name: getattr(coordinator_server, name) for name in stage.modules}
    for name, value in stage.modules.items():
        setattr(coordinator_server, name, value)
    try:
        yield stage
    finally:
        for name, value in kept.items():
            setattr(coordinator_server, name, value)
