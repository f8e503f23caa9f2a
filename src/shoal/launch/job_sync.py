"""How the workers of a job synchronise: as `--sync` says, unless their script says otherwise.

Of a script's own `shoal.join(sync=...)` the supervisor learns from what workers report when they have joined.
"""

from __future__ import annotations

from shoal.fleet.local import LocalCluster
from shoal.launch.board import Board
from shoal.launch.eviction import TIMEOUT_S
from shoal.launch.options import JobOptions
from shoal.store.rounds import Rounds
from shoal.sync.words import parse


class JobSync:
    """That of one job, as far as it is known."""

    def __init__(self, options: JobOptions) -> None:
        self._given = options.sync is not None
        self.policy = parse(options.word)
        self.batch = options.batch

    @property
    def record(self) -> dict[str, str]:
        """What the job's record has of it."""
        return {"sync": str(self.policy), "batch": self.batch}

    @property
    def on_workers(self) -> bool:
        """Whether the model lies on the workers alone."""
        return self.policy.dense_home in ("peers", "shared")

    def look(self, board: Board) -> str | None:
        """Take what the workers say; news for the user, if that is something else."""
        policy, batch = board.policy or self.policy, board.batch or self.batch
        if (policy, batch) == (self.policy, self.batch):
            return None
        news = [f"sync {policy}"] * (policy != self.policy) + [f"batch {batch}"] * (batch != self.batch)
        text = f"the script's shoal.join says {' and '.join(news)}"
        if policy != self.policy and self._given:
            text += f"; --sync {self.policy} is not used"
        self.policy, self.batch = policy, batch
        return text

    def resize(self, cluster: LocalCluster, workers: int) -> None:
        """Let the job go on with so many workers; ShoalError: it cannot."""
        with cluster.connect(lane="unix", timeout=TIMEOUT_S) as client:
            Rounds(client, 0, workers).open(**self.policy.core_spec(workers), resize=True)
