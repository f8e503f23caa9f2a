"""A policy: four pieces, what the rows of tables do, and where the dense parameters live.

Parts that have no meaning together are refused when the policy is made. The job has one clock, at the sync
shard; `core_spec` says what it is told. A policy knows nothing of torch, of sockets or of how many workers
there are: what depends on their number takes it as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from shoal.errors import BadInput
from shoal.sync.payload import Difference, Gradient, GradientSum, Parameters, Payload
from shoal.sync.proceed import UNBOUNDED, Always, Bounded, Proceed, Round, WithNeighbours
from shoal.sync.scale import Compensate, Elastic, Mean, One, Scale, Share, Staleness
from shoal.sync.take import All, Each, Every, First, Neighbours, Take

State: TypeAlias = Literal["keep", "average", "reset"]
Home: TypeAlias = Literal["server", "worker", "peers", "shared"]

_STATES = ("keep", "average", "reset")
_HOMES = ("server", "worker", "peers", "shared")
# What is carried out as it is written: home and payload, proceed, take, scale.
_Kinds: TypeAlias = tuple[type, ...]
_Row: TypeAlias = tuple[str, _Kinds, _Kinds, _Kinds, _Kinds]
_FREE, _PLAIN = (Always, Bounded), (Share, One, Staleness)
_TOGETHER: tuple[_Row, ...] = (
    ("server", (Gradient,), (Round,), (All, First), (Mean,)),
    ("server", (Gradient,), _FREE, (Each, Every), _PLAIN),
    ("server", (Gradient,), _FREE, (Each,), (Compensate,)),
    ("server", (GradientSum,), _FREE, (Each,), _PLAIN),
    ("worker", (Parameters, Difference), (Round,), (All, First), (Mean,)),
    ("worker", (Difference,), _FREE, (Each,), (Elastic,)),
    ("peers", (Gradient,), (Round,), (All,), (Mean,)),
    ("peers", (Parameters,), (WithNeighbours,), (Neighbours,), (Mean,)),
    ("shared", (Parameters,), (Always,), (Each,), (One,)),
)


@dataclass(frozen=True)
class Policy:
    """How workers synchronise. Two policies of the same parts are equal, whatever they are called.

    `rows`: what the rows of tables do; None: the same. `state`: what becomes of the workers' optimizer state
    when models are exchanged. `dense_home`: where dense parameters live and are stepped: `server`; `worker`,
    with an outer step at the servers; `peers`, on workers that exchange them; `shared`, in memory that the
    workers of one host share.

    >>> from shoal.sync import Always, Each, Gradient, Staleness
    >>> mine = Policy(Bounded(8), Each(), Staleness(), Gradient())
    >>> mine.core_spec(4)
    {'take': 'each', 'quorum': 4, 'count': 1, 'slack': 8}
    """

    proceed: Proceed
    take: Take
    scale: Scale
    payload: Payload
    rows: Policy | None = None
    state: State = "keep"
    dense_home: Home = "server"
    # The word that it was read from. A changed copy (`dataclasses.replace`) has none.
    word: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, kind in (("proceed", Proceed), ("take", Take), ("scale", Scale), ("payload", Payload)):
            part = getattr(self, name)
            if not isinstance(part, kind) or type(part) is kind:
                raise BadInput(
                    f"{name} is {part!r}; it must be a {kind.__name__} of shoal.sync, made: Always()"
                )
        self._check_choice("state", _STATES)
        self._check_choice("dense_home", _HOMES)
        self._check_pieces()
        self._check_rows()

    # What a worker asks.

    @property
    def rows_policy(self) -> Policy:
        """What the rows of tables do."""
        return self if self.rows is None else self.rows

    @property
    def clock(self) -> Policy:
        """Whose clock the job has: its own, or the rows' where the dense parameters need none."""
        return self if self._needs_clock() else self.rows_policy

    @property
    def staged(self) -> bool:
        """Whether a step's gradients wait at the servers for others before they make an update."""
        return self.dense_home == "server" and self.take.core(2)[0] != "each"

    @property
    def by_staleness(self) -> bool:
        """Whether servers divide the learning rate by the staleness of a push."""
        return self.scale.by_staleness

    @property
    def compensation(self) -> float:
        """The strength of DC-ASGD's term; 0 where there is none."""
        return self.scale.strength if isinstance(self.scale, Compensate) else 0.0

    def contribution_scale(self, samples: float, global_samples: float) -> float:
        """What a worker multiplies its gradient by before it is pushed."""
        factor = self.scale.factor(samples, global_samples)
        if not isinstance(self.take, Every):
            return factor
        # Of several that make an update none is more than its part of their mean; a share may be less.
        count = self.take.count
        return min(factor, 1 / count) if isinstance(self.scale, Share) else factor / count

    def commit_weight(self, samples: float) -> float:
        """What the sync shard is told of a contribution: its samples, of which a round makes the mean; where
        others' do not matter, only whether there is any.
        """
        return samples if self.clock.meets else float(samples > 0)

    @property
    def meets(self) -> bool:
        """Whether an update is the mean of one step's contributions."""
        return isinstance(self.take, All | First)

    def alpha(self, n: int) -> float:
        """The elastic force for `n` workers; 0 where there is none."""
        return self.scale.value(n) if isinstance(self.scale, Elastic) else 0.0

    def order(self, n: int) -> Literal["static", "leased"]:
        """How data is handed out: `static` where every worker takes part in every step, else by lease."""
        whole = isinstance(self.take, All | First) and self.take.core(n)[1] == n
        every_step = whole and isinstance(self.payload, Gradient)
        return "static" if every_step or self.dense_home == "peers" else "leased"

    def core_spec(self, n: int) -> dict[str, Any]:
        """The job's clock for `n` workers, as `_core.Client.sync_open` takes it.

        Its steps are blocks where models are exchanged by rounds. Where the dense parameters need no clock at
        the servers it is the rows' clock.

        >>> from shoal.sync import parse
        >>> parse("quorum:0.75").core_spec(4)
        {'take': 'round', 'quorum': 3, 'count': 1, 'slack': -1}
        """
        if not isinstance(n, int) or n < 1:
            raise BadInput(f"core_spec: the number of workers is {n!r}; it must be at least 1")
        take, quorum, count = self.clock.take.core(n)
        return {"take": take, "quorum": quorum, "count": count, "slack": self.clock.proceed.slack}

    def with_whole_batches(self) -> Policy:
        """The same, by the same name, for workers that each draw whole batches: a share is then all of it."""
        scale, rows = self.scale, self.rows
        if isinstance(scale, Share):
            scale = One()
        elif isinstance(scale, Compensate):
            scale = replace(scale, over=One())
        return replace(self, scale=scale, rows=rows and rows.with_whole_batches()).called(self.word)

    def __str__(self) -> str:
        """The word that it was read from, else its parts."""
        return self.word or repr(self)

    def called(self, word: str) -> Policy:
        """The same under a name."""
        copy = replace(self)
        object.__setattr__(copy, "word", word)
        return copy

    # What parts go together.

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise BadInput(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")

    def _check_pieces(self) -> None:
        pieces = (self.payload, self.proceed, self.take, self.scale)
        if not any(
            home == self.dense_home and all(map(isinstance, pieces, kinds)) for home, *kinds in _TOGETHER
        ):
            near = [row for row in _TOGETHER if row[0] == self.dense_home or isinstance(self.payload, row[1])]
            raise BadInput(
                f"proceed {self.proceed!r}, take {self.take!r}, scale {self.scale!r} and payload "
                f"{self.payload!r} with dense_home={self.dense_home!r}: nothing carries this out. What goes "
                f"together:{''.join(map(_described, near))}"
            )
        if self.dense_home == "shared" and self.payload != Parameters():
            raise BadInput(f"payload {self.payload!r} with dense_home='shared': memory is shared always")
        if self.state != "keep" and self.dense_home != "worker":
            raise BadInput(
                f"state is {self.state!r}; only where models are exchanged at the servers has it a meaning"
            )
        if self.state == "average" and not isinstance(self.proceed, Round):
            raise BadInput(
                "state is 'average'; without rounds there is nothing to average: take keep or reset"
            )

    def _check_rows(self) -> None:
        rows = self.rows
        if rows is None:
            if self.dense_home != "server" or isinstance(self.scale, Compensate):
                raise BadInput(
                    f"rows is None, which means as the dense parameters (dense_home={self.dense_home!r}, "
                    f"scale {self.scale!r}); rows are always at the servers: say how, as rows=parse('asp')"
                )
            return
        if not isinstance(rows, Policy) or not rows._fits_rows():
            raise BadInput(
                f"rows is {rows}; rows of tables live at the servers and send gradients every step: "
                f"bsp, quorum, ssp, asp or softsync"
            )
        if (
            self._needs_clock()
            and rows._needs_clock()
            and (self.dense_home == "worker" or (self.take, self.proceed) != (rows.take, rows.proceed))
        ):
            raise BadInput(
                f"rows is {rows}: it waits by steps, and the dense parameters wait in another way; the job "
                f"has one clock. Take rows=asp, or a word whose dense parameters need none at the servers, "
                f"as allreduce"
            )

    def _fits_rows(self) -> bool:
        plain = isinstance(self.payload, Gradient) and not isinstance(self.scale, Compensate)
        return plain and self.dense_home == "server" and self.rows is None

    def _needs_clock(self) -> bool:
        """Whether the dense parameters make anybody wait at the servers, or for others' gradients."""
        if self.dense_home in ("peers", "shared"):
            return False
        return self.take.core(2)[0] != "each" or self.proceed.slack != UNBOUNDED


def _described(row: _Row) -> str:
    home, *kinds = row
    payload, proceed, take, scale = (" or ".join(kind.__name__ for kind in piece) for piece in kinds)
    return f"\n  dense_home={home!r}, payload {payload}: proceed {proceed}, take {take}, scale {scale}"
