"""What a loader's state says is done, told to a job whose ledger does not know it: each worker finishes a
step that has no gradient and names the units. So they are done once, by who loaded the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.loader import ShardedLoader
from shoal.errors import BadInput, Mismatch

if TYPE_CHECKING:
    from shoal.train.worker import Worker

_UNITS_A_STEP = 1 << 16
_HERE = ("working", "waiting", "at_end")


def tell_done(worker: Worker, loader: ShardedLoader, number: int, epoch: int) -> None:
    """Pass `epoch`, which the ledger has as `number`, is open, and nothing of it was handed out here."""
    loaded = loader.loaded(epoch)
    if not loaded or worker.strategy is None or loader.stream_batches is not None:
        return
    again = worker.lives.again
    by_rank = again(lambda: worker.rounds.report(number))["by_rank"]
    if loader.ledger.ordered:
        _, known = again(lambda: worker.rounds.resume(number))
        units = sorted(loaded.difference(known))
    elif by_rank.get(worker.rank, 0) >= len(loaded):
        return  # the ledger was restored, too
    elif worker.world_size > 1:
        raise BadInput(
            f"worker {worker.rank}, pass {epoch}: the loader's state says that {len(loaded)} units are done, "
            f"and the job's ledger knows nothing of them. Under {worker.policy} data is leased, and a worker "
            f"knows its own units alone: others would be trained twice. Go on from a checkpoint of the job: "
            f"worker.save(url), worker.load(url)"
        )
    else:
        units = sorted(loaded)
    for begin in range(0, len(units), _UNITS_A_STEP):
        worker._units = [(number, unit) for unit in units[begin : begin + _UNITS_A_STEP]]
        worker.advance(weight=0.0)
    if units and loader.ledger.ordered and worker.policy.clock.meets:
        _check_others(worker, number, epoch, len(units))


def _check_others(worker: Worker, number: int, epoch: int, units: int) -> None:
    """The round is over in which all others have told as many."""
    by_rank, phases = worker.rounds.report(number)["by_rank"], worker.rounds.state()["phases"]
    for rank in range(worker.world_size):
        # In whole batches the last one can be of some workers alone.
        if by_rank.get(rank, 0) < units - 1 and phases[rank] in _HERE:
            raise Mismatch(
                f"pass {epoch}: worker {worker.rank} goes on with a loader's state by which {units} of its "
                f"units are done, and worker {rank} does not. Call load_state_dict with the same state on all"
            )
