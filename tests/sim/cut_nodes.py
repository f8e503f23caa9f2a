"""Servers and workers that take part in cuts: the shipped `Parts`, and the hold of the compiled client."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shoal.fleet import parts
from shoal.fleet.parts import Parts
from shoal.fleet.pulse import Beat, BeatKind, PulseOrder
from shoal.store import messages as m

from .control import Line
from .coordinated_nodes import CoordinatedClient, CoordinatedServer, Evictor
from .plan import Action

if TYPE_CHECKING:
    from .cuts import CutWorld

SLOW_MS = (0.0, 30.0, 2500.0)  # until a server's thread gets a turn
BUSY_MS = 10.0


class Ended(BaseException):
    """The run is over: no `except Exception` keeps a thread."""


class Turn:
    """A thread of shipped code that blocks. It runs only while it is resumed, and who resumes it waits."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._over = False
        self._run = run
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._thread.start()

    def _body(self) -> None:
        self._go.acquire()
        try:
            if not self._over:
                self._run()
        except Ended:
            pass
        finally:
            self._back.release()

    def resume(self) -> None:
        if self._thread.is_alive() and not self._over:
            self._go.release()
            self._back.acquire()

    def pause(self) -> None:
        """By the thread itself: until it is resumed."""
        self._back.release()
        self._go.acquire()
        if self._over:
            raise Ended

    def end(self) -> None:
        if not self._over:
            self._over = True
            self._go.release()
            self._thread.join()


class _Orders(deque[m.PartOrder]):
    """The queue of `Parts`: who waits at it gives its turn away."""

    wait: Callable[[], None]

    def put(self, order: m.PartOrder) -> None:
        self.append(order)

    def get(self) -> m.PartOrder:
        while not self:
            self.wait()
        return self.popleft()

    def empty(self) -> bool:
        return not self


