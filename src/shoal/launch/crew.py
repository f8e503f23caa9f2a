"""The processes of a job's workers: started, shown, ended with all that they had started, reaped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, BaseSelector

from shoal.launch.guardian import GRACE_S
from shoal.launch.guardian_process import GuardianProcess
from shoal.launch.lines import Tracebacks
from shoal.launch.screen import LogFile, Screen
from shoal.launch.worker import Pipe, Worker

# What the kernel holds on to (a hanging file system) does not even die by SIGKILL.
_GIVE_UP_S = 30.0
# The pipes of a worker that is gone with all that it started are read to their end; this is for one whose
# other end somebody else has got hold of.
_DRAIN_S = 3.0


class Crew:
    """The workers that are there, by rank. What they say is shown, and written to files in `logs`.

    `ended` hears of each whose process has ended; it stays among the `workers` until it is cleaned up.
    Whoever owns the selector calls its `data`.
    """

    def __init__(
        self,
        logs: Path,
        screen: Screen,
        selector: BaseSelector,
        guardian: GuardianProcess,
        ended: Callable[[Worker], None],
    ) -> None:
        self.workers: dict[int, Worker] = {}
        self._path = logs
        self._screen = screen
        self._selector = selector
        self._guardian = guardian
        self._ended = ended
        self._logs: dict[int, LogFile] = {}
        self._ended_at: dict[int, float] = {}
        self._tracebacks = Tracebacks()

    @property
    def ending(self) -> bool:
        """Whether some have ended and are not cleaned up yet: there is something to look at."""
        return bool(self._ended_at)

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> Worker:
        """Start the worker of that rank."""
        worker = self.workers[rank] = Worker(rank, command, environment)
        if rank not in self._logs:
            self._logs[rank] = LogFile(self._path / f"worker-{rank}.log")
        self._guardian.add(worker.pid)
        self._selector.register(worker.ended_fd, EVENT_READ, partial(self._process_ended, worker))
        for pipe in worker.pipes:
            self._selector.register(pipe.file.fileno(), EVENT_READ, partial(self._output, worker, pipe))
        return worker

    def kill(self, overdue_s: float = 0.0) -> None:
        """SIGKILL for all; those that have not died of it for long are given up."""
        for worker in list(self.workers.values()):
            worker.kill()
            if overdue_s >= _GIVE_UP_S:
                self._screen.note(f"{worker.name} (pid {worker.pid}) cannot be killed; look at it", "red")
                del self.workers[worker.rank]

    def clean_up(self) -> list[Worker]:
        """Forget those that have ended, once what they had started is gone and their pipes are read."""
        ended = [self.workers[rank] for rank in self._ended_at if rank in self.workers]
        return [worker for worker in ended if self._clean_up(worker)]

    def close(self) -> None:
        """For an end that was not foreseen, too: no worker outlives this."""
        self.kill()
        for log in self._logs.values():
            log.close()

    def _process_ended(self, worker: Worker) -> None:
        worker.code = worker.peek()
        if worker.code is not None:
            self._selector.unregister(worker.ended_fd)
            self._ended_at[worker.rank] = time.monotonic()
            self._ended(worker)

    def _output(self, worker: Worker, pipe: Pipe) -> None:
        lines, ended = pipe.read()
        self._show(worker, pipe, lines, ended)
        if ended:
            self._selector.unregister(pipe.file.fileno())
            pipe.file.close()
            worker.pipes.remove(pipe)

    def _show(self, worker: Worker, pipe: Pipe, lines: list[bytes], ended: bool) -> None:
        self._logs[worker.rank].write(b"".join(line + b"\n" for line in lines))
        if pipe.name == "stderr":
            worker.tail.add(lines)
            lines = self._tracebacks.fold(worker.rank, lines, ended=ended)
        if lines:
            self._screen.lines(worker.rank, pipe.name, lines)

    def _clean_up(self, worker: Worker) -> bool:
        since = time.monotonic() - self._ended_at[worker.rank]
        if worker.left_behind:
            if since > GRACE_S:
                worker.kill()
            return False
        if worker.pipes and since < _DRAIN_S:
            return False
        for pipe in worker.pipes:
            self._selector.unregister(pipe.file.fileno())
            self._show(worker, pipe, pipe.close(), ended=True)
        worker.reap()
        self._guardian.remove(worker.pid)
        del self.workers[worker.rank], self._ended_at[worker.rank]
        return True
