"""What workers tell each other in words: each posts a note, and reads what the others posted.

For what all must agree on and nobody checks otherwise: the model, the order of the data. A worker posts
first and reads then, so of two that disagree the later one sees it, without anybody waiting. Notes lie in a
table of the store, a byte in each float. A note counts only under the life of the worker that wrote it:
servers may hold those of an earlier job.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shoal import optim
from shoal.store.client import Client
from shoal.store.rounds import Rounds

TABLE = "shoal.notices"
_DIM = 16
# Whole numbers up to here are exact in a float32.
_EXACT = 1 << 24
_TEXT_BYTES_MAX = 1 << 22
_TRIES = 100
_LIFE = 0  # the topic of a worker's life itself


class Noticeboard:
    """The notes of one job's workers, as worker `rank` sees them. Made before it joins the job's rounds.

    What the worker `says` of itself is there as long as it lives, for the `strangers` that come later.
    """

    def __init__(self, client: Client, rank: int, says: str = "") -> None:
        self._rank, self.says = rank, says
        self._table = client.table(TABLE, dim=_DIM, optimizer=optim.SGD(lr=1.0))
        self._life = 1 + secrets.randbelow(_EXACT - 1)
        self.announce()

    def announce(self) -> None:
        """Put this worker's life down; again where the table was replaced by that of a checkpoint."""
        self.post(_LIFE, self.says)

    def strangers(self, rounds: Rounds) -> Iterator[tuple[int, str]]:
        """The other workers of this job that say something else of themselves than this one, and what."""
        for rank, says in self.differing(_LIFE, self.says, rounds):
            # Higher ranks may be there since a checkpoint of a larger job, and are none of this one.
            if says and rank < rounds.workers:
                yield rank, says

    def post(self, topic: int, text: str) -> None:
        """Replace this worker's note on a topic (1 to 65,535)."""
        data = text.encode()[:_TEXT_BYTES_MAX]
        padded = np.zeros(-(-len(data) // _DIM) * _DIM, np.float32)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        keys = [_key(self._rank, topic, 1 + at) for at in range(len(padded) // _DIM)]
        if keys:
            self._table.assign(keys, padded.reshape(-1, _DIM))
        # Last: whoever sees it sees the text, too.
        self._table.assign([_key(self._rank, topic)], _row(self._life, len(data), *_digest(data)))

    def differing(self, topic: int, text: str, rounds: Rounds) -> Iterator[tuple[int, str]]:
        """The other workers of this job whose note on the topic is not `text`, each with its note."""
        # Asked before the notes are read: who is here by then has put down its life before.
        others = [rank for rank in rounds.joined() if rank != self._rank]
        if not others:
            return
        lives = self._table.pull([_key(rank, _LIFE) for rank in others])
        heads = self._table.pull([_key(rank, topic) for rank in others])
        own = _digest(text.encode()[:_TEXT_BYTES_MAX])
        for rank, life, head in zip(others, lives, heads, strict=True):
            if head[0] == life[0] != 0 and tuple(map(int, head[2:4])) != own:
                note = self.text(rank, topic)
                if note is not None and note != text:
                    yield rank, note

    def posted(self, topic: int, text: str, ranks: Sequence[int]) -> list[int]:
        """Which of these ranks have posted exactly `text`."""
        heads = self._table.pull([_key(rank, topic) for rank in ranks])
        own = _digest(text.encode())
        return [rank for rank, head in zip(ranks, heads, strict=True) if tuple(map(int, head[2:4])) == own]

    def mark(self, topic: int, *numbers: int) -> None:
        """Replace this worker's note on a topic by a few whole numbers below 2^24."""
        self._table.assign([_key(self._rank, topic)], _row(self._life, *numbers))

    def marks(self, topic: int, ranks: Sequence[int]) -> dict[int, list[int]]:
        """The life of each of these ranks that has one, and the numbers that it has put down in it."""
        rows = self._table.pull([_key(rank, at) for at in (_LIFE, topic) for rank in ranks]).astype(int)
        found = zip(ranks, rows[: len(ranks), 0], rows[len(ranks) :], strict=True)
        return {rank: [int(life), *map(int, row[1:] * (row[0] == life))] for rank, life, row in found if life}

    def note(self, rank: int, topic: int) -> str | None:
        """What the worker of that rank has posted on the topic in this life, if anything."""
        life, head = self._table.pull([_key(rank, _LIFE), _key(rank, topic)])
        return self.text(rank, topic) if head[0] == life[0] != 0 else None

    def text(self, rank: int, topic: int) -> str | None:
        """A note of any life that is whole: its writer may be replacing it just now. None if it never is."""
        for _ in range(_TRIES):
            head = self._table.pull([_key(rank, topic)])[0]
            if not head.any():
                return None
            length = int(head[1])
            keys = [_key(rank, topic, 1 + at) for at in range(-(-length // _DIM))]
            values = self._table.pull(keys).reshape(-1) if keys else np.zeros(0, np.float32)
            data = values[:length].astype(np.uint8).tobytes()
            if tuple(map(int, head[2:4])) == _digest(data):
                return data.decode(errors="replace")
        return None


def _key(rank: int, topic: int, at: int = 0) -> int:
    return (rank << 40) | (topic << 24) | at


def _row(*numbers: int) -> npt.NDArray[np.float32]:
    row = np.zeros((1, _DIM), np.float32)
    row[0, : len(numbers)] = numbers
    return row


def _digest(data: bytes) -> tuple[int, int]:
    # For mistakes, not for malice.
    return zlib.crc32(data) % _EXACT, zlib.adler32(data) % _EXACT
