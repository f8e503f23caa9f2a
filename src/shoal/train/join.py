"""`shoal.join`: become a worker of a job, or of none: alone, a script is its own job."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed

from shoal.collective.group import Group, Lone, ThreadGroup, open_group
from shoal.errors import BadInput
from shoal.store.client import Client
from shoal.store.connect import connect
from shoal.store.rounds import client_name
from shoal.sync.policy import Policy
from shoal.sync.words import as_policy
from shoal.train.environment import check_batch, read_worker_environment
from shoal.train.meeting import Meeting
from shoal.train.regroup import Regroup
from shoal.train.waits import WAIT_S
from shoal.train.worker import Worker

_log = logging.getLogger("shoal.train")
_joined: dict[int, Worker] = {}  # by process


def join(
    address: str | None = None,
    *,
    sync: str | Policy | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    token: str | None = None,
    batch: str | None = None,
) -> Worker:
    """Become a worker: of the job that `shoal run` or torchrun started this process for, or of one alone.

    Arguments come before the environment (SHOAL_ADDRESS, SHOAL_RANK or RANK, SHOAL_WORLD_SIZE or WORLD_SIZE,
    SHOAL_SYNC). `sync` is a word, such as "ssp:3", or a `shoal.sync.Policy`. A second call gives the same
    worker, and warns if it asks for another `sync`.
    """
    before = _joined.get(os.getpid())
    if before is not None and not before.client.closed:
        _tell_of_other_word(before, sync)
        return before
    given = {"SHOAL_SYNC": sync, "SHOAL_BATCH": batch}
    here = read_worker_environment({k: v for k, v in os.environ.items() if given.get(k) is None})
    address = here.address if address is None else address
    rank = here.rank if rank is None else rank
    world_size = here.world_size if world_size is None else world_size
    policy = as_policy(sync or here.sync or "bsp")
    batch = check_batch(batch or here.batch or "split")
    if world_size < 1 or not 0 <= rank < world_size:
        raise BadInput(
            f"join: rank is {rank} of {world_size} workers; ranks are 0 to {max(world_size, 1) - 1}"
        )
    if address is None and world_size > 1:
        raise BadInput(
            f"join: there are {world_size} workers and no address: several need servers that they share. "
            f"Start the script with `shoal run`, or start servers with `shoal up` and set SHOAL_ADDRESS and "
            f"SHOAL_TOKEN_FILE as it says"
        )
    name = client_name(rank) if address is not None else None
    client = connect("memory://" if address is None else address, token=token, name=name)
    wait_s = here.wait_s or WAIT_S
    worker = Worker(
        client,
        policy,
        rank=rank,
        world_size=world_size,
        group=Lone(),
        job=here.job,
        batch=batch,
        seed=here.seed or 0,
        wait_s=wait_s,
        straggler=here.straggler,
        history=here.history,
    )
    worker.bears_nan = here.nan
    _joined[os.getpid()] = worker
    atexit.register(_leave, worker)
    if policy.dense_home == "peers" and (world_size > 1 or here.job is not None):
        worker.group = _group(worker, supervised=here.job is not None)
    return worker


def _tell_of_other_word(worker: Worker, sync: str | Policy | None) -> None:
    if sync is None:
        return
    asked = as_policy(sync)
    if worker.policy not in (asked, asked.with_whole_batches()):
        _log.warning(
            "join(sync=%s) gives the worker that has joined already, under %s: a script has one word, that "
            "of its first join",
            asked,
            worker.policy,
        )


def _group(worker: Worker, *, supervised: bool) -> Group:
    """One that outlives its members, where somebody replaces them and Shoal may make it."""
    if supervised and not torch.distributed.is_initialized() and not torch.cuda.is_available():
        return Regroup(worker)
    worker.barrier()  # first by our own means: they name whoever does not come
    return Meeting(worker, open_group(worker.rank, worker.world_size, worker.waits.seconds))


def _leave(worker: Worker) -> None:
    if _joined.get(os.getpid()) is worker:
        del _joined[os.getpid()]
        # The script raised: its supervisor ends the job, and what the others would fail with is no reason.
        raised = hasattr(sys, "last_value")
        worker.close(tells=worker.job is None or not raised)


def local_workers(
    count: int,
    sync: str | Policy = "bsp",
    *,
    batch: str = "split",
    client: Client | None = None,
    wait_s: float = WAIT_S,
) -> list[Callable[[], Worker]]:
    """Makers of `count` workers that are threads of this process over one embedded store.

    For tests and notebooks: call each in a thread of its own. Real jobs are processes: see `shoal run`.
    """
    policy = as_policy(sync)
    store = client or connect("memory://")
    shared: dict[int, torch.Tensor] = {}
    groups = ThreadGroup.make(count, wait_s)

    def maker(rank: int) -> Callable[[], Worker]:
        def make() -> Worker:
            worker = Worker(
                store.fork(),
                policy,
                rank=rank,
                world_size=count,
                group=Lone(),
                batch=batch,
                threads=shared,
                wait_s=wait_s,
            )
            worker.group = Meeting(worker, groups[rank])
            return worker

        return make

    return [maker(rank) for rank in range(count)]
