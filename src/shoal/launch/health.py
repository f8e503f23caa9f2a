"""Workers that run and yet are not well, found by what they report. Decides only; the supervisor acts.

A worker is compared with its own past or with its peers, by median and median absolute deviation (MAD), so
that a single odd report is no trouble:

1. exploding: its loss is far above what it was, in several reports in a row;
2. flat: its loss stands still while it steps, and while the script reports it anew;
3. stuck: within a pass it does not step, and does not wait for others, nor for servers;
4. slow: a step takes it far longer than its peers, not counting what it waits for them;
5. nan: its loss or gradient was not finite. Without a policy that raises on the worker itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from shoal.data.patience import mad
from shoal.errors import BadInput
from shoal.launch.board import Board
from shoal.train.progress import BETWEEN_PASSES, Progress

KINDS = ("exploding", "flat", "stuck", "slow", "nan")
# report: an event; scale: it counts a tenth; refuse: it counts nothing; replace: as if it had died.
POLICIES = {"report": 1.0, "scale": 0.1, "refuse": 0.0, "replace": 1.0}
_ON_ITS_WAY = ("training", "waiting", BETWEEN_PASSES)
_LOOKS_MAX = 120
_DEVIATIONS = 8.0
# Of a loss so many reports must be known before it explodes, and so many be far above them.
_EXPLODING_TIMES, _EXPLODING_AFTER, _EXPLODING_REPORTS = 10.0, 10, 3
_FLAT_REPORTS = 60
_STUCK_S, _STUCK_TIMES = 30.0, 20.0
# Less than this a step is noise, not trouble.
_SLOW_TIMES, _SLOW_LOOKS, _SLOW_S = 2.0, 10, 0.005


@dataclass(frozen=True)
class Look:
    """What a worker said at one moment; `reports` is how often it has told its loss so far, and `waited_s`
    what it has waited for others. `waiting`: for others, for servers, or for what its script does between
    two passes.
    """

    time: float
    step: int
    loss: float | None = None
    reports: int = 0
    waited_s: float = 0.0
    waiting: bool = False
    nan_step: int | None = None

    @staticmethod
    def at(said: Progress) -> Look:
        """As it stands in the worker's report."""
        waits = said.state in ("waiting", BETWEEN_PASSES)
        waits = waits or bool(said.waiting_for or said.waiting_for_servers)
        return Look(said.time, said.step, said.loss, said.reports, said.waited_s, waits, said.nan_step)


class Past:
    """What one worker has said of late: all looks at it; and apart, since a script may report once a pass,
    those that found a new report of its loss.
    """

    def __init__(self, looks: Iterable[Look] = ()) -> None:
        self.looks: deque[Look] = deque(maxlen=_LOOKS_MAX)
        self.reported: deque[tuple[int, float]] = deque(maxlen=_LOOKS_MAX)  # step and loss
        for look in looks:
            self.add(look)

    def add(self, look: Look) -> None:
        """The next one, in order of time."""
        known = self.looks[-1].reports if self.looks else 0
        if look.loss is not None and look.reports > known:
            self.reported.append((look.step, look.loss))
        self.looks.append(look)


@dataclass(frozen=True)
class Trouble:
    """What is wrong with which worker."""

    rank: int
    kind: str
    text: str


def parse_policies(text: str) -> dict[str, str]:
    """What to do about which trouble, of a text as `slow=replace,stuck=replace`.

    By default it is reported; what is not finite raises.

    >>> parse_policies("slow=replace")["slow"], parse_policies("")["flat"], parse_policies("")["nan"]
    ('replace', 'report', 'raise')
    """
    policies = dict.fromkeys(KINDS, "report") | {"nan": "raise"}
    for part in text.split(",") if text else ():
        kind, _, policy = part.strip().partition("=")
        if kind not in KINDS or policy not in POLICIES or (kind, policy) == ("nan", "scale"):
            raise BadInput(
                f"on-trouble is {part!r}; it is written kind=policy, with a kind of {', '.join(KINDS)} and a "
                f"policy of {', '.join(POLICIES)} (nan cannot be scaled)"
            )
        policies[kind] = policy
    return policies


