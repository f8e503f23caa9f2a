"""Workers of a job synchronise alike. The sync shard compares clocks; workers tell each other the rest."""

from __future__ import annotations

from contextlib import suppress

from shoal.errors import Mismatch, ShoalError
from shoal.store.rounds import Rounds
from shoal.sync.policy import Policy
from shoal.train.noticeboard import Noticeboard


def said_of(policy: Policy, batch: str) -> str:
    """What a worker says of itself: what is compared, and what is shown of it."""
    # By its parts: one policy may have two names, and a name may be anything.
    return f"{policy!r}, batch {batch}\nsync {policy}, batch {batch}"


def enter(rounds: Rounds, policy: Policy, board: Noticeboard | None, *, back: bool) -> int:
    """Join the job's rounds; the step to begin with. Mismatch if others synchronise in another way.

    Of two that differ the later one raises, and is not waited for.
    """
    try:
        step = rounds.open(**policy.core_spec(rounds.workers), back=back)
    except Mismatch:
        _compare(rounds, board)  # which says more than that the clocks differ
        raise
    try:
        _compare(rounds, board)
    except Mismatch:
        with suppress(ShoalError):
            rounds.leave()
        raise
    return step


def _compare(rounds: Rounds, board: Noticeboard | None) -> None:
    if board is None:
        return
    mine, my_words = board.says.split("\n", 1)
    for rank, said in board.strangers(rounds):
        there, words = said.split("\n", 1)
        if there == mine:
            continue
        if words == my_words:
            words, my_words = there, mine
        raise Mismatch(
            f"workers {rounds.rank} and {rank} synchronise in different ways:\n"
            f"  worker {rounds.rank}: {my_words}\n"
            f"  worker {rank}: {words}\n"
            "Give every worker of the job the same: by shoal.join(sync=..., batch=...), or by SHOAL_SYNC and "
            "SHOAL_BATCH on every node"
        )
