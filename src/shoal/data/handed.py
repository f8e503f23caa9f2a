"""What a source of batches gives to the loop: a unit with its batch, or the word that there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shoal.data.ledger import Ledger

# The unit of a step in which others have a batch and this worker has none to abstain from.
NO_UNIT = -1

Count = Callable[[Any], int]
Seen = Callable[[Any], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Handed:
    """One unit: its samples (0: an empty part, no batch), those of its global batch, and the batch."""

    unit: int
    samples: int
    global_samples: int
    batch: Any = None


def one_ahead(batches: Iterator[T], seen: Callable[[T], object]) -> Iterator[T]:
    """The same batches, each shown to `seen` before the one that comes before it is given.

    >>> [batch for batch in one_ahead(iter("abc"), lambda batch: print("sees", batch))]
    sees a
    sees b
    sees c
    ['a', 'b', 'c']
    """
    for now in batches:
        seen(now)
        for coming in batches:
            seen(coming)
            yield now
            now = coming
        yield now


class Source(Protocol):
    """Where batches come from: by index from a map-style dataset, or in turn from anything that iterates."""

    # Told of every batch of this worker's before the loop gets the one before it, if given.
    seen: Seen | None
    # The order of the pass that was started, in words: equal on all workers, or they read different batches.
    order: str

    def __len__(self) -> int:
        """How many batches this worker sees in a pass, static order assumed; TypeError where nobody knows."""
        ...

    def start(self, epoch: int, ledger: Ledger, done: set[int]) -> Iterator[Handed]:
        """The units of a pass but those that are `done`. Randomness is drawn when this is called."""
        ...

    def skip(self, epoch: int) -> None:
        """Pass over a pass, leaving all randomness as it would."""
        ...

    def state(self) -> dict[str, Any]:
        """Where randomness stands, as plain values."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Put randomness back."""
        ...
