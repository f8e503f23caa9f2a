"""Whether what was accepted as one cut is one, and whether it can be gone on from.

1. Every part is the image that its server began by the attempt that was accepted.
2. Of a life that answered that attempt the cut has the pushes up to the last one that it had begun by then,
   whole and on every shard, and no other.
3. Of any other life, which was gone or came later, it has what was acknowledged before the first image began.
   A push of it that is acknowledged, then or ever, is on all shards or on none, and so are all before it.
4. Loaded as the next run loads it, and with all pushes of a life sent again, each shows exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal import _core
from shoal.checkpoint import manifest, shards
from shoal.checkpoint.place import Place
from shoal.store import messages as m

from .disk import SCHEME
from .ledger import KEY_ARRAY, Push, Rows, Violation
from .nodes import REFUSE, TOKEN
from .plan import KEYS, TABLES

if TYPE_CHECKING:
    from .cut_nodes import Holds
    from .cuts import CutWorld

URL = f"{SCHEME}:///ckpt"
Life = tuple[int, int]  # client, incarnation


class Image(NamedTuple):
    """What one server reported of one attempt."""

    began: float
    part: m.PartInfo | None = None


class Cut(NamedTuple):
    """One that was accepted."""

    name: str
    number: int  # of the attempt
    accepted: float


class CutJudge:
    """What was said of cuts in one run."""

    def __init__(self, world: CutWorld) -> None:
        self._world = world
        self._place = Place(URL)
        self._answers: dict[int, dict[Life, int]] = defaultdict(dict)  # by attempt: the last seq of each life
        self._images: dict[int, dict[int, Image]] = defaultdict(dict)  # by attempt and server
        self._identities: dict[Life, int] = {}
        self.cuts: list[Cut] = []

    @property
    def attempts(self) -> int:
        return len(self._answers)

    def held(self, client: Holds, number: int) -> None:
        """A client answers."""
        life = (client.who, client.incarnation)
        self._answers[number][life] = client.last_seq
        self._identities[life] = client.identity

    def reported(self, server: int, report: m.PartReport) -> None:
        images = self._images[report.number]
        if report.did == "begun":
            images[server] = Image(self._world.clock.now)
        elif report.did == "saved":
            images[server] = images[server]._replace(part=report.part)

    def accepted(self, request: m.SaveStore, number: int, saved: m.StoreSaved) -> None:
        """Whoever asked is told that all is saved; it writes the manifest."""
        images = self._images[number].values()
        stray = set(saved.parts) - {image.part for image in images}
        if stray or len(saved.parts) != len({part.name for part in saved.parts}):
            raise Violation(f"{request.name}: {stray or saved.parts} are not of attempt {number}")
        whole = manifest.Manifest(
            name=request.name, time=0.0, shards=saved.shards, tables=(), parts=saved.parts, clocks=()
        )
        manifest.write(self._place, whole)
        self.cuts.append(Cut(request.name, number, self._world.clock.now))

    def judge(self) -> None:
        """The end: all cuts that were accepted."""
        for cut in self.cuts:
            server = self._loaded(cut)
            shown = _rows(server, self._world)
            lives: dict[Life, list[Push]] = defaultdict(list)
            for push in self._world.ledger.pushes:
                lives[push.who, push.incarnation].append(push)
            answers = self._answers[cut.number]
            for life, pushes in lives.items():
                where = f"{cut.name}, client {life[0]}, incarnation {life[1]}"
                if life in answers:
                    self._judge_held(where, pushes, answers[life], shown)
                else:
                    self._judge_other(where, cut, pushes, shown)
            for life in answers.keys() & lives.keys():
                self._send_again(cut, self._identities[life], lives[life], server)

    def _loaded(self, cut: Cut) -> _core.protocol.Server:
        server = _core.protocol.Server(self._world.plan.shards, TOKEN)
        memory = server.store()
        for spec in self._world.specs:
            memory.declare(spec)
        everything = range(self._world.plan.shards)
        shards.load(
            memory, self._place, cut.name, everything, {table: table for table in TABLES}, resume=True
        )
        return server

    def _judge_held(self, where: str, pushes: list[Push], last: int, shown: list[Rows]) -> None:
        for push in pushes:
            rows = shown[push.table][:, push.column]
            expected = push.weights if push.seq <= last else np.zeros_like(push.weights)
            if not np.array_equal(rows, expected):
                raise Violation(f"{where}: it held after push {last}; of push {push.seq} the cut has {rows}")

    def _judge_other(self, where: str, cut: Cut, pushes: list[Push], shown: list[Rows]) -> None:
        began = min(image.began for image in self._images[cut.number].values())
        missing = 0
        for push in pushes:
            rows = shown[push.table][:, push.column]
            acked = self._world.cut_ledger.acked_at.get(id(push))
            if acked is None:
                continue  # and never will be: its life is over
            if rows.any() and not np.array_equal(rows, push.weights):
                raise Violation(f"{where}: the cut has a part of push {push.seq}, {rows}")
            if not rows.any():
                missing = push.seq
                if acked < began:
                    raise Violation(f"{where}: push {push.seq} is missing, which was acknowledged before")
            elif missing:
                raise Violation(f"{where}: the cut has push {push.seq}, and not {missing}")

    def _send_again(self, cut: Cut, identity: int, pushes: list[Push], server: _core.protocol.Server) -> None:
        """All pushes of a life, by the seqs that they had."""
        machine = _core.protocol.Client(identity, pushes[0].incarnation, 1, [0] * self._world.plan.shards)
        session = _core.protocol.Session(server)
        [challenge], _ = session.feed(machine.hello())
        [welcome], _ = session.feed(machine.proof(TOKEN, challenge))
        if _core.protocol.head(welcome)[0] == REFUSE:
            return  # the cut knows of a newer life
        for spec in self._world.specs:
            machine.declare(spec)
        for push in pushes:
            keys = KEY_ARRAY[push.weights > 0]
            grads = np.zeros((len(keys), self._world.specs[push.table].dim), np.float32)
            grads[:, push.column] = -push.weights[push.weights > 0]
            machine.push(TABLES[push.table], keys, grads)
        for frame in machine.outgoing(0):
            session.feed(frame)
        shown = _rows(server, self._world)
        for push in pushes:
            rows = shown[push.table][:, push.column]
            if not np.array_equal(rows, push.weights):
                raise Violation(
                    f"{cut.name}, client {push.who}: push {push.seq} was sent again, and shows as {rows}"
                )


def _rows(server: _core.protocol.Server, world: CutWorld) -> list[Rows]:
    """All rows of all tables, by the numbers of their keys."""
    numbers = {key: number for number, key in enumerate(KEYS)}
    tables = [np.zeros((len(KEYS), spec.dim), np.float32) for spec in world.specs]
    for shard in range(world.plan.shards):
        for table, key, _meta, row in server.image(shard)[1]:
            into = tables[TABLES.index(table)]
            into[numbers[key]] = np.frombuffer(row, np.float32)[: into.shape[1]]
    return tables
