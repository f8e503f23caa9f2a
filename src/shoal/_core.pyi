"""The C++ core as Python sees it. Low level: `shoal.store` is the layer for people.

Arrays cross as buffers and are never copied on the way in; every call that can take time releases the
GIL. Failures raise `CoreError`, whose `code` is one of the core's codes; `shoal.errors` maps them.
With SHOAL_TESTING (developers' builds) there is more, of tests/bindings.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

class CoreError(Exception):
    code: int  # args = (code, message)

class OptimizerSpec:
    kind: str  # "sgd" "adagrad" "rowwise_adagrad" "adam" "adamw" "ftrl"
    nesterov: bool
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    lr_decay: float
    initial: float
    eps: float
    beta1: float
    beta2: float
    l1: float
    l2: float
    beta: float
    def __init__(self, kind: str) -> None: ...

class InitSpec:
    kind: str  # "zeros" "constant" "uniform" "normal"
    a: float
    b: float
    def __init__(self, kind: str, a: float = 0.0, b: float = 0.0) -> None: ...

class TableSpec:
    """What a server must know of a table or of a dense tensor."""

    id: int  # u32, granted by the coordinator
    name: str
    generation: int  # grows when hyper-parameters are changed by a later open
    dim: int  # tables: floats in a row; tensors: number of elements
    dense: bool
    optimizer: OptimizerSpec
    init: InitSpec
    seed: int
    range_low: int  # placement by range where range_low < range_high, by hash otherwise
    range_high: int
    def __init__(self) -> None: ...

class ServerAddress:
    index: int
    host: str
    port: int
    unix_path: str  # "" = no unix listener; used when the path exists on this host
    def __init__(self, index: int, host: str, port: int, unix_path: str = "") -> None: ...

class Placement:
    """Where every shard is. Servers by index, port 0: gone; chains of indexes, the head first."""

    version: int
    def __init__(
        self,
        *,
        version: int,
        weak: bool,
        servers: Sequence[ServerAddress],
        terms: Sequence[int],
        chains: Sequence[Sequence[int]],
    ) -> None: ...

class Ticket:
    """One operation in flight. Dropping it does not cancel the operation."""

    def done(self) -> bool: ...
    def leave(self) -> None: ...  # nobody waits at once: carry the operation on in the background
    # Raises CoreError(timeout) after timeout_s; may then be waited for again. Pulls return (n, dim)
    # float32 (tensors: 1-d), or None where the caller gave out=; pushes and assigns return None.
    def wait(self, timeout_s: float) -> NDArray[np.float32] | None: ...

class ManyTicket(Ticket):  # at run time a Ticket
    def wait(self, timeout_s: float) -> list[NDArray[np.float32] | None]: ...  # type: ignore[override]

class Store:
    """The shards of a store that lies in this process. An image is of the moment at which it began."""

    shards: int
    # Bytes of memory, and floats read and written since it began.
    def load(self, shard: int) -> tuple[int, int]: ...
    # Its id, and the head: version, dedupe records, staged pushes. Another one of the shard is over.
    def begin_image(self, shard: int) -> tuple[int, bytes]: ...
    # (table, keys, metas as bytes (n, 16), rows), or None at the end
    def read_image(
        self, shard: int, image: int, bytes_max: int
    ) -> tuple[int, NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32]] | None: ...
    def end_image(self, shard: int, image: int) -> None: ...
    def restore_head(self, shard: int, head: bytes) -> None: ...
    def declare(self, spec: TableSpec) -> None: ...
    def clear(self, shard: int) -> None: ...  # of rows
    def unplace(self, shard: int) -> None: ...  # nothing is asked of it until it is placed again
    # Restored to an earlier moment than the other shards: commits that it missed are not waited for.
    def rejoin(self, shard: int) -> None: ...
    # Term, version and log entry with which it became its shard's head.
    def began(self, shard: int) -> tuple[int, int, int]: ...
    def skip_commits(self, shard: int, seq: int) -> None: ...  # of a shard that another server holds
    def drop_unfinished(self, shard: int, clocks: Sequence[int]) -> None: ...  # staged, by rank
    def restore_page(
        self,
        shard: int,
        table: int,
        keys: NDArray[np.int64],
        metas: NDArray[np.uint8],
        rows: NDArray[np.float32],
    ) -> None: ...
    def sync_image(self) -> tuple[bytes, list[int]]: ...  # clocks, rounds, ledger; and the clocks by rank
    def restore_sync(self, image: bytes) -> None: ...

class Client:
    """Thread-safe. Belongs to the process that made it: in a forked child every call raises CoreError."""

    @staticmethod
    def embedded(*, shards: int = 64, threads: int = 0) -> Client: ...
    # Another client of the same embedded store, for a thread that is a worker of its own.
    def fork(self) -> Client: ...
    # Share the embedded store's work on this thread out by an OpenMP runtime that is loaded.
    def borrow_openmp(self, path: str) -> bool: ...
    def store(self) -> Store: ...  # raises where the rows lie at servers
    # Connects to all servers, proves the token, fences older incarnations; raises CoreError naming the
    # server that does not answer within timeout_s. lane: "auto", "shm", "unix", "tcp".
    @staticmethod
    def connect(
        *,
        client_id: int,
        incarnation: int,
        token: bytes,
        placement: Placement,
        lane: str,
        timeout_s: float,
        shm_bytes_max: int,
        any_copy: bool = False,
        coordinators: Sequence[tuple[str, int]] = (),  # of which one leads: there the lease is renewed
    ) -> Client: ...
    def set_placement(self, placement: Placement) -> None: ...
    # What was acknowledged here and is not in what the shard began that term with: the newest version of
    # earlier terms, and pushes that no copy had. Told once.
    def taken_over(self, shard: int, term: int, version: int, entry: int) -> tuple[int, int]: ...
    # Keeps all clients of this store from beginning pushes, once none is under way and no step half done.
    def hold(self, timeout_s: float) -> bool: ...  # False: not in time, and nothing is held
    def release(self) -> None: ...
    # Makes the table known to every server (and again after each reconnect).
    def declare(self, spec: TableSpec, timeout_s: float) -> None: ...
    # keys: int64, 1-d, contiguous. grads/values: float32 (n, dim) contiguous. lr NaN = the table's own.
    # codec: "fp32" "fp16" "bf16" "int8". The arrays are only read during the call (blocking part included).
    def pull(
        self,
        table: int,
        keys: NDArray[np.int64],
        *,
        codec: str = "fp32",
        out: NDArray[np.float32] | None = None,
        timeout_s: float,
    ) -> Ticket: ...
    def push(
        self,
        table: int,
        keys: NDArray[np.int64],
        grads: NDArray[np.float32],
        *,
        lr: float,
        codec: str = "fp32",
        step: int = 0,
        stage_rank: int = -1,  # >= 0: kept for the commit that names (stage_rank, step), not applied now
        by_staleness: bool = False,  # lr / updates of the shard since this client's last pull, with this
        timeout_s: float,
    ) -> Ticket: ...
    def assign(
        self, table: int, keys: NDArray[np.int64], values: NDArray[np.float32], *, timeout_s: float
    ) -> Ticket: ...
    def pull_tensor(
        self, tensor: int, *, codec: str = "fp32", out: NDArray[np.float32] | None = None, timeout_s: float
    ) -> Ticket: ...
    def push_tensor(
        self,
        tensor: int,
        grad: NDArray[np.float32],
        *,
        lr: float,
        codec: str = "fp32",
        step: int = 0,
        stage_rank: int = -1,
        by_staleness: bool = False,
        pulled: NDArray[np.float32] | None = None,  # with dc_lambda: g += dc_lambda * g * g * (now - pulled)
        dc_lambda: float = 0.0,
        timeout_s: float,
    ) -> Ticket: ...
    # Several tables and tensors (keys None) in one operation, with one request per server where it is small;
    # wait() gives a list, with None where the caller gave out. Items of a push: (table, keys, grads, lr).
    def pull_many(
        self,
        items: Sequence[tuple[int, NDArray[np.int64] | None, NDArray[np.float32] | None]],
        *,
        codec: str = "fp32",
        timeout_s: float,
    ) -> ManyTicket: ...
    def push_many(
        self,
        items: Sequence[tuple[int, NDArray[np.int64] | None, NDArray[np.float32], float]],
        *,
        step: int = 0,
        stage_rank: int = -1,
        by_staleness: bool = False,
        codec: str = "fp32",
        timeout_s: float,
    ) -> Ticket: ...
    # Writes the first value once: a tensor that is born already keeps what it has.
    def init_tensor(self, tensor: int, value: NDArray[np.float32], *, timeout_s: float) -> Ticket: ...
    def assign_tensor(self, tensor: int, value: NDArray[np.float32], *, timeout_s: float) -> Ticket: ...
    # The job's sync, kept beside shard 0. The first caller defines it, later ones must agree (mismatch); a
    # job that all have left gives way to the next. take: "each" (nothing is staged; slack = steps ahead of
    # the slowest, -1 = any), "round" (closed by ceil(quorum * workers present)), "count" (every `count`
    # contributions make an update). Returns the step to start with, and waits until it may be started;
    # and how often passes have grown so far.
    # resize: instead of joining, let the job go on with so many workers: new ranks are to come, and those
    # that are too many are not waited for once they are gone. back: it was here before, and need not know
    # how many there are by now.
    def sync_open(
        self,
        *,
        rank: int,
        workers: int,
        take: str,
        quorum: float = 1.0,
        count: int = 1,
        slack: int = -1,
        resize: bool = False,
        back: bool = False,
        timeout_s: float,
    ) -> tuple[int, int]: ...
    # "I finished `step`, all my pushes are acknowledged; may I start the next?" Blocks until the policy says
    # so; before it returns every commit so far is applied on every server. weight: samples, 0 = abstains.
    # lr NaN: as each push was staged with. clip: largest norm of the round's mean gradient, 0 = any.
    # units: (epoch, unit) done in this step. Returns step (to work on next), commit (seq of the last one),
    # growths (of passes so far), dropped (this contribution came too late), norm (of the sum where clip > 0,
    # else 0.0), waited_s.
    # CoreError(timeout) names the ranks waited for; calling again goes on waiting.
    def advance(
        self,
        *,
        rank: int,
        step: int,
        weight: float,
        lr: float = ...,
        clip: float = 0.0,
        units: Sequence[tuple[int, int]] = ...,
        timeout_s: float,
    ) -> dict[str, Any]: ...
    # clocks and phases (by rank; SyncShard::Phase), closed, dropped, staged_bytes, waiting {rank: seconds},
    # staleness {count, sum, max}.
    def sync_state(self, timeout_s: float) -> dict[str, Any]: ...
    # The pass `epoch` has so many units (split: batches, of which each makes a unit for each worker);
    # idempotent, another number is a mismatch. Gives how the pass is cut: (first unit, workers) of
    # each part of it, the first with unit 0. fixed: rank r has every n-th unit from first + r on.
    # several_steps: a batch may be stepped with more than once, so no pass of the job grows.
    def ledger_open(
        self,
        *,
        epoch: int,
        units: int,
        split: bool = False,
        fixed: bool = False,
        several_steps: bool = False,
        timeout_s: float,
    ) -> list[tuple[int, int]]: ...
    # Up to `want` units as (begin, end) ranges; [] = nothing left to hand out now. overdue: where nothing
    # else is left, what others hold is taken from them.
    def lease(
        self, *, rank: int, epoch: int, want: int, overdue: bool = False, timeout_s: float
    ) -> list[tuple[int, int]]: ...
    # Those of the units that this rank still holds; from now on they are not taken from it as overdue.
    def keep_units(self, *, rank: int, epoch: int, units: list[int], timeout_s: float) -> list[int]: ...
    # Waits until all units are done and every present worker is here: the step to go on with. True: units
    # came back, or the pass has grown more often than `growths`; lease again. Then how often that is now.
    # What this rank still holds is given back.
    def pass_end(
        self, *, rank: int, epoch: int, growths: int = 0, timeout_s: float
    ) -> tuple[int, bool, int]: ...
    # Gone: does not count in clocks and rounds any more, its leases return. It may open again. Asked by a
    # newer incarnation than that which opened, it evicts that one; by an older one it does nothing.
    # away: nobody is known to replace it, and the rest does its part also where that has a fixed owner.
    def leave(self, *, rank: int, away: bool = False, timeout_s: float = 10.0) -> None: ...
    # The first pass from `epoch` on that is not over, and what is done in it of this rank's fixed units.
    def resume(self, *, rank: int, epoch: int, timeout_s: float) -> tuple[int, list[int]]: ...
    # units, done, used {times used: units}, by_rank {rank: units done}.
    def ledger_report(self, *, epoch: int, timeout_s: float) -> dict[str, Any]: ...
    # Per-shard figures of a table, summed: rows, value_bytes, state_bytes, memory_bytes, pushes, pulls.
    def table_stats(self, table: int, timeout_s: float) -> dict[str, int]: ...
    # Up to rows_max rows of one shard; cursor starts at 0, the scan of the shard ends when it returns -1.
    def scan(
        self, table: int, shard: int, cursor: int, rows_max: int, timeout_s: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], int]: ...
    # Figures of this client: lane per server, requests, bytes_sent, bytes_received, reconnects, retries,
    # reads_behind, versions_behind_max, waits_s.
    def counters(self) -> dict[str, Any]: ...
    @property
    def shards(self) -> int: ...
    def close(self) -> None: ...

class Server:
    """Listens and serves from C++ threads until stopped; needs no GIL."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        unix_path: str,
        token: bytes,
        shards: int,
        threads: int,
        frame_bytes_max: int,
        connections_max: int = 4096,
        placed: bool = True,  # False: clients wait until place() was called
        weak: bool = False,
    ) -> None: ...
    def place(self, index: int, placement: Placement) -> None: ...
    def fill(self, shard: int, target: int, term: int, timeout_s: float) -> None: ...
    @property
    def diverged(self) -> bool: ...
    @property
    def port(self) -> int: ...
    def counters(self) -> dict[str, int]: ...
    def store(self) -> Store: ...
    def stop(self) -> None: ...

def kernel_names() -> list[str]: ...
