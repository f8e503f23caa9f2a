"""The directory of a job, by which `shoal status`, `logs` and `stop` find it.

    job.json        who runs where; replaced as a whole by the supervisor, and only by it
    scale.json      what `shoal scale` asks for, until the supervisor has seen it
    progress/       one file for each worker, written by it (`shoal.train.progress`)
    history/        what each worker did moment by moment, where `shoal compare` asks for it
    shared/         memory that the workers share (hogwild)
    logs/           job.log, as it was shown; worker-0.log; server-0.log and coordinator.log
    cluster/        what the cluster keeps while it runs: its token file, its journal, its logs

It lies under the user's state directory, where the last `_JOBS_MAX` are kept, or where `--directory` says;
then a link under the state directory points to it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.errors import BadInput
from shoal.launch.guardian import process_stat
from shoal.launch.options import JobOptions, check_job_name

JobState = Literal["starting", "running", "ended", "lost"]
_JOBS_MAX = 100
_EVENTS_MAX = 100
_RECORD = "job.json"
_WISH = "scale.json"
_OURS = ("logs", "progress", "cluster", "history", "shared")


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker; `code` when it has ended. `restarts` says how often another took its place."""

    rank: int
    pid: int
    code: int | None = None
    started: float = 0.0
    restarts: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job and that its user may want to know later."""

    time: float
    text: str


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One server of the job's cluster."""

    index: int
    pid: int
    address: str


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last checkpoint that the job made, if any, and why none was made since, if that is so."""

    name: str | None = None
    time: float | None = None
    problem: str | None = None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What job.json holds. `pid` is the supervisor's; `pid_started` tells it from a later process of it."""

    name: str
    directory: str
    pid: int
    pid_started: int
    started: float
    command: tuple[str, ...]
    sync: str
    batch: str
    seed: int
    # Until this moment (seconds since 1970) a worker may be without a progress file.
    join_until: float
    state: JobState = "starting"
    address: str | None = None
    token_file: str | None = None
    coordinator: int | None = None
    workers: tuple[WorkerRecord, ...] = ()
    servers: tuple[ServerRecord, ...] = ()
    # How many "workers" and "servers" it shall have: `shoal scale` changes it. Empty until it runs.
    sizes: dict[str, int] = {}
    replicas: int = 0
    # None: it makes none.
    checkpoint: SaveRecord | None = None
    ended: float | None = None
    code: int | None = None
    # Why it ended, if not by all workers ending well.
    reason: str | None = None
    # The last of what happened.
    events: tuple[Event, ...] = ()

    @property
    def path(self) -> Path:
        """The job's directory."""
        return Path(self.directory)

    def with_event(self, text: str) -> JobRecord:
        """The same after one more event."""
        events = (*self.events, Event(time=time.time(), text=text))
        return msgspec.structs.replace(self, events=events[-_EVENTS_MAX:])

    def with_worker(self, rank: int, **changes: Any) -> JobRecord:
        """The same with another record of one worker."""
        workers = (msgspec.structs.replace(w, **changes) if w.rank == rank else w for w in self.workers)
        return msgspec.structs.replace(self, workers=tuple(workers))

    def ask_for_sizes(self, sizes: Mapping[str, int]) -> None:
        """Ask the supervisor for other numbers of workers and servers."""
        temporary = self.path / f".{_WISH}"
        temporary.write_bytes(msgspec.json.encode(sizes))
        temporary.replace(self.path / _WISH)

    def asked_sizes(self) -> dict[str, int]:
        """The numbers that were asked for since the last call, by role."""
        wish = self.path / _WISH
        try:
            asked = msgspec.json.decode(wish.read_bytes(), type=dict[str, int])
        except (OSError, msgspec.DecodeError):
            return {}
        wish.unlink()
        return asked

    @property
    def alive(self) -> bool:
        """Whether its supervisor runs."""
        return process_started(self.pid) == self.pid_started

    def write(self) -> None:
        """Replace the job's record with this."""
        temporary = self.path / f".{_RECORD}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        temporary.replace(self.path / _RECORD)

    def write_end(self, code: int, reason: str | None) -> None:
        """The job has ended, and is shown so from now on."""
        with suppress(OSError):
            msgspec.structs.replace(self, state="ended", ended=time.time(), code=code, reason=reason).write()