@contextmanager
def simulated_parts() -> Iterator[None]:
    """Until it ends, `shoal.fleet.parts` has no threads and descriptors of its own."""
    nothing = lambda *_: 0  # noqa: E731
    modules: dict[str, Any] = {
        "threading": SimpleNamespace(
            Thread=lambda **_: SimpleNamespace(start=nothing), get_native_id=nothing
        ),
        "os": SimpleNamespace(
            eventfd=nothing, eventfd_read=nothing, eventfd_write=nothing, setpriority=nothing,
            EFD_NONBLOCK=0, EFD_CLOEXEC=0, PRIO_PROCESS=0,
        ),
        "queue": SimpleNamespace(SimpleQueue=_Orders),
    }  # fmt: skip
    kept = {name: getattr(parts, name) for name in modules}
    for name, value in modules.items():
        setattr(parts, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(parts, name, value)


class _SlowStore:
    """A server's store as `Parts` sees it: others write to it between the images of two shards."""

    def __init__(self, store: Any, busy: Callable[[], None]) -> None:
        self._store, self._busy = store, busy

    def begin_image(self, shard: int) -> Any:
        self._busy()
        return self._store.begin_image(shard)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _SimulatedParts(Parts):
    """`Parts` whose thread has turns, and takes its time."""

    def __init__(self, server: CutServer) -> None:
        self._server = server
        self._turn = Turn(self._run)
        self._rests = False
        super().__init__(_SlowStore(server.memory, self._busy), None)  # type: ignore[arg-type]
        self._orders.wait = self._rest  # type: ignore[attr-defined]
        self._turn.resume()

    def _rest(self) -> None:
        self._rests = True
        self._turn.pause()

    def take(self, order: m.PartOrder) -> None:
        super().take(order)
        if self._rests:
            self._rests = False
            self._server.soon(self._server.slow_ms(), self._turn.resume)

    def _busy(self) -> None:
        self._server.soon(self._server.busy_ms(), self._turn.resume)
        self._turn.pause()

    def _check(self, order: m.PartOrder) -> None:
        self._busy()
        super()._check(order)

    def _report(self, report: m.PartReport) -> None:
        super()._report(report)
        self._server.soon(0.0, self._server.tell)

    def end(self) -> None:
        self._turn.end()


class CutServer(CoordinatedServer):
    """A server that writes its part of a cut."""

    def __init__(self, world: CutWorld, index: int) -> None:
        self._cuts = world
        super().__init__(world, index)
        self.parts = _SimulatedParts(self)
        self._speed = self._rng.choice(SLOW_MS)

    def soon(self, ms: float, event: Callable[[], None]) -> None:
        self._cuts.later(self, ms, lambda: None if self.dead else event())

    def slow_ms(self) -> float:
        if self._cuts.clock.now >= self._cuts.plan.quiet_after:
            return BUSY_MS
        return self._rng.uniform(0, self._rng.choice((BUSY_MS, self._speed)))

    def busy_ms(self) -> float:
        return self._rng.uniform(0, self._rng.choice((0.1, BUSY_MS)))

    def _take(self, order: m.PartOrder) -> None:
        self._cuts.ordered(order)
        self.parts.take(order)

    def tell(self) -> None:
        for report in self.parts.reports():
            self._cuts.judge.reported(self.index, report)
            self._registration.send(report)


class Holds(CoordinatedClient):
    """What `Pulse` and `RemoteClient::hold` do with orders, by the code of core/serve/hold.h. The pulse's
    thread does nothing else while it waits for what is in flight."""

    _cuts: CutWorld

    def _begin_life(self, client_id: int) -> None:
        self._orders: deque[tuple[PulseOrder, Line]] = deque()
        self._to_hold: tuple[int, Line] | None = None
        super()._begin_life(client_id)

    @property
    def who(self) -> int:
        return self._who

    @property
    def last_seq(self) -> int:
        return self._seq

    def _obey(self, order: PulseOrder, line: Line) -> None:
        self._orders.append((order, line))
        self._next_order()

    def _next_order(self) -> None:
        while self._orders and self._to_hold is None:
            order, line = self._orders.popleft()
            if order.hold:
                still_by = self._machine.told(order.number, self._cuts.clock.now / 1000)
                self._to_hold = asked = (order.number, line)
                self._later(still_by, lambda asked=asked: self._give_up(asked))  # type: ignore[misc]
                self._look_still()
            elif self._machine.holds(order.number):
                self._machine.release()
        self._pump()

    def _look_still(self) -> None:
        if self._to_hold is None or not self._machine.still():
            return
        number, line = self._to_hold
        self._to_hold = None
        until = self._machine.kept()
        self._cuts.judge.held(self, number)
        line.send(Beat(BeatKind.HELD, number, 0, self._seq, 0))
        self._later(until, lambda: self._machine.release() if self._machine.holds(number) else None)

    def _give_up(self, asked: tuple[int, Line]) -> None:
        if self._to_hold is asked:
            self._machine.not_still()
            self._to_hold = None
            self._next_order()

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        """At that time, or when it wakes later; in this life."""
        machine = self._machine

        def happen() -> None:
            if not self.down and machine is self._machine:
                event()
                self._pump()

        self._cuts.later(self, 1000 * seconds - self._cuts.clock.now, happen)

    def _settle(self, seq: int) -> None:
        super()._settle(seq)
        if not self.down:
            self._look_still()
            self._next_order()

    def _beat(self, line: Line) -> None:
        if self._to_hold is None:
            super()._beat(line)
        elif line is self._pulse and not self.down:
            self._cuts.later(self, BUSY_MS, lambda: self._beat(line))


class CutClient(Holds):
    """A worker that holds its pushes when it is told to."""

    def __init__(self, world: CutWorld, who: int) -> None:
        self._cuts = world
        super().__init__(world, who)

    def _begin(self, action: Action) -> bool:
        if action.kind == "push" and not self._machine.may_push():
            return False
        return super()._begin(action)


class CutEvictor(Holds, Evictor):
    """It has a pulse as all clients have."""

    def __init__(self, world: CutWorld, *what: Any) -> None:
        self._cuts = world
        super().__init__(world, *what)
