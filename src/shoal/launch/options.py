"""What a job is: its options, and the checks that find a mistake before a process starts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from shoal.config import CoordinatorOptions, check_count, check_duration, check_timeout, counted
from shoal.errors import BadInput
from shoal.launch.autoscale import Autoscale
from shoal.launch.health import parse_policies
from shoal.sync.words import check_word
from shoal.train.environment import SEED_MAX, WORKERS_MAX, check_batch
from shoal.train.straggler import parse_stragglers

_NAME_BYTES_MAX = 200
_RESTARTS_MAX = 1_000_000
_PLACES = ("local",)


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """One job. `command` is a script and its arguments, or -m, a module and its arguments."""

    command: tuple[str, ...]
    workers: int = 2
    servers: int = 1
    # Where its processes run.
    on: str = "local"
    # Further servers that hold a copy of each row.
    replicas: int = 0
    # strong: a push is acknowledged when all copies have it; weak: before.
    replication: str = "strong"
    # More than one agree by an etcd, at these URLs.
    coordinators: int = 1
    etcd: str | None = None
    # A word of `shoal.sync.words`: how workers synchronise, unless their script says otherwise. None: bsp.
    sync: str | None = None
    # split: the loader's batch is cut over the workers; each: every worker takes whole ones.
    batch: str = "split"
    # Of rows' initial values and the order of data, where the script does not choose its own.
    seed: int = 0
    # Workers made slow on purpose: 1:5x, 1:50ms.
    straggler: str = ""
    # Workers begin together and keep a history, for `shoal compare`.
    history: bool = False
    # None: the script's name and the time.
    name: str | None = None
    # None: under `name` in the directory of all jobs.
    directory: Path | None = None
    # How many workers that die are replaced, over the whole job.
    max_restarts: int = 3
    # What is done about workers that are not well: slow=replace,stuck=replace.
    on_trouble: str = ""
    # Limits of the number of workers, within which the fastest is looked for: 2:8, 2:8,apply.
    autoscale: str = ""
    # The job is stopped after this; None: never.
    timeout_s: float | None = None
    # A worker that has not called shoal.join() by then is named.
    join_timeout_s: float = 60.0
    # Where checkpoints are written and gone on from; how often.
    checkpoint: str | None = None
    every: str = "5m"

    def __post_init__(self) -> None:
        check_count("workers", self.workers, 1, WORKERS_MAX)
        if self.on not in _PLACES:
            raise BadInput(f"on is {self.on!r}; allowed: {', '.join(_PLACES)} (processes of this machine)")
        CoordinatorOptions(servers=self.servers, replicas=self.replicas)
        if self.replication not in ("strong", "weak") or (self.replication == "weak" and not self.replicas):
            raise BadInput(
                f"replication is {self.replication!r}; allowed: strong, or, with --replicas 1 or more, weak"
            )
        check_word(self.word)
        check_batch(self.batch)
        check_count("seed", self.seed, 0, SEED_MAX)
        parse_policies(self.on_trouble)
        check_count("max-restarts", self.max_restarts, 0, _RESTARTS_MAX)
        parse_stragglers(self.straggler, self.workers)
        if self.autoscale:
            limits = Autoscale.parse(self.autoscale)
            check_count("workers", self.workers, limits.low, limits.high, ", the limits of --autoscale")
        if self.name is not None:
            check_job_name(self.name)
        if self.timeout_s is not None:
            check_timeout(self.timeout_s)
        if not isinstance(self.join_timeout_s, int | float) or not 0 < self.join_timeout_s < float("inf"):
            raise BadInput(f"join-timeout is {self.join_timeout_s!r}; it must be a number of seconds above 0")
        _check_command(self.command)
        if self.every_s > 0 and self.every != JobOptions.every and self.checkpoint is None:
            raise BadInput(f"every is {self.every}, and there is no --checkpoint URL to save at")

    @property
    def every_s(self) -> float:
        """Seconds between checkpoints."""
        return check_duration("every", self.every)

    @property
    def cluster(self) -> dict[str, Any]:
        """What `LocalCluster` is told."""
        names = ("servers", "replicas", "replication", "coordinators", "etcd")
        return {name: getattr(self, name) for name in names}

    @property
    def word(self) -> str:
        """How workers synchronise whose script says nothing."""
        return "bsp" if self.sync is None else self.sync

    @property
    def summary(self) -> str:
        """How many of what, and the word."""
        servers = counted(self.servers, "server")
        if self.replicas:
            servers += f" with {counted(self.replicas, 'weak ' * (self.replication == 'weak') + 'replica')}"
        sync = f"sync {self.word}" + " (default)" * (self.sync is None)
        return f"{counted(self.workers, 'worker')}, {servers}, {sync}"

    @property
    def module(self) -> bool:
        """Whether the command is a module rather than a file."""
        return self.command[0] == "-m"

    @property
    def stem(self) -> str:
        """What the job is called after, if it is not given a name."""
        stem = self.command[1].rpartition(".")[2] if self.module else Path(self.command[0]).stem
        return "".join(c for c in stem if c.isprintable() and c != "\\").lstrip(".-") or "job"


def check_job_name(name: str) -> str:
    """`name` if a job, and so its directory, can be called that."""
    plain = name.isprintable() and not set(name) & set("/\\") and not name.startswith((".", "-"))
    if not plain or not 0 < len(name.encode()) <= _NAME_BYTES_MAX:
        raise BadInput(
            f"a job's name is {name[:64]!r}; allowed: 1 to {_NAME_BYTES_MAX} bytes of printable text without "
            "slashes, that does not begin with a dot or a dash"
        )
    return name


def _check_command(command: tuple[str, ...]) -> None:
    if not command or command == ("-m",):
        raise BadInput("which script? shoal run [OPTIONS] train.py ARGS..., or shoal run -m module ARGS...")
    if command[0] == "-m":
        top = command[1].partition(".")[0]
        # Only the outermost name: looking for an inner one would import, and so run, what is around it.
        if PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise BadInput(
                f"module {command[1]} is not found: no {top} in {Path.cwd()} or where Python looks"
            )
        return
    script = Path(command[0])
    if not script.exists():
        hint = "; options of shoal run come before the script" if command[0].startswith("-") else ""
        raise BadInput(f"script {script} is not found (looked for it in {Path.cwd()}){hint}")
    if not script.is_file():
        raise BadInput(f"script {script} is not a file" + (", but a directory" if script.is_dir() else ""))
