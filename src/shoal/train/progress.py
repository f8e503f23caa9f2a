"""How a worker tells how far it is: one small file, read by the supervisor of `shoal run` and `shoal status`.

The file is `progress/<rank>.json` in the job's directory. It is replaced as a whole, so that a reader never
sees half of one, at most once a second, and a last time when the worker ends. A thread writes it, since the
value that matters most is the last one before a worker waits for others; that it waits for servers the thread
finds out itself.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.errors import BadInput, ShoalError

if TYPE_CHECKING:
    from shoal.store.client import Client

_log = logging.getLogger("shoal.progress")
_EVERY_S = 1.0
# A server that has not answered for so long is waited for.
_SERVER_S = 1.0
# Samples per second are those of about this long; of less than the second nothing can be said.
_WINDOW_S, _SHORTEST_S = 10.0, 0.5
METRICS_MAX = 64
_LEFT_MAX = 64
# The state of a worker whose script does something else, such as evaluate; from its next step on it trains.
BETWEEN_PASSES = "between passes"
# Loaders have passes of their own: the n-th loader's pass e is pass n * this + e of the ledger.
PASSES_A_LOADER = 1 << 32
# A file above this was not written here.
_BYTES_MAX = 1 << 20


class DataUse(msgspec.Struct, frozen=True, kw_only=True):
    """How the units of all passes that have ended were used; a unit is one worker's part of a batch."""

    passes: int = 0
    units: int = 0
    once: int = 0
    never: int = 0
    # That those passes trained, an earlier job's part of them left out; where loaders know what a pass has.
    samples: int = 0
    # Passes that an earlier job had begun: which part of them it trained.
    before: dict[int, float] = {}
    # The last pass of each loader, whose first one is a multiple of PASSES_A_LOADER.
    last: tuple[int, ...] = ()
    # Passes before those that all workers left: the last of them.
    left: tuple[int, ...] = ()

    def has(self, epoch: int) -> bool:
        """Whether the pass is among them."""
        past = any(last >= epoch and _loader(last) == _loader(epoch) for last in self.last)
        return past and epoch not in self.left

    def and_left(self, epoch: int) -> DataUse:
        """With a pass that nobody came to the end of."""
        return msgspec.structs.replace(self, left=(*self.left, epoch)[-_LEFT_MAX:])

    def and_a_pass(self, epoch: int, units: int, used: Mapping[int, int], samples: int | None) -> DataUse:
        """With one more pass: `used` says how many of its units were used how often."""
        before = dict(self.before)
        done = part_used(units, used) - before.pop(epoch, 0.0)
        return DataUse(
            passes=self.passes + 1,
            units=self.units + units,
            once=self.once + used.get(1, 0),
            never=self.never + used.get(0, 0),
            samples=self.samples + max(0, round((samples or 0) * done)),
            before=before,
            last=(*(last for last in self.last if _loader(last) != _loader(epoch)), epoch),
            left=self.left,
        )

    def __str__(self) -> str:
        passes = "1 pass" if self.passes == 1 else f"{self.passes:,} passes"
        if self.once == self.units:
            return f"{passes}, every sample used once in each"
        more = self.units - self.once - self.never
        return (
            f"{passes} of {self.units:,} parts of batches: {self.once:,} used once, {more:,} more often, "
            f"{self.never:,} never"
        )


def part_used(units: int, used: Mapping[int, int]) -> float:
    """Which part of a pass units are that were used so often; above 1 if some were used again."""
    return sum(times * count for times, count in used.items()) / units if units else 0.0


def write_data_before(job: Path, data: DataUse) -> None:
    """What an earlier job did, before a worker starts."""
    _before_path(job).write_bytes(msgspec.json.encode(data))


def _read_data_before(job: Path) -> DataUse | None:
    try:
        return msgspec.json.decode(_before_path(job).read_bytes(), type=DataUse)
    except (OSError, msgspec.DecodeError):
        return None


def _before_path(job: Path) -> Path:
    return progress_path(job, 0).with_name("before")