def process_started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is none, or a dead one."""
    fields = process_stat(pid)
    return int(fields[19]) if fields else None


def jobs_root() -> Path:
    """Where the directories of jobs are."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "shoal" / "jobs"


def make_job_directory(options: JobOptions) -> JobRecord:
    """A directory for a new job, with its first record. An ended job of the same name is replaced."""
    now = time.time()
    name = options.name or f"{options.stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    root = jobs_root()
    link = root / name
    path = link.absolute()
    if options.directory is not None:
        path = options.directory.resolve()
        name = options.name or path.name
        found = _read(root / name)
        if options.name is None and found is not None and found.path != path and found.alive:
            # Directories of the same last name are two jobs; the name was not asked for.
            name = f"{name}-{os.getpid()}"
        link = root / name
    check_job_name(name)
    for place in dict.fromkeys((link, path)):
        _make_room(place)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in _OURS:
            (path / folder).mkdir(mode=0o700)
        record = JobRecord(
            name=name,
            directory=str(path),
            pid=os.getpid(),
            pid_started=process_started(os.getpid()) or 0,
            started=now,
            command=options.command,
            sync=options.word,
            batch=options.batch,
            seed=options.seed,
            replicas=options.replicas,
            join_until=now + options.join_timeout_s,
        )
        record.write()
    except OSError as error:
        raise BadInput(f"cannot make the directory of the job, {path}: {error.strerror}") from None
    if path != link.absolute():
        # Only so that it is found by its name: without it, by its path.
        with suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            link.symlink_to(path)
    _prune(root)
    return record


def find_job(job: str | None = None) -> JobRecord:
    """The job of that name or in that directory; the newest by default."""
    root = jobs_root()
    if job is None:
        records = _all(root)
        if not records:
            raise BadInput(f"no job has run here (there is none in {root}); start one with `shoal run`")
        return max(records, key=lambda record: record.started)
    for path in (root / job, Path(job)):
        record = _read(path)
        if record is not None:
            return record
    known = sorted(_all(root), key=lambda record: -record.started)
    names = ", ".join(record.name for record in known[:10]) or "none"
    raise BadInput(f"there is no job {job!r}: neither a name in {root} nor a job's directory; known: {names}")


def _read(path: Path) -> JobRecord | None:
    """The record in a directory, as it is now: one whose supervisor is gone before its end is `lost`."""
    try:
        record = msgspec.json.decode((path / _RECORD).read_bytes(), type=JobRecord)
    except (OSError, msgspec.DecodeError):
        return None
    if record.state != "ended" and not record.alive:
        # It may have ended well between the two looks.
        with suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode((path / _RECORD).read_bytes(), type=JobRecord)
        if record.state != "ended":
            record = msgspec.structs.replace(record, state="lost")
    return record


def _all(root: Path) -> list[JobRecord]:
    try:
        paths = list(root.iterdir())
    except OSError:
        return []
    return [record for record in map(_read, paths) if record is not None]


def _make_room(path: Path) -> None:
    """Make room for a job in `path`: remove an ended one, or the link to it, and nothing else."""
    record = _read(path)
    if record is not None and record.state in ("starting", "running"):
        raise BadInput(
            f"job {record.name!r} is running in {path} (pid {record.pid}); stop it with `shoal stop "
            f"{record.name}`, or choose another --name or --directory"
        )
    if path.is_symlink():
        path.unlink()
    elif record is not None:
        _remove(path)
    elif path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise BadInput(
            f"{path} exists and is not the directory of a job; choose another --name or --directory"
        )


def _remove(path: Path) -> None:
    """Remove what a job wrote; its directory too if nothing else is in it."""
    for folder in _OURS:
        shutil.rmtree(path / folder, ignore_errors=True)
    for file in (_RECORD, f".{_RECORD}", _WISH, f".{_WISH}"):
        (path / file).unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def _prune(root: Path) -> None:
    """Forget the oldest ended jobs above the number that is kept."""
    ended = sorted((r for r in _all(root) if r.state in ("ended", "lost")), key=lambda r: -r.started)
    for record in ended[_JOBS_MAX:]:
        path = root / record.name
        if path.is_symlink():
            path.unlink()
        else:
            _remove(path)
