"""The simulated network: connections whose frames are delayed, reordered, doubled, dropped and cut.

Frames of a connection that was cut may still arrive, late. Nothing here looks into a frame.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal import _core

from .plan import Plan

TO_SERVER, TO_CLIENT = 0, 1
_STRAGGLERS = 0.05


class Clock:
    """Virtual time: events in order of time, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), event))

    def step(self) -> bool:
        """Let the next event happen; false when there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(eq=False)
class Connection:
    """One connection. The server's session begins with its first frame, so it may begin late."""

    who: int
    incarnation: int
    server: int
    session: _core.protocol.Session | None = None
    refused: bool = False  # the server has closed it
    cut: bool = False
    reach: list[float] = field(default_factory=lambda: [0.0, 0.0])  # once cut: frames due later are lost
    stream: bool = False  # keeps order and loses nothing, whatever the plan says
    lag: float = 0.0  # once cut: what still arrives is so much later
    last: list[float] = field(default_factory=lambda: [0.0, 0.0])  # streams: when the newest frame is due


class Network:
    """Carries frames; `deliver(connection, direction, frame)` is called when one arrives."""

    def __init__(self, plan: Plan, clock: Clock, deliver: Callable[[Connection, int, bytes], None]) -> None:
        self._plan = plan
        self._clock = clock
        self._deliver = deliver
        self._rng = random.Random(f"network {plan.seed}")
        self._muted: dict[tuple[int, int, int], float] = {}  # (client, server, direction) -> until
        self.frames = 0

    def mute(self, who: int, server: int, direction: int, until: float) -> None:
        self._muted[who, server, direction] = until

    def cut(self, connection: Connection) -> None:
        """End a connection. What is under way arrives, is lost, or arrives in part and late."""
        if connection.cut:
            return
        connection.cut = True
        now, rng = self._clock.now, self._rng
        for direction in (TO_SERVER, TO_CLIENT):
            connection.reach[direction] = rng.choice((now, now + rng.uniform(0, 20), float("inf")))
        connection.lag = rng.choice((0.0, rng.uniform(0, self._plan.late_ms)))

    def send(self, connection: Connection, direction: int, frame: bytes) -> None:
        plan, rng, now = self._plan, self._rng, self._clock.now
        self.frames += 1
        faulty = now < plan.quiet_after
        muted_until = self._muted.get((connection.who, connection.server, direction), 0.0)
        due = now + rng.uniform(0, plan.delay_ms)
        if plan.stream or connection.stream:
            due = max(due, muted_until, connection.last[direction])
            connection.last[direction] = due
        elif faulty:
            if now < muted_until or rng.random() < plan.drop:
                return
            if rng.random() < _STRAGGLERS:
                due += rng.uniform(0, plan.late_ms)
            if rng.random() < plan.double:
                self._post(connection, direction, frame, due + rng.uniform(0, plan.late_ms))
        self._post(connection, direction, frame, due)

    def _post(self, connection: Connection, direction: int, frame: bytes, due: float) -> None:
        def arrive() -> None:
            if not connection.cut:
                self._deliver(connection, direction, frame)
            elif due <= connection.reach[direction]:
                late = self._clock.now + connection.lag
                self._clock.at(late, lambda: self._deliver(connection, direction, frame))

        self._clock.at(due, arrive)
