"""The supervisor of a job: starts the cluster and the workers, shows what they say, and ends them all.

One thread and one loop over pipes, ends of processes (pidfds) and signals. What is decided is in
`shoal.launch.verdict`; this file carries it out. Whatever way it ends, nothing stays behind:

1. a worker has ended: what it had started gets a second to end by itself, then SIGKILL; then it is reaped;
2. the job ends (failure, signal, deadline): SIGTERM to the workers, SIGKILL after five seconds or a second
   signal;
3. the supervisor is killed: the kernel kills the workers, `shoal.launch.guardian` what they had started, and
   the coordinator and the servers see the end of their stdin.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from shoal.checkpoint.client import check_writable
from shoal.errors import BadInput
from shoal.fleet.local import LocalCluster
from shoal.launch import guardian
from shoal.launch.board import Board
from shoal.launch.options import JobOptions
from shoal.launch.records import JobRecord, ServerRecord, WorkerRecord, find_job, make_job_directory
from shoal.launch.saver import Saver, go_on
from shoal.launch.screen import LogFile, Screen
from shoal.launch.verdict import Verdict
from shoal.launch.worker import Pipe, Worker, exit_code
from shoal.launch.worker_environment import JobAddress, worker_environment

__all__ = ["run_job"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK_S = 0.25
# While processes are ending there is something to look at more often.
_ENDING_TICK_S = 0.02
_TERMINATE_S = 5.0
# What the kernel holds on to (a hanging file system) does not even die by SIGKILL.
_GIVE_UP_S = 30.0
# The pipes of a worker that is gone with all that it started are read to their end; this is for one whose
# other end somebody else has got hold of.
_DRAIN_S = 3.0


class _Stopped(BaseException):
    """A signal came while the cluster was starting."""


class _Signals:
    """Signals as numbers to be asked for. While `raising`, the first one interrupts what is going on."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self.raising = False
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            # nohup: the job is to outlive its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as it was given
        signal.set_wakeup_fd(self._wakeup)
        self.receiver.close()
        self._sender.close()

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = number
            if self.raising:
                raise _Stopped


def run_job(options: JobOptions, shown: TextIO | None = None) -> int:
    """Run a job to its end; its exit code. Must be called in the main thread of a process without others.

    It is shown on stdout and stderr, or on `shown`.
    """
    with ExitStack() as stack:
        # First: from the moment that there is a job to be seen, a signal ends it in order.
        signals = stack.enter_context(_Signals())
        if options.checkpoint is not None:
            check_writable(options.checkpoint)
        record = make_job_directory(options)
        log = LogFile(record.path / "logs" / "job.log")
        stack.callback(log.close)
        screen = Screen(log, lambda: signals.count > 0, stdout=shown, stderr=shown)
        stack.callback(screen.close)
        verdict = Verdict()
        try:
            return _Job(options, record, signals, screen, verdict, stack).run()
        except _Stopped:
            assert signals.first is not None
            verdict.signalled(signals.first)
            screen.note(f"job {record.name}: stopped while starting")
            _write_end(record, verdict)
            return verdict.code
        except BaseException as error:
            with suppress(BadInput):  # as far as it has come
                record = find_job(record.directory)
            _write_end(record, verdict, code=1, reason=str(error))
            raise


def _write_end(
    record: JobRecord, verdict: Verdict, *, code: int | None = None, reason: str | None = None
) -> None:
    ended = msgspec.structs.replace(
        record,
        state="ended",
        ended=time.time(),
        code=verdict.code if code is None else code,
        reason=reason if verdict.ending is None else verdict.ending.sentence,
    )
    with suppress(OSError):
        ended.write()


