"""`worker.state`: a dict of the script's own that lies at the servers, and so in every checkpoint.

It is sent with the next step, barrier or save if it has changed, and is there again when a worker is started
in the place of another, when a job goes on from a checkpoint, and after `worker.load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shoal.errors import BadInput

if TYPE_CHECKING:
    from shoal.train.noticeboard import Noticeboard
    from shoal.train.worker import Worker

_TOPIC = (1 << 16) - 4  # of the notices; groups have those above


class KeptState(dict[str, Any]):
    """That of one worker: values that JSON can hold."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._kept = b"{}"

    def keep(self) -> None:
        """Send it, if it has changed."""
        if not self and self._kept == b"{}":
            return
        try:
            now = msgspec.json.encode(dict(self))
        except TypeError as error:
            raise BadInput(f"worker.state holds what JSON cannot hold: {error}") from None
        if now != self._kept:
            self.board.post(_TOPIC, now.decode())
            self._kept = now

    def bring_back(self) -> None:
        """Make it what was sent last by whoever had this rank, in the job or in the checkpoint."""
        self._kept = (self.board.text(self._worker.rank, _TOPIC) or "{}").encode()
        self.clear()
        self.update(msgspec.json.decode(self._kept))

    @property
    def board(self) -> Noticeboard:
        """The worker's, also where it is alone."""
        return self._worker.notes
