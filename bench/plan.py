"""How long and how large a run is, and the alternation of systems that every workload uses."""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.contender import Contender
from bench.report import Book

Session = Callable[[Contender], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    repetitions: int = 3
    seconds: float = 3.0  # of each timed window
    latency_samples: int = 5000
    rows: int = 1_000_000
    dense_elements: int = 25_000_000
    memory_rows: int = 10_000_000
    large_rows: int = 20_000_000
    training_steps: int = 150
    only: frozenset[str] = frozenset()  # workloads asked for; empty = all
    contenders: tuple[str, ...] = ()  # name prefixes asked for; empty = all

    def wants(self, workload: str) -> bool:
        return not self.only or workload in self.only


QUICK = Plan(
    repetitions=1,
    seconds=0.6,
    latency_samples=1000,
    memory_rows=2_000_000,
    large_rows=4_000_000,
    training_steps=40,
)


def alternate(book: Book, plan: Plan, label: str, contenders: Iterable[Contender], session: Session) -> None:
    """Runs `session` for each contender in turn, `plan.repetitions` times round.

    One that is missing or fails is named and left out of the rest of this workload, not of the next.
    """
    chosen = [c for c in contenders if not plan.contenders or c.name.startswith(plan.contenders)]
    for repetition in range(plan.repetitions):
        for contender in list(chosen):
            if reason := contender.missing():
                book.skip(contender.name, reason)
                chosen.remove(contender)
                continue
            begin = time.monotonic()
            try:
                figures = session(contender)
            except Exception as error:  # noqa: BLE001 - one contender's failure must not end the others' run.
                book.skip(f"{contender.name} in {label}", f"{type(error).__name__}: {error}")
                note(f"{label} {contender.name}: FAILED: {error}")
                chosen.remove(contender)
                continue
            for metric, value in figures.items():
                book.add(metric, contender.name, value)
            shown = ", ".join(f"{metric} {value:.4g}" for metric, value in figures.items())
            turn = f"{repetition + 1}/{plan.repetitions}"
            note(f"{label} {turn} {contender.name}: {shown} ({time.monotonic() - begin:.1f} s)")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