class _Job:
    """One job from the start of its cluster to the end of its last process."""

    def __init__(
        self,
        options: JobOptions,
        record: JobRecord,
        signals: _Signals,
        screen: Screen,
        verdict: Verdict,
        stack: ExitStack,
    ) -> None:
        self._options = options
        self._signals = signals
        self._screen = screen
        self._verdict = verdict
        self._begin = time.monotonic()
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._kill_at: float | None = None
        self._warned = False
        self._last_words: list[str] = []
        self._saver: Saver | None = None
        self._stack = stack
        signals.raising = True
        if signals.first is not None:
            raise _Stopped
        self._cluster = stack.enter_context(LocalCluster(options.servers, directory=record.path / "cluster"))
        self._restored = None if options.checkpoint is None else go_on(self._cluster, options.checkpoint)
        signals.raising = False
        self._guardian = stack.enter_context(_Guardian())
        self._record = self._begin_record(record)
        self._board = Board(record.path, options.workers)
        self._workers: dict[int, Worker] = {}
        self._logs: dict[int, LogFile] = {}
        self._ended_at: dict[int, float] = {}
        for rank in range(options.workers):
            self._logs[rank] = LogFile(record.path / "logs" / f"worker-{rank}.log")
            stack.callback(self._logs[rank].close)
        # Whatever happens below: no worker outlives this.
        stack.callback(self._kill_all)

    def run(self) -> int:
        """Start the workers and look after them until all have ended."""
        self._watch(self._signals.receiver.fileno(), self._signalled)
        self._watch_cluster()
        if self._options.checkpoint is not None:
            log = self._record.path / "logs" / "checkpoint.log"
            self._saver = Saver(self._cluster, self._options.checkpoint, self._options.every_s, log)
            self._stack.callback(self._saver.end)
        if self._restored is not None:
            self._screen.note(f"going on from checkpoint {self._restored} of {self._options.checkpoint}")
        self._start_workers()
        self._screen.note(f"job {self._record.name}: {self._what()}; logs in {self._record.path / 'logs'}")
        while self._workers:
            for key, _ in self._selector.select(_ENDING_TICK_S if self._ended_at else _TICK_S):
                key.data()
            self._tick(time.monotonic())
        return self._finish()

    def _what(self) -> str:
        options = self._options
        servers = "1 server" if options.servers == 1 else f"{options.servers} servers"
        workers = "1 worker" if options.workers == 1 else f"{options.workers} workers"
        return f"{workers}, {servers}, sync {options.sync}"

    # Starting.

    def _begin_record(self, record: JobRecord) -> JobRecord:
        cluster = self._cluster
        logs = record.path / "logs"
        for path in cluster.directory.glob("*.log"):
            (logs / path.name).symlink_to(os.path.relpath(path, logs))
        return msgspec.structs.replace(
            record,
            address=cluster.address,
            token_file=str(cluster.token_file),
            coordinator=cluster.pid,
            servers=tuple(ServerRecord(index=s.index, pid=s.pid, address=s.address) for s in cluster.servers),
        )

    def _start_workers(self) -> None:
        where = JobAddress(
            address=self._cluster.address,
            token_file=self._cluster.token_file,
            directory=self._record.path,
            master_port=_free_port(),
        )
        command = [sys.executable, "-u", *self._options.command]
        for rank in range(self._options.workers):
            worker = Worker(rank, command, worker_environment(self._options, where, rank, os.environ))
            self._workers[rank] = worker
            self._guardian.add(worker.pid)
            self._watch(worker.ended_fd, partial(self._worker_ended, worker))
            for pipe in worker.pipes:
                self._watch(pipe.file.fileno(), partial(self._output, worker, pipe))
        self._record = msgspec.structs.replace(
            self._record,
            state="running",
            workers=tuple(WorkerRecord(rank=w.rank, pid=w.pid) for w in self._workers.values()),
            join_until=time.time() + self._options.join_timeout_s,
        )
        self._record.write()
        self._join_until = time.monotonic() + self._options.join_timeout_s

    def _watch_cluster(self) -> None:
        for server in self._cluster.servers:
            self._watch_process(server.pid, partial(self._verdict.server_lost, server.index, server.pid))
        self._watch_process(self._cluster.pid, self._coordinator_lost)

    def _watch_process(self, pid: int, then: Callable[[], None]) -> None:
        descriptor = os.pidfd_open(pid)
        self._stack.callback(os.close, descriptor)

        def ended() -> None:
            self._selector.unregister(descriptor)
            then()

        self._watch(descriptor, ended)

    def _watch(self, descriptor: int, then: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, then)

    # What happens.

    def _signalled(self) -> None:
        with suppress(BlockingIOError):
            self._signals.receiver.recv(64)
        if self._signals.first is not None:
            self._verdict.signalled(self._signals.first)
        if self._signals.count > 1 and self._kill_at is not None:
            self._kill_at = time.monotonic()

    def _output(self, worker: Worker, pipe: Pipe) -> None:
        lines, ended = pipe.read()
        self._show(worker, pipe, lines)
        if ended:
            self._selector.unregister(pipe.file.fileno())
            pipe.file.close()
            worker.pipes.remove(pipe)

    def _show(self, worker: Worker, pipe: Pipe, lines: list[bytes]) -> None:
        if not lines:
            return
        self._logs[worker.rank].write(b"".join(line + b"\n" for line in lines))
        if pipe.name == "stderr":
            worker.tail.add(lines)
        self._screen.lines(worker.rank, pipe.name, lines)

    def _worker_ended(self, worker: Worker) -> None:
        code = worker.peek()
        if code is None:
            return
        self._selector.unregister(worker.ended_fd)
        worker.code = code
        self._ended_at[worker.rank] = time.monotonic()
        self._board.refresh()
        view = self._board.views[worker.rank]
        view.ended = True
        self._verdict.worker_ended(worker.rank, code, joined=view.joined)
        self._record = msgspec.structs.replace(
            self._record,
            workers=tuple(
                msgspec.structs.replace(w, code=exit_code(code)) if w.rank == worker.rank else w
                for w in self._record.workers
            ),
        )
        with suppress(OSError):
            self._record.write()

    def _coordinator_lost(self) -> None:
        # No step needs it: the workers go on, and only what joins or opens a table anew would miss it.
        self._screen.note(f"the coordinator (pid {self._cluster.pid}) has ended; no worker can join any more")

    # Time.

    def _tick(self, now: float) -> None:
        changed = self._board.refresh()
        if self._options.timeout_s is not None and now > self._begin + self._options.timeout_s:
            self._verdict.timed_out(self._options.timeout_s)
        if now > self._join_until:
            self._look_for_missing()
        if self._verdict.ending is not None:
            self._end_workers(now)
        for worker in [self._workers[rank] for rank in self._ended_at if rank in self._workers]:
            self._clean_up(worker, now)
        self._screen.progress(self._board, changed=changed)

    def _look_for_missing(self) -> None:
        missing = self._board.missing()
        seconds = self._options.join_timeout_s
        for rank in missing:
            self._board.views[rank].overdue = True
            if waiting := self._board.waiting_for(rank):
                self._verdict.not_joined(rank, waiting, seconds)
        if missing and not self._warned:
            names = ", ".join(map(str, missing))
            self._screen.note(
                f"worker {names} has not called shoal.join() within {seconds:g} s (--join-timeout)", "yellow"
            )
        self._warned = True

    def _end_workers(self, now: float) -> None:
        if self._kill_at is None:
            self._kill_at = now + _TERMINATE_S
            assert self._verdict.ending is not None
            self._screen.note(self._verdict.ending.sentence, "red")
            for worker in self._workers.values():
                worker.terminate()
        elif now >= self._kill_at:
            for worker in list(self._workers.values()):
                worker.kill()
                if now >= self._kill_at + _GIVE_UP_S:
                    self._screen.note(f"{worker.name} (pid {worker.pid}) cannot be killed; look at it", "red")
                    del self._workers[worker.rank]

    def _clean_up(self, worker: Worker, now: float) -> None:
        """Forget a worker that has ended, once what it had started is gone and its pipes are read."""
        since = now - self._ended_at[worker.rank]
        if worker.left_behind:
            if since > guardian.GRACE_S:
                worker.kill()
            return
        if worker.pipes and since < _DRAIN_S:
            return
        for pipe in worker.pipes:
            self._selector.unregister(pipe.file.fileno())
            self._show(worker, pipe, pipe.close())
        worker.reap()
        self._guardian.remove(worker.pid)
        del self._workers[worker.rank], self._ended_at[worker.rank]
        ending = self._verdict.ending
        if ending is not None and ending.rank == worker.rank:
            self._last_words = worker.tail.reason()

    def _kill_all(self) -> None:
        """For an end that was not foreseen, such as a mistake in this file."""
        for worker in self._workers.values():
            worker.kill()

    # The end.

    def _finish(self) -> int:
        if self._saver is not None:
            self._saver.end(last=self._verdict.ending is None)
        self._screen.close()
        self._cluster.close()
        for path in (self._cluster.token_file, self._cluster.directory / "journal.db"):
            path.unlink(missing_ok=True)
        seconds = time.monotonic() - self._begin
        ending = self._verdict.ending
        if ending is None:
            done = [self._board.summary(seconds)]
            done += [f"{name} {value:.4g}" for name, value in self._board.figures().items()]
            self._screen.note(f"job {self._record.name} is done: {', '.join(done)}", "green")
        elif ending.rank is not None:
            said = self._last_words or ["it wrote nothing to stderr"]
            self._screen.plain([f"{ending.sentence}:", *said])
        else:
            self._screen.plain([f"error: {ending.sentence}"])
        _write_end(self._record, self._verdict)
        return self._verdict.code


class _Guardian:
    """The process that cleans up after a supervisor that was killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """Watch the session of this process."""
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """It has ended, with all that was in it."""
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line.encode())

    def __enter__(self) -> _Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
