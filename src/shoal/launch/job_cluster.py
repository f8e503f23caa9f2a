"""The coordinator and the servers of a job: what ends is replaced where it can be; servers come and go."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, Unavailable
from shoal.fleet.local import LocalCluster, ServerHandle
from shoal.launch.records import ServerRecord
from shoal.launch.verdict import Verdict

__all__ = ["JobCluster"]


class JobCluster:
    """Looks after a cluster. `watch` calls back when a process ends, `say` tells the user what happened.

    Links to the logs of its processes are in `logs`.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        verdict: Verdict,
        replicas: int,
        logs: Path,
        *,
        watch: Callable[[int, Callable[[], None]], None],
        say: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._verdict = verdict
        self._replicas = replicas
        self._logs = logs
        self._watch = watch
        self._say = say
        self._leaving: set[int] = set()
        self._coordinator_pids: set[int] = set()
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

    def scale(self, count: int) -> bool:
        """Go on with so many servers, the newest leave first; whether that is all.

        Of new ones one is started, which takes a moment: call again for the next. Shards then move one by
        one: to the new ones, or away from those that leave, which end after that.
        """
        staying = [s for s in self._cluster.servers if s.alive and s.index not in self._leaving]
        for server in reversed(staying[count:]):
            self._cluster.begin_removal(server.index)
            self._leaving.add(server.index)
        if len(staying) < count:
            self._add()
        return len(staying) + 1 >= count

    def _add(self) -> ServerHandle:
        new = self._cluster.add_server()
        self._watch_server(new)
        return new

    def _watch_server(self, server: ServerHandle) -> None:
        self._watch(server.pid, partial(self._server_ended, server))
        self._link_logs()

    def _server_ended(self, server: ServerHandle) -> None:
        if self._verdict.ending is not None:
            return
        try:
            self._say(self._go_on_without(server))
        except ShoalError as error:
            self._say(str(error))
            self._verdict.server_lost(server.index, server.pid)

    def _go_on_without(self, server: ServerHandle) -> str:
        """What is said of it. Raises an error where its rows are nowhere else."""
        leaves = server.index in self._leaving
        if self._replicas == 0 and not leaves:
            raise Unavailable(f"server {server.index} has the only copy of its rows")
        # Of one that has left in order nobody has to be told. One that was killed before is given up by this.
        self._cluster.evict_server(server.index, f"its process, pid {server.pid}, has ended")
        name = f"server {server.index} (pid {server.pid})"
        if leaves:
            return f"{name} has left; its rows are on the others"
        text = f"{name} has ended; the copies of its rows go on"
        if not self._verdict.server_replaced():
            return text
        return f"{text}, and server {self._add().index} takes its place"

    def _watch_coordinators(self) -> None:
        for pid in set(self._cluster.coordinator_pids) - self._coordinator_pids:
            self._coordinator_pids.add(pid)
            self._watch(pid, partial(self._coordinator_ended, pid))

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
