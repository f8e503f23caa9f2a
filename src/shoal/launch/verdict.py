"""How a job ends: the first cause decides the exit code. No process is touched here.

1. all workers ended with code 0 and had joined: 0;
2. the first worker that fails: its code, 128 + signal if it was killed. One that died, without a chance to
   leave the job, is started again instead, as often as the job allows. One that is killed when it has left
   the job ends nobody else, and decides when all are done. One that fails while another that left
   the job before it is still ending may do so for that one's sake (a sys.exit): the other's end is awaited;
3. a worker that ended with code 0 and never joined, or one that others wait for past the deadline: 2;
4. a signal to the supervisor: 128 + its number, as shells do (Ctrl-C is 130);
5. a server is lost or cannot be replaced, a worker stands still at the end, or
   the last checkpoint could not be made: 1; the job's time is over: 124, as timeout(1) has it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.launch.worker import exit_code, how_ended, signal_name

CODE_ERROR = 1
CODE_MISUSE = 2
CODE_TIMEOUT = 124
# An interpreter that is ending has ended by then, also on a busy machine.
_ENDING_S = 20.0


@dataclass(frozen=True)
class Ending:
    """Why the job ends, in a sentence. `rank` is the worker whose last words explain it, if any."""

    code: int
    sentence: str
    rank: int | None = None


class Verdict:
    """Collects what happens to a job. `ending` is set by the first cause and stays."""

    def __init__(self, restarts_max: int = 0, replicas: int = 0) -> None:
        self.ending: Ending | None = None
        self.restarts = 0
        self._restarts_max = restarts_max
        self._replicas = replicas
        self._held: list[tuple[Ending, set[int]]] = []  # who has failed, and whose end is awaited first
        self._decide_at = math.inf
        self._behind: Ending | None = None  # who was killed when it had left the job

    @property
    def code(self) -> int:
        """The exit code so far."""
        return 0 if self.ending is None else self.ending.code

    @property
    def sentence(self) -> str | None:
        """Why it ends, if it does not end well."""
        return None if self.ending is None else self.ending.sentence

    @property
    def may_restart(self) -> bool:
        """Whether a worker that dies now would be started again."""
        return self.ending is None and self.restarts < self._restarts_max

    def worker_ended(
        self,
        rank: int,
        returncode: int,
        *,
        joined: bool,
        left: bool = False,
        behind: Collection[int] = (),
        now: float = 0.0,
    ) -> str | None:
        """A worker ended by itself or by a signal; what is said of one that is to be started again.

        `left`: it left the job in order, as a script does that returns, raises or calls sys.exit: what it
        then fails with is its own mistake, and would be made again. `behind`: those that had left before it
        and have not ended.
        """
        died = not left and (returncode < 0 or (returncode > 0 and joined))
        if died and self.may_restart:
            self.restarts += 1
            how = how_ended(returncode)
            return f"worker {rank} {how} and is started again ({self.restarts} of {self._restarts_max})"
        # Whoever failed behind it did so for its sake, if it fails.
        self._held = [(ending, of - {rank}) for ending, of in self._held if returncode == 0 or rank not in of]
        if returncode > 0 and behind:
            failed = Ending(returncode, f"worker {rank} failed with code {returncode}", rank)
            self._held.append((failed, set(behind)))
            self._decide_at = min(self._decide_at, now + _ENDING_S)
        elif returncode < 0 and left:
            how = f"{how_ended(returncode)}, behind its training"
            self._behind = self._behind or Ending(exit_code(returncode), f"worker {rank} {how}", rank)
        elif returncode < 0:
            self._end(exit_code(returncode), f"worker {rank} {how_ended(returncode)}", rank)
        elif returncode > 0:
            self._end(returncode, f"worker {rank} failed with code {returncode}", rank)
        elif not joined:
            self._end(CODE_MISUSE, f"worker {rank} ended without calling shoal.join()")
        self.decide(now)
        return None

    def decide(self, now: float = math.inf) -> None:
        """Of the workers that have failed the first is the cause for whom nobody is awaited any more; without
        a time nobody is.
        """
        for failed, awaited in self._held:
            if not awaited or now >= self._decide_at:
                self._end(failed.code, failed.sentence, failed.rank)

    def trained(self) -> None:
        """All have ended, and what is to be saved is saved: what happened behind the training counts now."""
        self.ending = self.ending or self._behind

    def not_joined(self, rank: int, waiting: Sequence[int], seconds: float) -> None:
        """A worker has not joined in time, and others wait for it."""
        others = ", ".join(map(str, waiting))
        self._end(
            CODE_MISUSE,
            f"worker {rank} has not called shoal.join() within {seconds:g} s, and worker {others} waits for "
            "it; call it, or allow more with --join-timeout",
        )

    def stands_still(self, rank: int) -> None:
        """A worker is stopped, may not be replaced, and is all that the job waits for."""
        self._end(CODE_ERROR, f"worker {rank} stands still, and all others are done")

    def signalled(self, number: int) -> None:
        """The supervisor was told to end."""
        name = "Ctrl-C" if number == signal.SIGINT else signal_name(number)
        self._end(128 + number, f"stopped by {name}")

    def server_lost(self, index: int, pid: int) -> None:
        """A server ended; there is no copy of its rows."""
        hint = "" if self._replicas else "; with --replicas 1 a copy on another server would go on"
        self._end(CODE_ERROR, f"server {index} (pid {pid}) has ended, and its rows are gone{hint}")

    def nobody_answers(self, index: int, pid: int, seconds: float) -> None:
        """A server ended, and the coordinator cannot be told: nobody takes its place."""
        why = f"the coordinator has not answered for {seconds:g} s"
        self._end(CODE_ERROR, f"server {index} (pid {pid}) has ended, and {why}")

    def server_replaced(self) -> bool:
        """Whether another server is started for one that ended, as is done for workers."""
        again = self.may_restart
        self.restarts += again
        return again

    def not_saved(self, why: str) -> None:
        """All is trained, and would be lost: what was asked for is the checkpoint, too."""
        self._end(CODE_ERROR, f"trained to the end, but no last checkpoint could be made: {why}")

    def timed_out(self, seconds: float) -> None:
        """The job did not end within its --timeout."""
        self._end(CODE_TIMEOUT, f"stopped: not done within --timeout {seconds:g} s")

    def _end(self, code: int, sentence: str, rank: int | None = None) -> None:
        if self.ending is None:
            self.ending = Ending(code, sentence, rank)