def _loader(epoch: int) -> int:
    return epoch // PASSES_A_LOADER


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker is. `step` counts its own steps; `clock` is the job's: of blocks, under average."""

    rank: int
    step: int = 0
    clock: int = 0
    samples: int = 0
    # Over the last seconds; 0 while that is not known.
    samples_per_s: float = 0.0
    # Of these: in passes whose samples `data` has; in the latest that have ended, and in others, by pass.
    ended: int = 0
    over: dict[int, int] = {}
    open: dict[int, int] = {}
    loss: float | None = None
    # How often this life of it has told its loss: what stands there may be of long ago.
    reports: int = 0
    staleness: float | None = None
    # The last step that was not finite, if it goes on in spite of that.
    nan_step: int | None = None
    # Steps of it that counted nothing: not finite, or refused.
    empty_steps: int = 0
    waiting_for: tuple[int, ...] = ()
    # Servers that owe an answer for longer than about a second.
    waiting_for_servers: tuple[int, ...] = ()
    # Seconds that it has waited for others so far.
    waited_s: float = 0.0
    # joined, training, waiting, ended, BETWEEN_PASSES; others are shown as they are.
    state: str = "joined"
    epoch: int = 0
    metrics: dict[str, float] = {}
    # Of the whole job, by worker 0.
    data: DataUse | None = None
    # How it synchronises (`shoal.sync.plain`), and how batches are handed out: as its script says.
    policy: dict[str, Any] | None = None
    batch: str | None = None
    pid: int = 0
    # Seconds since 1970: when the first life of its rank joined, when this one did, and when this was true.
    began: float = 0.0
    joined: float = 0.0
    time: float = 0.0


_FIXED = {"rank", "pid", "began", "joined", "time", "samples_per_s", "policy", "batch"}
_FIELDS = frozenset(Progress.__struct_fields__) - _FIXED
_KEPT = ("step", "clock", "samples", "ended", "over", "open", "data", "empty_steps")
_DECODER = msgspec.json.Decoder(Progress)


def progress_path(job: Path, rank: int) -> Path:
    """The file of worker `rank` of the job in the directory `job`."""
    return job / "progress" / f"{rank}.json"


def left_path(job: Path) -> Path:
    """Where workers that leave a job put their state for its last checkpoint; there only if one is made."""
    return job / "left"


def write_trust(job: Path, rank: int, trust: float) -> None:
    """Let what worker `rank` sends count for so much, from 0 to 1."""
    path = progress_path(job, rank).with_suffix(".trust")
    if trust == 1.0:
        path.unlink(missing_ok=True)
    else:
        path.with_suffix(".part").write_text(str(trust))
        path.with_suffix(".part").replace(path)


def read_trust(job: Path, rank: int) -> float:
    """What `write_trust` said last, else 1."""
    try:
        return float(progress_path(job, rank).with_suffix(".trust").read_text())
    except (OSError, ValueError):
        return 1.0


def read_progress(path: Path) -> Progress | None:
    """What the worker of that file said last; None if it has not joined or the file is not one of ours."""
    try:
        with path.open("rb") as file:
            return _DECODER.decode(file.read(_BYTES_MAX))
    except (OSError, msgspec.DecodeError):
        return None


