"""What workers compare of a loader: the order of its batches, their keys, and the steps made with them.

Each tells the others by notices and looks at theirs; nobody waits for it. What differs raises `Mismatch`, on
whoever sees it. Orders and first batches are compared as they come: the later of two sees it. Later batches
may have other keys, as long as all parts of one have the same, and whether they have is known once others
have trained theirs: at the end of a round, or of the pass. How many steps workers made is known at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import Mismatch

if TYPE_CHECKING:
    from shoal.train.worker import Worker

TOPICS = 5  # of notices that a loader takes; the last is that of `shoal.train.passes`
_ORDER, _KEYS, _STEPS, _DONE = range(4)
_EXACT = 1 << 24  # a notice holds whole numbers below it
_BATCHES_MAX = 1024  # of which it is kept that they had other keys


class Agreement:
    """Of one worker with the others, on one loader. Its notices have the topics from `topic` on."""

    def __init__(self, worker: Worker, topic: int, name: str) -> None:
        self._worker, self._topic, self._name = worker, topic, name
        self._kinds: list[str] = []  # the keys that batches had, in words; those of the first come first
        # Those that are not compared yet, and which parts of which batches had them.
        self._new: dict[str, dict[int, set[int]]] = {}
        self._since = 0  # the steps made before they came

    def order(self, epoch: int, run: int, order: str) -> None:
        """All workers must cut the same batches, or samples are left out and others are used twice."""
        self._new = {}  # of a pass that was left
        worker, prefix = self._worker, f"{run}: "
        for rank, note in worker.agree(self._topic + _ORDER, prefix + order):
            if note.startswith(prefix):  # it may be in another pass
                raise Mismatch(
                    f"pass {epoch}{self._name}: workers {worker.rank} and {rank} have different data, or "
                    f"draw it in different order: {order}, and {note.removeprefix(prefix)}. "
                    f"Give every worker the same dataset, batch_size and sampler; seed its generator alike"
                )

    def done_before(self, said: str) -> None:
        """This is done by a loader's state, which all must have from the same step."""
        worker = self._worker
        for rank, note in worker.agree(self._topic + _DONE, said):
            raise Mismatch(
                f"the loaders{self._name} of workers {worker.rank} and {rank} go on with different states, "
                f"by which these were done: {said}; and {note}. Call load_state_dict with the same state on "
                f"all"
            )

    # Keys: workers whose batches have different ones compute different things.

    def sees(self, batch: Any, place: tuple[int, int] | None) -> None:
        """The loop gets a batch; `place`: which part it is of which batch, where others have the rest."""
        keys = ", ".join(sorted(map(str, batch))) if isinstance(batch, Mapping) else ""
        if keys not in self._kinds:
            self._meets(keys)
        had = self._new.get(keys)
        if had is not None and place is not None and (place[0] in had or len(had) < _BATCHES_MAX):
            had.setdefault(place[0], set()).add(place[1])

    def _meets(self, keys: str) -> None:
        worker, topic, first = self._worker, self._topic + _KEYS, not self._kinds
        if first and worker.board is not None and not worker.rounds.first:
            # What an earlier life of it has met nobody takes for unknown here.
            before = worker.board.text(worker.rank, topic)
            self._kinds = [] if before is None else before.split("\n")
        if keys not in self._kinds:
            self._kinds.append(keys)
        if not first:
            self._new[keys], self._since = {}, worker.steps_made
        notes = worker.lives.again(lambda: list(worker.agree(topic, "\n".join(self._kinds))))
        for rank, note in notes:
            if first and keys not in note.split("\n"):
                self._differ(keys, rank, note)

    def is_due(self) -> bool:
        """Whether there are new keys, and a step was made since."""
        return bool(self._new) and self._worker.steps_made > self._since

    def compare_keys(self, epoch: int, parts: int, *, fixed: bool) -> None:
        """Others have trained what they have of the batches with new keys, each of so many parts: in `fixed`
        order one each, else whichever they got.
        """
        worker, board, new, self._new = self._worker, self._worker.board, self._new, {}
        if not new or board is None:
            return
        topic, text = self._topic + _KEYS, "\n".join(self._kinds)
        done = worker.lives.again(lambda: worker.rounds.report(epoch))["by_rank"]
        notes = worker.lives.again(lambda: dict(board.differing(topic, text, worker.rounds)))
        others = {rank: units for rank, units in done.items() if units and rank != worker.rank}
        for keys, had in new.items():
            lack = [rank for rank in others if rank in notes and keys not in notes[rank].split("\n")]
            if fixed:  # who has trained so many units has had its part of it
                lack = [rank for rank in lack if had and others[rank] > min(had)]
            elif len(lack) < len(others) or all(len(own) >= parts for own in had.values()):
                lack = []  # who had the other parts is not known
            if lack:
                self._differ(keys, lack[0], notes[lack[0]])

    def _differ(self, keys: str, rank: int, note: str) -> None:
        there = "; ".join(kind or "none" for kind in note.split("\n"))
        raise Mismatch(
            f"the batches{self._name} of workers {self._worker.rank} and {rank} have different keys: "
            f"{keys or 'none'}, and {there}. Let collate_fn give the same keys on every worker"
        )

    # Steps: where each round has a contribution of everybody, who makes fewer is in others' rounds.

    def tell_steps(self, run: int, made: int) -> None:
        """This worker has made so many steps with all that it has of a pass, and of nothing else."""
        if self._worker.board is not None:
            # Who has not marked anything has marked zeros.
            self._worker.board.mark(self._topic + _STEPS, *divmod(run, _EXACT), min(made + 1, _EXACT - 1))

    def compare_steps(self, epoch: int, run: int, made: int) -> None:
        """All others have said it, too, but those that have trained more or less of the pass."""
        worker = self._worker
        if worker.board is None:
            return
        marks = worker.board.marks(self._topic + _STEPS, range(worker.world_size))
        said = {rank: mark[3] - 1 for rank, mark in marks.items() if tuple(mark[1:3]) == divmod(run, _EXACT)}
        steps = {rank: count for rank, count in said.items() if count >= 0} | {worker.rank: made}
        fewest, most = min(steps, key=lambda rank: steps[rank]), max(steps, key=lambda rank: steps[rank])
        if steps[fewest] < steps[most]:
            raise Mismatch(
                f"pass {epoch}{self._name}: worker {fewest} made {steps[fewest]} steps, and worker {most} "
                f"made {steps[most]}. Under {worker.policy} a step is made of one batch on all workers: who "
                f"leaves one out is a batch ahead of the others from there on. Call optimizer.step() for "
                f"every batch on every worker, after optimizer.zero_grad() where there is nothing to learn"
            )