class HealthWatch:
    """Keeps what workers of a job have said, and tells of each trouble once."""

    def __init__(self, policies: Mapping[str, str]) -> None:
        self._policies = policies
        self._pasts: dict[int, Past] = {}
        self._told: set[tuple[int, str]] = set()

    def forget(self, rank: int) -> None:
        """Another process takes its place."""
        self._pasts.pop(rank, None)
        self._told -= {(rank, kind) for kind in KINDS}

    def look(self, board: Board, now: float) -> list[tuple[Trouble, str]]:
        """What is new, each with its policy."""
        for view in board.views:
            said = view.progress
            if said is None or not view.joined or view.ended or said.state not in _ON_ITS_WAY:
                self._pasts.pop(view.rank, None)
                continue
            past = self._pasts.setdefault(view.rank, Past())
            if not past.looks or said.time > past.looks[-1].time:
                past.add(Look.at(said))
        found = [t for t in find_trouble(self._pasts, now) if (t.rank, t.kind) not in self._told]
        self._told |= {(trouble.rank, trouble.kind) for trouble in found}
        return [(trouble, self._policies[trouble.kind]) for trouble in found]


def find_trouble(pasts: Mapping[int, Past], now: float) -> list[Trouble]:
    """All that is wrong, by the past of each rank."""
    step_s = {rank: _step_s(past.looks) for rank, past in pasts.items()}
    found: list[Trouble] = []
    for rank, past in pasts.items():
        seen = past.looks
        peers = [s for other, s in step_s.items() if other != rank and s is not None]
        found += _loss(rank, past.reported)
        found += _stuck(rank, seen, now)
        found += _slow(rank, step_s[rank], peers)
        if seen and seen[-1].nan_step is not None:
            found.append(Trouble(rank, "nan", f"in step {seen[-1].nan_step}, which counts nothing"))
    return found


def _loss(rank: int, reported: Sequence[tuple[int, float]]) -> list[Trouble]:
    losses = [loss for _, loss in reported]
    before, last = losses[:-_EXPLODING_REPORTS], losses[-_EXPLODING_REPORTS:]
    if len(before) < _EXPLODING_AFTER:
        return []
    usual = median(before)
    limit = usual + max(_DEVIATIONS * mad(before), (_EXPLODING_TIMES - 1) * abs(usual))
    if min(last) > limit > 0:
        return [Trouble(rank, "exploding", f"its loss is {last[-1]:.4g} after {usual:.4g}")]
    lately = list(reported)[-_FLAT_REPORTS:]
    moves = lately[-1][0] > lately[0][0]
    if len(lately) == _FLAT_REPORTS and moves and len({loss for _, loss in lately}) == 1:
        return [Trouble(rank, "flat", f"its loss stands still at {last[-1]:.4g}")]
    return []


def _stuck(rank: int, seen: Sequence[Look], now: float) -> list[Trouble]:
    # A worker that has not stepped yet may be loading its data.
    changes = [b.time for a, b in pairwise(seen) if b.step > a.step]
    if not changes or seen[-1].waiting:
        return []
    gaps = [b - a for a, b in pairwise(changes)]
    waited = (b.time for a, b in pairwise(seen) if a.waiting and not b.waiting)
    still_s = now - max([changes[-1], *waited])
    if still_s <= max(_STUCK_S, _STUCK_TIMES * median(gaps or [0.0])):
        return []
    return [Trouble(rank, "stuck", f"it has made no step for {still_s:.0f} s, and waits for nobody")]


def _step_s(seen: Sequence[Look]) -> float | None:
    """Seconds of its own that a step usually takes, a pause left out (an evaluation); None while unknown."""
    moved = [b for a, b in pairwise(seen) if b.step > a.step]
    if len(moved) <= _SLOW_LOOKS:
        return None
    return median(
        max(0.0, b.time - a.time - (b.waited_s - a.waited_s)) / (b.step - a.step) for a, b in pairwise(moved)
    )


def _slow(rank: int, step_s: float | None, peers: list[float]) -> list[Trouble]:
    if step_s is None or not peers:
        return []
    usual = median(peers)
    if step_s <= usual + max(_DEVIATIONS * mad(peers), (_SLOW_TIMES - 1) * usual, _SLOW_S):
        return []
    return [Trouble(rank, "slow", f"a step takes it {step_s:.3g} s, and others {usual:.3g} s")]
