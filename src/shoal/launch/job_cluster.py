"""The coordinator and the servers of a job: what ends is replaced where it can be; servers come and go.

Nothing here waits: a server that starts says on its stdout when it has joined, and shards are reloaded by a
process of its own, so that deaths are seen meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import Refused, ShoalError, Timeout, Unavailable
from shoal.fleet.child import Child, stands_still
from shoal.fleet.local import LocalCluster, ServerHandle
from shoal.fleet.losses import describe
from shoal.launch.records import ServerRecord
from shoal.launch.saver import Reload
from shoal.launch.verdict import Verdict
from shoal.store.messages import Lost

# A lost shard that is not back by then ends the job; most of it is for reading a large checkpoint.
_RELOAD_S = 600.0
# Clients say within moments of a takeover what they lost by it.
_LOOK_S = 15.0
_LOOK_EVERY_S = 0.5
_STATUS_S = 0.2
# How long the coordinator is asked at a time to go on without a server, while all else waits; how often, and
# when it is asked no more.
_FIRST_ASK_S, _ASK_S, _ASK_EVERY_S, _ASK_MAX_S = 2.0, 0.5, 1.0, 60.0
# A server that stands still for so long may have been given up.
_STILL_S = 2.0


class JobCluster:
    """Looks after a cluster. `watch_once` calls back when a descriptor is readable, `say` tells the user.

    `checkpoint` is where lost shards are reloaded from, if anywhere. Links to the logs of its processes are
    in `logs`. `stop_workers` ends all and then calls back, `start_workers` starts them again.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        verdict: Verdict,
        checkpoint: str | None,
        logs: Path,
        *,
        watch_once: Callable[[int, Callable[[], None]], None],
        say: Callable[[str], None],
        stop_workers: Callable[[Callable[[], None]], None],
        start_workers: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._verdict = verdict
        self._checkpoint = checkpoint
        self._logs = logs
        self._watch_once = watch_once
        self._say = say
        self._stop_workers = stop_workers
        self._start_workers = start_workers
        self._leaving: set[int] = set()
        self._adding = 0  # servers that are to be started, one after the other, or have not joined yet
        self._joining: Child | None = None
        self._when_joined: list[Callable[[], None]] = []
        self._coordinator_pids: set[int] = set()
        self._ended: dict[ServerHandle, float] = {}  # the coordinator is to be told, and when they had
        self._ask_at = 0.0
        self._still_since: dict[ServerHandle, float] = {}
        self._lost: set[int] = set()  # servers whose shards nobody has
        self._together = False  # all shards and workers go back with them
        self._stopping = False  # the workers have not ended yet
        self._reload: Reload | None = None
        self._reload_until = 0.0
        self._look_until = self._look_at = 0.0
        self._losses: list[tuple[Lost, ...]] = [(), ()]  # that were said, and as they were seen last
        for server in cluster.servers:
            self._watch_server(server)
        self._watch_coordinators()

    @property
    def record(self) -> dict[str, Any]:
        """What the job's record has of it; servers that are gone, too."""
        return {
            "coordinator": self._cluster.pid,
            "servers": tuple(
                ServerRecord(index=s.index, pid=s.pid, address=s.address) for s in self._cluster.servers
            ),
        }

    @property
    def recovering(self) -> bool:
        """Whether shards are missing, and are on their way back."""
        return bool(self._lost or self._ended) and self._verdict.ending is None

    def scale(self, count: int, then: Callable[[], None]) -> None:
        """Go on with so many servers, the newest leave first; `then`: new ones have joined.

        Shards move one by one after that: to the new ones, or away from those that leave, which then end.
        """
        staying = [s for s in self._cluster.servers if s.alive and s.index not in self._leaving]
        for server in reversed(staying[count:]):
            self._cluster.begin_removal(server.index)
            self._leaving.add(server.index)
        for _ in range(count - len(staying) - self._adding):
            self._add()
        self._after_joining(then)

    def tick(self, now: float) -> None:
        """Tell the coordinator of deaths that it does not know of, and look what it has found."""
        for pid in self._cluster.kill_still_coordinators(now):
            self._say(f"coordinator (pid {pid}) stood still and was killed")
        if self._lost and self.recovering and self._reload is None and now > self._reload_until:
            self._give_up(f"no server took them within {_RELOAD_S:g} s")
        if self._ended and self.recovering and now > self._ask_at:
            for server, since in list(self._ended.items()):
                self._go_on_without(server, since, now)
        still = self._standing_still(now)
        if now < self._look_at or not (now < self._look_until or still):
            return
        self._look_at = now + _LOOK_EVERY_S
        try:
            status = self._cluster.status(_STATUS_S)
        except (Unavailable, Timeout):  # a coordinator that is being started again
            return
        given_up = {info.index for info in status.servers if info.state == "evicted"}
        for server in still:
            if server.index in given_up:  # and refused by all if it wakes; the rest follows from its end
                self._say(f"{_name(server)} stands still and was given up: it is killed")
                os.kill(server.pid, signal.SIGKILL)
        self._tell_losses(status.lost)

    def _tell_losses(self, lost: tuple[Lost, ...]) -> None:
        said, before = self._losses
        self._losses[1] = lost
        if lost == before != said:  # all have said it
            self._losses[0] = lost
            self._say(describe([one for one in lost if one not in said]))

    def _standing_still(self, now: float) -> list[ServerHandle]:
        """Servers that were stopped by a signal a while ago."""
        alive = [server for server in self._cluster.servers if server.alive]  # or its pid may be another's
        stopped = [server for server in alive if stands_still(server.pid)]
        self._still_since = {server: self._still_since.get(server, now) for server in stopped}
        return [server for server, since in self._still_since.items() if now >= since + _STILL_S]

    # Servers.

    def _add(self) -> str:
        """Have one more; what it will be called."""
        name = f"server {len(self._cluster.servers) + self._adding}"
        self._adding += 1
        self._start_next()
        return name

    def _start_next(self) -> None:
        if self._adding and self._joining is None:
            self._joining = self._cluster.begin_server()
            assert self._joining.process.stdout is not None
            self._watch_once(self._joining.process.stdout.fileno(), self._joined)

    def _joined(self) -> None:
        assert self._joining is not None
        new, self._joining = self._joining, None
        self._adding -= 1
        try:
            self._watch_server(self._cluster.joined(new))
        except ShoalError as error:
            self._say(str(error))
        self._start_next()
        self._after_joining()

    def _after_joining(self, *then: Callable[[], None]) -> None:
        self._when_joined += then
        while self._when_joined and not self._adding:
            self._when_joined.pop(0)()

    def _watch_server(self, server: ServerHandle) -> None:
        self._watch_process(server.pid, partial(self._server_ended, server))
        self._link_logs()

    def _watch_process(self, pid: int, then: Callable[[], None]) -> None:
        descriptor = os.pidfd_open(pid)

        def ended() -> None:
            os.close(descriptor)
            then()

        self._watch_once(descriptor, ended)

    def _server_ended(self, server: ServerHandle) -> None:
        if self._verdict.ending is None:
            now = time.monotonic()
            self._go_on_without(server, now, now)

    def _go_on_without(self, server: ServerHandle, since: float, now: float) -> None:
        told = self._ended.pop(server, None) is not None
        ask_s = _ASK_S if told else _FIRST_ASK_S
        try:
            try:
                # Of one that has left in order nobody has to be told; one that was killed is given up.
                why = f"its process, pid {server.pid}, has ended"
                self._cluster.evict_server(server.index, why, ask_s)
                self._replace(server)
            except Refused as error:
                shards = self._cluster.shards_of({*self._lost, server.index}, ask_s)
                self._lose(server, shards, error)
        except (Timeout, Unavailable) as error:
            self._ended[server], self._ask_at = since, now + _ASK_EVERY_S
            if now > since + _ASK_MAX_S:
                self._say(f"{_name(server)} has ended: {error}")
                self._verdict.nobody_answers(server.index, server.pid, _ASK_MAX_S)
            elif not told:
                self._say(f"{_name(server)} has ended, and the coordinator does not answer: it is told later")
        except ShoalError as error:
            self._end(server, str(error))

    def _replace(self, server: ServerHandle) -> None:
        self._look_until = time.monotonic() + _LOOK_S
        if server.index in self._leaving:
            self._say(f"{_name(server)} has left; its rows are on the others")
            return
        text = f"{_name(server)} has ended; the copies of its rows go on"
        if self._verdict.server_replaced():
            text += f", and {self._add()} takes its place"
        self._say(text)

    def _end(self, server: ServerHandle, why: str) -> None:
        self._say(why)
        self._verdict.server_lost(server.index, server.pid)

    # Shards that nobody has.

    def _lose(self, server: ServerHandle, shards: Collection[int], error: ShoalError) -> None:
        if self._checkpoint is None or not self._verdict.server_replaced():
            self._end(server, str(error))
            return
        self._lost.add(server.index)
        self._reload_until = time.monotonic() + _RELOAD_S
        self._look_until = time.monotonic() + _LOOK_S
        text = f"{_name(server)} has ended, with the only copy of {len(shards)} shards"
        if 0 not in shards:
            self._say(f"{text}; they go back to the last checkpoint, and {self._add()} takes them")
        else:
            self._say(
                f"{text}, clocks and data ledger among them: all shards and workers go back to the last "
                f"checkpoint, and {self._add()} takes its place"
            )
            if not self._together:
                self._together = self._stopping = True
                self._stop_workers(self._workers_stopped)
        self._after_joining(self._begin_reload)

    def _workers_stopped(self) -> None:
        self._stopping = False
        self._begin_reload()

    def _begin_reload(self) -> None:
        if self._lost and self.recovering and not (self._adding or self._stopping or self._reload):
            assert self._checkpoint is not None
            log = self._logs / "checkpoint.log"
            self._reload = Reload(self._cluster, self._checkpoint, self._lost, self._together, log)
            self._watch_process(self._reload.pid, self._reload_ended)

    def _reload_ended(self) -> None:
        assert self._reload is not None
        reload, self._reload = self._reload, None
        done, said = reload.end()
        if self._verdict.ending is not None:
            return
        if done:
            self._lost -= reload.lost
            self._look_until = time.monotonic() + _LOOK_S
            self._say(said)
            if self._together and not self._lost:
                self._together = False
                self._start_workers()
        elif not reload.may_help_again or time.monotonic() > self._reload_until:
            self._give_up(f"no checkpoint could be gone back to: {said}")
        self._begin_reload()

    def _give_up(self, why: str) -> None:
        self._end(next(server for server in self._cluster.servers if server.index in self._lost), why)

    def close(self) -> None:
        """End what is under way."""
        if self._reload is not None:
            self._reload.kill()

    # The coordinator.

    def _watch_coordinators(self) -> None:
        for pid in set(self._cluster.coordinator_pids) - self._coordinator_pids:
            self._coordinator_pids.add(pid)
            self._watch_process(pid, partial(self._coordinator_ended, pid))

    def _coordinator_ended(self, pid: int) -> None:
        # No step needs it: the workers go on.
        self._cluster.look_after_coordinators()
        again = pid not in self._cluster.coordinator_pids
        self._watch_coordinators()
        self._say(f"coordinator (pid {pid}) has ended and {'was' if again else 'cannot be'} started again")

    def _link_logs(self) -> None:
        for path in self._cluster.directory.glob("*.log"):
            link = self._logs / path.name
            if not link.is_symlink():
                link.symlink_to(os.path.relpath(path, self._logs))


def _name(server: ServerHandle) -> str:
    return f"server {server.index} (pid {server.pid})"
