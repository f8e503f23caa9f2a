"""The order of a DataLoader's samples, the same on every worker, without touching global random state.

Three cases, by where the randomness comes from:

1. The user's generator (of the loader or its sampler): drawn from as plain torch draws in one process, so the
   order is plain torch's. Every worker must have seeded it alike. Passes that are skipped are drawn, too.
2. torch's own samplers without a generator: they get one that depends on (seed, epoch) only.
3. Other samplers: they may draw from torch's, NumPy's or Python's global randomness. While they do so the
   global states are swapped for ones that depend on (seed, epoch), and put back at once.
"""

from __future__ import annotations

import copy
import hashlib
import random
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.errors import BadInput

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Global randomness is global: two threads must not swap it at once.
_SWAPPING = threading.RLock()


def derived(*parts: int | str) -> int:
    """A seed that depends on nothing but these.

    >>> derived(0, 1) == derived(0, 1) != derived(1, 0)
    True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Order:
    """One loader's order. `seeds` is the generator for the loader that fetches: it seeds their workers."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int) -> None:
        self._loader = loader
        self._seed = seed
        # Workers of an iterable dataset must draw alike, for all of them see all of it. Those of a map-style
        # dataset fetch different samples, and the same augmentation for all of them would be no good.
        self._rank = 0 if isinstance(loader.dataset, IterableDataset) else rank
        self._sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._generators = _generators(loader)
        self._primed = False
        self.seeds = torch.Generator()

    @property
    def known(self) -> bool:
        """Whether the sampler is torch's own: then its length is what it says, and it may be drawn lazily."""
        return self._seeded(torch.Generator()) is not None

    @property
    def length(self) -> int | None:
        """How many batches the sampler says it gives, if it says so."""
        try:
            return len(self._sampler)
        except (TypeError, NotImplementedError):  # a BatchSampler has a length only if its sampler has
            return None

    def begin(self, epoch: int) -> Iterator[Any]:
        """The index batches of a pass, drawn when asked for; the workers' seed is drawn now, as in torch."""
        self._draw_worker_seed(epoch)
        seed = derived(self._seed, epoch)
        sampler = self._seeded(torch.Generator().manual_seed(seed))
        return _Swapped(self._sampler, seed) if sampler is None else iter(sampler)

    def digest(self, epoch: int) -> int:
        """A number that stands for the order of the pass that begins now, as far as it depends on seeds."""
        states = b"".join(bytes(generator.get_state().numpy()) for generator in self._generators)
        return zlib.crc32(states, derived(self._seed, epoch) & 0xFFFFFFFF)

    def skip(self, epoch: int) -> None:
        """Leave the generators as a whole pass would."""
        if self._generators or not self.known:
            for _ in self.begin(epoch):
                pass

    def begin_stream(self, epoch: int) -> None:
        """The same for an iterable dataset, which has no indexes: only the workers' seed is drawn."""
        self._draw_worker_seed(epoch)

    def state(self) -> dict[str, Any]:
        """Where the user's generators stand, as plain values."""
        states = [bytes(generator.get_state().numpy()).hex() for generator in self._generators]
        return {"generators": states, "primed": self._primed}

    def load(self, state: dict[str, Any]) -> None:
        """Put the user's generators where `state` says."""
        states = state["generators"]
        if len(states) != len(self._generators):
            raise BadInput(
                f"the state is of a loader with {len(states)} generators; this has {len(self._generators)}"
            )
        for generator, text in zip(self._generators, states, strict=True):
            generator.set_state(torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8))
        self._primed = bool(state["primed"])

    def _draw_worker_seed(self, epoch: int) -> None:
        """Draw from the user's generator what torch draws when a pass begins."""
        loader = self._loader
        user = loader.generator
        if user is None:
            self.seeds.manual_seed(derived("workers", self._seed, epoch, self._rank))
        elif not (self._primed and loader.persistent_workers):
            before = user.get_state()
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=user).item())
            if self._rank == 0:
                self.seeds.set_state(before)
            else:
                self.seeds.manual_seed(derived("workers", drawn, self._rank))
        self._primed = True

    def _seeded(self, generator: torch.Generator) -> Iterable[Any] | None:
        """The sampler with `generator` where it has none of its own; None if it is not one of torch's."""
        top = self._sampler
        if type(top) is not BatchSampler:
            return _with_generator(top, generator)
        inner = _with_generator(top.sampler, generator)
        return None if inner is None else BatchSampler(inner, top.batch_size, top.drop_last)


def _with_generator(sampler: Any, generator: torch.Generator) -> Iterable[Any] | None:
    if type(sampler) is SequentialSampler or isinstance(sampler, range | list | tuple):
        return sampler
    if type(sampler) not in _RANDOM:
        return None
    if sampler.generator is not None:
        return sampler  # type: ignore[no-any-return]
    sampler = copy.copy(sampler)
    sampler.generator = generator
    return sampler  # type: ignore[no-any-return]


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The user's generators, each once: the loader's, and those of samplers within samplers."""
    found: list[torch.Generator] = []
    owner: Any = loader
    for owner in (
        loader,
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    ):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


class _Swapped:
    """Iterates a foreign sampler while global randomness is swapped for one of its own."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        torch_state = torch.Generator().manual_seed(seed).get_state()
        self._states: Sequence[Any] = (
            torch_state,
            np.random.RandomState(seed % (1 << 32)).get_state(),
            random.Random(seed).getstate(),
        )
        with _SWAPPING:
            self._swap()
            try:
                self._iterator = iter(sampler)
            finally:
                self._swap()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with _SWAPPING:
            self._swap()
            try:
                return next(self._iterator)
            finally:
                self._swap()

    def _swap(self) -> None:
        outside = (torch.default_generator.get_state(), np.random.get_state(), random.getstate())
        torch.default_generator.set_state(self._states[0])
        np.random.set_state(self._states[1])
        random.setstate(self._states[2])
        self._states = outside
