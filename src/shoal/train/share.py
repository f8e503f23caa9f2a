"""What the loop has drawn since the last step, and what a step is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.train.passes import Passes

# The samples of a batch that does not say how many it holds.
UNKNOWN = -1


class Drawn(NamedTuple):
    """One unit that the loop has got, or that was empty: its pass and number, samples here and in all."""

    passes: Passes
    epoch: int
    unit: int
    samples: int
    global_samples: int


@dataclass
class Share:
    """What a step is made of: samples here, samples of the whole batches, and what it counts for."""

    samples: float = 0.0
    global_samples: float = 0.0
    weight: float = 0.0  # in a round: the samples, or what the script says, by what the worker is trusted
