"""What a job does about servers that end, with a cluster that only says what it is told to say."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import Refused, ShoalError, Timeout, Unavailable
from shoal.fleet.local import ServerHandle
from shoal.launch.job_cluster import JobCluster
from shoal.launch.verdict import Verdict

NOBODY = Unavailable("no coordinator answers at shoal://a:1,b:2: b:2 stands by, and nobody leads")
SILENT = Timeout("the coordinator at shoal://a:1 did not answer EvictServer within 0.5 s")
ONLY = Refused("server 1 has the only copy of 32 shards")


class Running:
    """A process, as far as anybody looks at it."""

    def poll(self) -> None:
        return None


class Cluster:
    """Two servers; `answers` are those to the orders to come, None is done."""

    def __init__(self, directory: Path, *answers: ShoalError | None) -> None:
        process: Any = Running()
        self.directory, self.pid, self.coordinator_pids = directory, os.getpid(), ()
        self.servers = tuple(ServerHandle(index, os.getpid(), f"host:{index}", process) for index in range(2))
        self.answers = list(answers)
        self.shards: ShoalError | set[int] = {3, 4}

    def evict_server(self, index: int, why: str, timeout: float) -> None:
        assert timeout <= 2.0, "all else waits for so long"
        if (answer := self.answers.pop(0)) is not None:
            raise answer

    def shards_of(self, servers: set[int], timeout: float) -> set[int]:
        if isinstance(self.shards, ShoalError):
            raise self.shards
        return self.shards

    def kill_still_coordinators(self, now: float) -> list[int]:
        return []

    def begin_server(self) -> Any:
        return SimpleNamespace(process=SimpleNamespace(stdout=Path(os.devnull).open()))

    def status(self, timeout: float) -> Any:
        return SimpleNamespace(lost=(), servers=())


class Job:
    def __init__(self, cluster: Cluster, checkpoint: str | None = None, restarts: int = 3) -> None:
        self.events: list[str] = []
        self.verdict = Verdict(restarts, replicas=1)
        watched: list[Callable[[], None]] = []
        fleet: Any = cluster
        self.fleet = JobCluster(
            fleet,
            self.verdict,
            checkpoint,
            cluster.directory,
            watch_once=lambda descriptor, then: watched.append(then),
            say=self.events.append,
            stop_workers=lambda then: None,
            start_workers=lambda: None,
        )
        self.now = time.monotonic()
        watched[1]()  # the second server has ended

    def tick(self, seconds: float = 2.0) -> None:
        self.now += seconds
        self.fleet.tick(self.now)


@pytest.mark.parametrize("silence", [NOBODY, SILENT])
def test_while_nobody_answers_a_server_with_copies_is_not_lost(tmp_path: Path, silence: ShoalError) -> None:
    job = Job(Cluster(tmp_path, silence, silence, silence, None))
    for _ in range(3):
        assert job.fleet.recovering
        job.tick()
    assert not job.fleet.recovering
    assert job.verdict.ending is None
    me = f"server 1 (pid {os.getpid()}) has ended"
    assert job.events == [
        f"{me}, and the coordinator does not answer: it is told later",
        f"{me}; the copies of its rows go on, and server 2 takes its place",
    ]


def test_a_coordinator_that_stays_silent_ends_the_job_which_says_so(tmp_path: Path) -> None:
    job = Job(Cluster(tmp_path, *[SILENT] * 100), checkpoint="file:///x")
    for _ in range(31):
        job.tick()
    assert job.verdict.sentence is not None
    assert job.verdict.sentence.endswith("has ended, and the coordinator has not answered for 60 s")
    assert "its rows are gone" not in " ".join(job.events)


def test_the_only_copy_is_lost_whoever_answers_then(tmp_path: Path) -> None:
    job = Job(Cluster(tmp_path, ONLY))
    assert job.events == [str(ONLY)]
    assert job.verdict.sentence is not None
    assert "its rows are gone" in job.verdict.sentence


def test_the_only_copy_is_read_again_also_where_nobody_says_at_first_what_it_had(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ONLY, ONLY)
    cluster.shards = NOBODY
    job = Job(cluster, checkpoint="file:///x")
    assert job.verdict.ending is None
    cluster.shards = {3, 4}
    job.tick()
    assert job.events[1:] == [
        f"server 1 (pid {os.getpid()}) has ended, with the only copy of 2 shards; they go back to the last "
        "checkpoint, and server 2 takes them"
    ]


def test_what_else_is_said_to_it_ends_the_job(tmp_path: Path) -> None:
    job = Job(Cluster(tmp_path, ShoalError("server 1 is not one of [0]")))
    assert job.events == ["server 1 is not one of [0]"]
    assert job.verdict.code == 1
