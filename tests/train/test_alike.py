"""Workers of one job that are told to synchronise in different ways: one of them says so when it joins."""

from __future__ import annotations

import pytest

from shoal.errors import Mismatch
from shoal.store.connect import connect
from shoal.sync import Bounded, Each, Gradient, One, Policy, Share
from shoal.train.join import local_workers
from shoal.train.worker import Worker


def joined_in_turn(*how: tuple[str | Policy, str]) -> list[Worker]:
    """A worker for each sync and batch, of one job."""
    client = connect("memory://", timeout=5.0)
    return [
        local_workers(len(how), sync, batch=batch, client=client)[rank]()
        for rank, (sync, batch) in enumerate(how)
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("asp", "asp,scale=1"),
        ("average:2", "average:5"),
        ("average:2", "average:2,state=average"),
        ("average:2", "diloco:2"),
        ("asp", "easgd:2"),
        ("asp", "dcasgd:5"),
        ("asp", "downpour:3,3"),
        ("bsp", "allreduce"),
        ("bsp", "average:1"),
        ("bsp", "bsp,rows=asp"),
        ("bsp", "asp"),  # whose clock is another, too
        ("ssp:3", "ssp:4"),
    ],
)
def test_workers_of_different_words_do_not_train_together(first: str, second: str) -> None:
    with pytest.raises(Mismatch) as failure:
        joined_in_turn((first, "split"), (second, "split"))
    assert str(failure.value) == (
        "workers 1 and 0 synchronise in different ways:\n"
        f"  worker 1: sync {second}, batch split\n"
        f"  worker 0: sync {first}, batch split\n"
        "Give every worker of the job the same: by shoal.join(sync=..., batch=...), or by SHOAL_SYNC and "
        "SHOAL_BATCH on every node"
    )


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_workers_that_draw_their_batches_differently_do_not_train_together(sync: str) -> None:
    with pytest.raises(
        Mismatch, match=rf"worker 1: sync {sync}, batch each\n  worker 0: sync {sync}, batch s"
    ):
        joined_in_turn((sync, "split"), (sync, "each"))


def test_workers_of_different_policies_without_a_word_do_not_train_together() -> None:
    ours, theirs = (Policy(Bounded(8), Each(), scale, Gradient()) for scale in (Share(), One()))
    for one, other in [(ours, theirs), (ours.called("mine"), theirs.called("mine"))]:
        with pytest.raises(Mismatch) as failure:
            joined_in_turn((one, "split"), (other, "split"))
        assert f"worker 1: {'sync ' * (one.word == '')}{theirs!r}, batch split" in str(failure.value)
        assert f"worker 0: {'sync ' * (one.word == '')}{ours!r}, batch split" in str(failure.value)


def test_one_policy_by_several_names_is_one_policy() -> None:
    own = Policy(Bounded(3), Each(), Share(), Gradient())
    workers = joined_in_turn(
        ("ssp:3", "split"), ("delay:3", "split"), ("ssp:3,scale=share", "split"), (own, "split")
    )
    for worker in workers:
        worker.close()


def test_who_does_not_fit_is_not_waited_for() -> None:
    client = connect("memory://", timeout=5.0)
    first = local_workers(2, "bsp", client=client, wait_s=5.0)[0]()
    with pytest.raises(Mismatch, match="sync allreduce, batch split\n  worker 0: sync bsp"):
        local_workers(2, "allreduce", client=client)[1]()
    first.barrier()
    first.close()


def test_the_next_job_on_the_same_servers_may_synchronise_differently() -> None:
    client = connect("memory://", timeout=5.0)
    for sync in ("asp", "asp,scale=1"):
        for worker in [make() for make in local_workers(2, sync, client=client)]:
            worker.close()
