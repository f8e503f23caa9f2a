"""What is compared: the words, the seeds, the target; checked before anything runs."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.config import check_count
from shoal.errors import BadInput
from shoal.launch.options import JobOptions
from shoal.sync.words import parse_list

SEEDS_MAX = 100
RESULTS = "results.json"
_REACHED = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Target:
    """A value of a metric that ends the race: at most (`<=`) or at least (`>=`) that."""

    metric: str
    relation: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target of a text. `loss=0.3` is at most that; of other metrics it has to be said.

        >>> Target.parse("accuracy>=0.9")
        Target(metric='accuracy', relation='>=', value=0.9)
        """
        found = re.fullmatch(r"\s*([^<>=\s]+)\s*(<=|>=|=)\s*(\S+)\s*", text)
        try:
            value = float(found[3]) if found else float("nan")
        except ValueError:
            value = float("nan")
        if found is None or not abs(value) < float("inf"):
            raise BadInput(f"target is {text!r}; it is written loss=0.3, loss<=0.3 or accuracy>=0.9")
        metric, relation = found[1], found[2]
        if relation == "=":
            if "loss" not in metric:
                raise BadInput(
                    f"target {text!r}: is more of {metric} better or less? Say {metric}>={found[3]} or "
                    f"{metric}<={found[3]}"
                )
            relation = "<="
        return cls(metric, relation, value)

    def reached(self, value: float) -> bool:
        """Whether `value` is as good as the target."""
        return bool(_REACHED[self.relation](value, self.value))

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.value:g}"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """One comparison. `command` is that of a job; `{seed}` in its arguments stands for the seed."""

    command: tuple[str, ...]
    # A list of words; the first is what the others are compared with.
    sync: str
    # Each word runs with the seeds 0 to seeds - 1.
    seeds: int = 3
    # None: there is no race, only what was reached at the end.
    target: Target | None = None
    # Directories of the jobs, results.json and compare.png.
    directory: Path
    workers: int = 2
    servers: int = 1
    batch: str = "split"
    straggler: str = ""
    # Each job is stopped after this; what it had reached by then counts.
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_count("seeds", self.seeds, 1, SEEDS_MAX)
        words = self.words
        if twice := {word for word in words if words.count(word) > 1}:
            raise BadInput(f"sync {self.sync!r}: {sorted(twice)[0]} is there twice")
        for word in words:
            self.job(word, 0)
        if (self.directory / RESULTS).exists():
            raise BadInput(f"out: {self.directory} holds an earlier comparison; name another directory")

    @property
    def words(self) -> list[str]:
        """The sync words in the order given."""
        return [str(policy) for policy in parse_list(self.sync)]

    def job(self, word: str, seed: int) -> JobOptions:
        """The job of one word with one seed."""
        path = self.directory.resolve() / f"{word}-{seed}"
        return JobOptions(
            command=tuple(part.replace("{seed}", str(seed)) for part in self.command),
            workers=self.workers,
            servers=self.servers,
            sync=word,
            batch=self.batch,
            seed=seed,
            straggler=self.straggler,
            history=True,
            max_restarts=0,  # a run with a death in it is no measurement
            name=f"{path.parent.name}-{path.name}",
            directory=path,
            timeout_s=self.timeout_s,
        )