class ProgressReport:
    """The progress of this worker. `update` is cheap: it may be called in every step, from any thread.

    Without a job nothing is written and the values are kept here alone. It belongs to the process that made
    it: in a forked child it does nothing.

    >>> report = ProgressReport(rank=0)
    >>> report.update(step=3, clock=3, loss=0.25)
    >>> report.value.loss
    0.25
    """

    def __init__(
        self,
        job: Path | None = None,
        *,
        rank: int,
        policy: dict[str, Any] | None = None,
        batch: str | None = None,
        client: Client | None = None,
    ) -> None:
        now = time.time()
        self._client = client
        self._path = None if job is None else progress_path(job, rank)
        # What an earlier life of the rank did counts on.
        before = None if self._path is None else read_progress(self._path)
        if before is None:
            data = _read_data_before(job) if job is not None and rank == 0 else None
            before = Progress(rank=rank, data=data)
        kept = {name: getattr(before, name) for name in _KEPT}
        began = before.began or now
        fixed: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "policy": policy, "batch": batch}
        self._value = Progress(began=began, joined=now, time=now, **fixed, **kept)
        self._history = deque([(now, self._value.samples)])  # times and samples as they were written
        self._changed = threading.Condition()
        self._dirty = False
        self._closed = False
        self._complained = False
        if self._path is not None:
            # At once: that the file exists is how the supervisor knows that this worker has joined.
            self._write(self._value)
            self._thread = threading.Thread(target=self._run, name="shoal-progress", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    @property
    def value(self) -> Progress:
        """What was said last."""
        return self._value

    def update(self, **changes: Any) -> None:
        """Change these fields of `Progress`; the others stay."""
        if unknown := changes.keys() - _FIELDS:
            raise BadInput(f"progress has no {sorted(unknown)}; allowed: {', '.join(sorted(_FIELDS))}")
        if os.getpid() != self._value.pid:
            return
        for name in ("loss", "staleness"):
            if changes.get(name) is not None:
                changes[name] = float(changes[name])  # of torch or NumPy: JSON knows numbers only
        if "metrics" in changes:
            changes["metrics"] = _numbers(changes["metrics"])
        with self._changed:
            self._value = msgspec.structs.replace(self._value, **changes, time=time.time())
            if not self._dirty:
                self._dirty = True
                self._changed.notify()

    def trains(self) -> None:
        """A step begins; not every word tells of each."""
        if self._value.state == BETWEEN_PASSES:
            self.update(state="training")

    def step_counts_nothing(self, nan_step: int | None = None) -> None:
        """Of this worker; `nan_step`: since it is not finite."""
        said = self._value
        nan_step = said.nan_step if nan_step is None else nan_step
        self.update(empty_steps=said.empty_steps + 1, nan_step=nan_step)

    def close(self, state: str = "ended") -> None:
        """Write the last value and end the thread. Twice is harmless."""
        if self._closed or os.getpid() != self._value.pid:
            return
        with self._changed:
            self.update(state=state, waiting_for=(), waiting_for_servers=())
            self._closed = True
            self._changed.notify()
        if self._path is not None:
            self._thread.join()
            atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                look_s = None if self._client is None else _EVERY_S
                self._changed.wait_for(lambda: self._dirty or self._closed, look_s)
            self._look_at_servers()
            with self._changed:
                if not (self._dirty or self._closed):
                    continue
                self._measure_speed()
                value, self._dirty = self._value, False
                closed = self._closed
            self._write(value)
            if closed:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=_EVERY_S)

    def _look_at_servers(self) -> None:
        if self._client is None or self._closed:
            return
        try:
            waits_s = self._client.stats()["waits_s"]
        except ShoalError:  # closed, or it joins again
            return
        servers = tuple(server for server, seconds in enumerate(waits_s) if seconds > _SERVER_S)
        with self._changed:
            if servers != self._value.waiting_for_servers and not self._closed:
                self.update(waiting_for_servers=servers)

    def _measure_speed(self) -> None:
        now = self._value.time
        while len(self._history) > 1 and self._history[1][0] < now - _WINDOW_S:
            self._history.popleft()
        begin, samples = self._history[0]
        self._history.append((now, self._value.samples))
        if now - begin >= _SHORTEST_S:
            speed = (self._value.samples - samples) / (now - begin)
            self._value = msgspec.structs.replace(self._value, samples_per_s=speed)

    def _write(self, value: Progress) -> None:
        assert self._path is not None
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(value) + b"\n")
            temporary.replace(self._path)
        except OSError as error:
            # Training is worth more than being watched.
            if not self._complained:
                _log.warning("progress cannot be written to %s: %s", self._path, error)
            self._complained = True


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    if len(metrics) > METRICS_MAX:
        raise BadInput(f"{len(metrics)} metrics; at most {METRICS_MAX} are reported")
    numbers = {str(name): float(value) for name, value in metrics.items()}
    # JSON has no others, and a file that cannot be read would hide all the rest.
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
