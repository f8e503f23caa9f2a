"""The supervisor of a job: starts the cluster and the workers, shows what they say, and ends them all.

One thread and one loop over pipes, ends of processes (pidfds) and signals. What is decided is in
`shoal.launch.verdict`; this file carries it out. Whatever way it ends, nothing stays behind:

1. a worker has ended: what it had started gets a second to end by itself, then SIGKILL; then it is reaped.
   One that died is evicted at once, so that others do not wait for it, and another is started in its place;
2. the job ends (failure, signal, deadline): SIGTERM to the workers, SIGKILL after five seconds or a second
   signal;
3. the supervisor is killed: the kernel kills the workers, `shoal.launch.guardian` what they had started, and
   the coordinator and the servers see the end of their stdin.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TextIO

import msgspec

from shoal.checkpoint.client import check_writable
from shoal.config import counted, read_environment
from shoal.errors import BadInput, ShoalError
from shoal.fleet.local import LocalCluster
from shoal.launch.autoscale import Autoscaler
from shoal.launch.board import Board
from shoal.launch.crew import Crew
from shoal.launch.eviction import evict
from shoal.launch.guardian_process import GuardianProcess
from shoal.launch.health import HealthWatch, Trouble, parse_policies
from shoal.launch.job_cluster import JobCluster
from shoal.launch.job_sync import JobSync
from shoal.launch.options import JobOptions
from shoal.launch.records import JobRecord, WorkerRecord, find_job, make_job_directory
from shoal.launch.saver import Saver, go_on, told_of
from shoal.launch.screen import LogFile, Screen
from shoal.launch.signals import Signals, Stopped
from shoal.launch.treatment import treat
from shoal.launch.verdict import Verdict
from shoal.launch.worker import Worker, exit_code
from shoal.launch.worker_environment import JobAddress, free_port, worker_environment
from shoal.train.progress import write_trust

_TICK_S = 0.25
# While processes are ending there is something to look at more often.
_ENDING_TICK_S = 0.02
_TERMINATE_S = 5.0
# A worker that gives no sign of life for so long is replaced; it is found within a tick more.
_LEASE_S = 2.0


def run_job(options: JobOptions, shown: TextIO | None = None) -> int:
    """Run a job to its end; its exit code. Must be called in the main thread of a process without others.

    It is shown on stdout and stderr, or on `shown`.
    """
    with ExitStack() as stack:
        # First: from the moment that there is a job to be seen, a signal ends it in order.
        signals = stack.enter_context(Signals())
        if options.checkpoint is not None:
            check_writable(options.checkpoint)
        record = make_job_directory(options)
        log = LogFile(record.path / "logs" / "job.log")
        stack.callback(log.close)
        screen = Screen(log, lambda: signals.count > 0, stdout=shown, stderr=shown)
        stack.callback(screen.close)
        verdict = Verdict(options.max_restarts, options.replicas)
        try:
            return _Job(options, record, signals, screen, verdict, stack).run()
        except Stopped:
            assert signals.first is not None
            verdict.signalled(signals.first)
            screen.note(f"job {record.name}: stopped while starting")
            record.write_end(verdict.code, verdict.sentence)
            return verdict.code
        except BaseException as error:
            with suppress(BadInput):  # as far as it has come
                record = find_job(record.directory)
            record.write_end(1, verdict.sentence or str(error))
            raise


class _Job:
    """One job from the start of its cluster to the end of its last process."""

    def __init__(
        self,
        options: JobOptions,
        record: JobRecord,
        signals: Signals,
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
        self._last_words: dict[int, list[str]] = {}
        self._saver: Saver | None = None
        self._stack = stack
        signals.raising = True
        if signals.first is not None:
            raise Stopped
        self._cluster = stack.enter_context(
            LocalCluster(directory=record.path / "cluster", watch=False, **options.cluster)
        )
        url = options.checkpoint
        self._restored = None if url is None else go_on(self._cluster, url, record.path)
        signals.raising = False
        logs, keeper = record.path / "logs", stack.enter_context(GuardianProcess())
        self._crew = Crew(logs, screen, self._selector, keeper, self._worker_ended)
        stack.callback(self._crew.close)
        self._workers = self._crew.workers
        self._record = record
        self._board = Board(record.path, options.workers)
        self._sync = JobSync(options)
        self._health = HealthWatch(parse_policies(options.on_trouble))
        self._restarting: set[int] = set()
        self._when_stopped: Callable[[], None] | None = None
        self._evicted: set[int] = set()  # that have not ended yet
        self._stopped_at: dict[int, float] = {}
        self._still: set[int] = set()  # that were said to be stopped, and not replaced
        self._leaving: dict[int, float] = {}  # until when
        self._autoscaler = Autoscaler.of(options.autoscale, options.word) if options.autoscale else None
        self._asked: dict[str, int] = {}  # numbers of workers and servers to go on with

    def run(self) -> int:
        """Start the workers and look after them until all have ended."""
        self._watch(self._signals.receiver.fileno(), self._signalled)
        logs = self._record.path / "logs"
        self._fleet = JobCluster(
            self._cluster,
            self._verdict,
            self._options.checkpoint,
            logs,
            watch_once=self._watch_once,
            say=self._report,
            stop_workers=self._stop_workers,
            start_workers=self._start_all,
        )
        self._stack.callback(self._fleet.close)
        if self._options.checkpoint is not None:
            url, every_s = self._options.checkpoint, self._options.every_s
            self._saver = Saver(
                self._cluster,
                url,
                every_s,
                self._record.path,
                self._sync.on_workers,
                watch_once=self._watch_once,
                say=self._report,
            )
            self._stack.callback(self._saver.end)
        if (elsewhere := read_environment().address) is not None:
            self._screen.note(
                f"SHOAL_ADDRESS ({elsewhere}) is not used: a job has servers of its own", "yellow"
            )
        if self._restored is not None:
            for line in told_of(self._options, self._restored):
                self._event(line)
        self._start_workers()
        self._screen.note(
            f"job {self._record.name}: {self._options.summary}; logs in {self._record.path / 'logs'}"
        )
        while self._workers or self._fleet.recovering:
            for key, _ in self._selector.select(_ENDING_TICK_S if self._crew.ending else _TICK_S):
                key.data()
            self._tick(time.monotonic())
        return self._finish()

    def _start_workers(self) -> None:
        self._where = JobAddress(
            address=self._cluster.address,
            token_file=self._cluster.token_file,
            directory=self._record.path,
            master_port=free_port(),
        )
        self._record = msgspec.structs.replace(
            self._record,
            state="running",
            address=self._cluster.address,
            token_file=str(self._cluster.token_file),
            sizes={"workers": self._options.workers, "servers": self._options.servers},
            **self._fleet.record,
        )
        self._start_all()

    def _start_all(self) -> None:
        for rank in range(self._options.workers):
            self._start_worker(rank)
        self._record.write()

    def _stop_workers(self, then: Callable[[], None]) -> None:
        """Kill all of them, which is no death of theirs; `then`: they are gone."""
        self._when_stopped = then
        for ranks in (self._restarting, self._evicted, self._leaving):
            ranks.clear()
        clocks = [view.progress.clock if view.progress else 0 for view in self._board.views]
        self._event(f"the workers are stopped; their clocks were at {', '.join(map(str, clocks))}")
        self._crew.kill()

    def _start_worker(self, rank: int) -> None:
        command = [sys.executable, "-u", *self._options.command]
        now = time.time()
        environment = worker_environment(self._options, self._where, rank, os.environ)
        worker = self._crew.start(rank, command, environment)
        self._health.forget(rank)
        write_trust(self._record.path, rank, 1.0)
        view = self._board.views[rank]
        view.since, view.ended, view.departed, view.overdue = now, False, False, False
        before = [w for w in self._record.workers if w.rank == rank]
        restarts = before[0].restarts + 1 if before else 0
        others = [w for w in self._record.workers if w.rank != rank]
        started = WorkerRecord(rank=rank, pid=worker.pid, started=now, restarts=restarts)
        self._record = msgspec.structs.replace(
            self._record,
            workers=tuple(sorted([*others, started], key=lambda w: w.rank)),
            join_until=now + self._options.join_timeout_s,
        )
        self._join_until = time.monotonic() + self._options.join_timeout_s
        self._warned = False

    def _watch_once(self, descriptor: int, then: Callable[[], None]) -> None:
        def ready() -> None:
            self._selector.unregister(descriptor)
            then()

        self._watch(descriptor, ready)

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

    def _worker_ended(self, worker: Worker) -> None:
        assert worker.code is not None
        self._board.refresh()
        view = self._board.views[worker.rank]
        view.ended = True
        if self._when_stopped is not None:
            return
        if worker.rank >= self._options.workers:  # too many since `shoal scale`
            view.departed = True
            self._evict(worker.rank, dismissed=True)
            self._forget(worker.rank)
            return
        # It was too many, and its rank is wanted again; unless it had come to its end before it was told.
        if self._leaving.pop(worker.rank, None) is not None and not (view.left and worker.code == 0):
            self._evict(worker.rank)
            self._evicted.discard(worker.rank)
            self._restarting.add(worker.rank)
            return
        then = [rank for rank in self._board.ending_before(worker.rank) if rank < self._options.workers]
        again = self._verdict.worker_ended(
            worker.rank, worker.code, joined=view.joined, left=view.left, behind=then, now=time.monotonic()
        )
        self._record = self._record.with_worker(worker.rank, code=exit_code(worker.code))
        if again is not None:
            if worker.rank not in self._evicted:
                self._evict(worker.rank)
            self._evicted.discard(worker.rank)
            self._restarting.add(worker.rank)
            self._event(again)
        self._write_record()

    def _evict(self, rank: int, *, dismissed: bool = False) -> None:
        try:
            evict(self._cluster, rank, self._options.workers, dismissed=dismissed)
            self._evicted.add(rank)
        except ShoalError as error:
            # Then its successor does it, when it joins.
            self._screen.note(f"worker {rank} could not be evicted: {error}", "yellow")

    def _event(self, text: str) -> None:
        self._record = self._record.with_event(text)
        self._screen.note(text, "yellow")

    def _report(self, text: str) -> None:
        """An event, if it has a text, that is in the record at once, with the job as it is now."""
        saved = None if self._saver is None else self._saver.record
        known = {**self._fleet.record, **self._sync.record}
        self._record = msgspec.structs.replace(self._record, **known, checkpoint=saved)
        if text:
            self._event(text)
        self._write_record()

    def _write_record(self) -> None:
        with suppress(OSError):
            self._record.write()

    # Time.

    def _tick(self, now: float) -> None:
        changed = self._board.refresh()
        self._follow_script()
        if self._options.timeout_s is not None and now > self._begin + self._options.timeout_s:
            self._verdict.timed_out(self._options.timeout_s)
        self._verdict.decide(now)
        if now > self._join_until:
            self._look_for_missing()
        self._look_for_stopped(now)
        for trouble, policy in self._health.look(self._board, time.time()):
            self._troubled(trouble, policy)
        if self._autoscaler is not None:
            self._autoscale(self._autoscaler, now)
        self._asked |= self._record.asked_sizes()
        if self._asked and self._verdict.ending is None and not self._fleet.recovering:
            role, size = self._asked.popitem()
            (self._scale_servers if role == "servers" else self._scale)(size)
        self._fleet.tick(now)
        for rank, until in self._leaving.items():
            if now > until and rank in self._workers:
                self._workers[rank].kill()
        if self._verdict.ending is not None:
            self._end_workers(now)
        for worker in self._crew.clean_up():
            self._worker_gone(worker)
        if self._when_stopped is not None and not self._workers:
            then, self._when_stopped = self._when_stopped, None
            then()
        self._screen.progress(self._board, changed=changed)

    # Other numbers of workers and servers.

    def _autoscale(self, scaler: Autoscaler, now: float) -> None:
        if news := scaler.look(self._board, self._options.workers, self._options.servers, now):
            text, workers = news
            self._report(text)
            if workers is not None:
                self._asked.setdefault("workers", workers)

    def _scale(self, workers: int) -> None:
        before = self._options.workers
        try:
            options = dataclasses.replace(self._options, workers=workers)
            self._sync.resize(self._cluster, workers)
        except ShoalError as error:
            self._report(f"cannot go on with {counted(workers, 'worker')}: {error}")
            return
        self._options = options
        self._event(self._scaled("workers", workers))
        self._board.grow(workers)
        for rank in range(before, workers):
            if rank in self._workers:  # it is still leaving
                self._restarting.add(rank)
            else:
                self._start_worker(rank)
        for rank in range(workers, before):
            if rank in self._workers:
                self._workers[rank].terminate()
                self._leaving[rank] = time.monotonic() + _TERMINATE_S
        self._write_record()

    def _scale_servers(self, servers: int) -> None:
        try:
            options = dataclasses.replace(self._options, servers=servers)
            self._fleet.scale(servers, lambda: self._report(self._scaled("servers", servers)))
            self._options = options
        except ShoalError as error:
            self._report(f"cannot go on with {counted(servers, 'server')}: {error}")

    def _scaled(self, role: str, size: int) -> str:
        sizes = self._record.sizes
        self._record = msgspec.structs.replace(self._record, sizes={**sizes, role: size})
        return f"scaled from {sizes[role]} to {counted(size, role.removesuffix('s'))}"

    def _forget(self, rank: int) -> None:
        """A worker has ended that the job needs no more."""
        self._evicted.discard(rank)
        self._leaving.pop(rank, None)
        workers = tuple(w for w in self._record.workers if w.rank != rank)
        self._record = msgspec.structs.replace(self._record, workers=workers)
        self._write_record()

    def _look_for_stopped(self, now: float) -> None:
        for worker in self._workers.values():
            if worker.code is not None or not worker.stopped:
                self._stopped_at.pop(worker.rank, None)
                self._still.discard(worker.rank)
            elif now - self._stopped_at.setdefault(worker.rank, now) >= _LEASE_S:
                self._lease_expired(worker)

    def _lease_expired(self, worker: Worker) -> None:
        """A worker gives no sign of life: it is fenced, whatever it does when it wakes, and replaced.

        Without a restart left it may wake, until the others are done: then nothing would ever end the job.
        """
        if worker.rank in self._evicted or self._verdict.ending is not None:
            return
        text = f"worker {worker.rank} (pid {worker.pid}) has given no sign of life for {_LEASE_S:g} s"
        here = [one for one in self._workers.values() if one.code is None]
        if self._verdict.may_restart:
            self._evict(worker.rank)
            self._event(text)
            worker.kill()
        elif len(here) < self._options.workers and all(one.stopped for one in here):
            self._verdict.stands_still(worker.rank)
            worker.kill()
        elif worker.rank not in self._still:
            self._still.add(worker.rank)
            self._report(f"{text}, and no restart is left: it is waited for until the others are done")

    def _troubled(self, trouble: Trouble, policy: str) -> None:
        worker = self._workers.get(trouble.rank)
        if policy == "replace" and not self._verdict.may_restart:
            policy = "report"
        self._event(treat(self._record.path, trouble, policy))
        if policy == "replace" and worker is not None:
            self._evict(trouble.rank)
            worker.kill()
        self._write_record()

    def _follow_script(self) -> None:
        """It may say itself how its workers synchronise."""
        if news := self._sync.look(self._board):
            self._report(news)
            if self._saver is not None:
                self._saver.needs(self._sync.on_workers)

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
        assert self._verdict.ending is not None
        if self._kill_at is None:
            self._kill_at = now + _TERMINATE_S
            self._screen.note(self._verdict.ending.sentence, "red")
            for worker in self._workers.values():
                worker.terminate()
        elif now >= self._kill_at:
            self._crew.kill(now - self._kill_at)

    def _worker_gone(self, worker: Worker) -> None:
        """It is reaped, with all that it had started."""
        self._last_words[worker.rank] = worker.tail.reason()
        if worker.rank in self._restarting:
            self._restarting.remove(worker.rank)
            if self._verdict.ending is None and worker.rank < self._options.workers:
                self._start_worker(worker.rank)
                self._write_record()

    # The end.

    def _finish(self) -> int:
        self._verdict.decide()
        trained = self._verdict.ending is None
        if self._saver is not None:
            why = self._saver.end_with_a_last([self._signals.receiver.fileno()]) if trained else None
            self._saver.end()
            self._signalled()
            if why and self._verdict.ending is None:
                self._verdict.not_saved(why)
        self._screen.close()
        self._cluster.close()
        for path in (self._cluster.token_file, self._cluster.directory / "journal.db"):
            path.unlink(missing_ok=True)
        seconds = time.monotonic() - self._begin
        self._verdict.trained()
        ending = self._verdict.ending
        if trained:
            done = [self._board.summary(seconds, self._restored and self._restored.name)]
            done += [f"{name} {value:.4g}" for name, value in self._board.figures().items()]
            self._screen.note(f"job {self._record.name} is done: {', '.join(done)}", "green")
        if ending is not None and ending.rank is not None:
            said = self._last_words.get(ending.rank) or ["it wrote nothing to stderr"]
            self._screen.plain([f"{ending.sentence}:", *said])
        elif ending is not None:
            self._screen.plain([f"error: {ending.sentence}"])
        self._record.write_end(self._verdict.code, self._verdict.sentence)
        return self._verdict.code
