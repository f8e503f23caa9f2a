"""Checkpoints on a disk that does its worst: saved by the shipped `Keeper` while a store is pushed to, loaded
after every crash.

Judged:

1. a load gives the newest checkpoint that is whole, with every byte of the state of its cut: rows with their
   optimizer state, versions, clocks. It says of each newer one why not;
2. once a save has returned, only the keeper's own tidying or a device that changes bits takes it away, and
   the one before stays beside it;
3. a save that cannot be made raises an error of Shoal's, leaves nothing behind, and pushes go on;
4. once there is room again, so is a checkpoint.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import shoal
from shoal import _core
from shoal.checkpoint import client as checkpoints
from shoal.checkpoint import manifest, shards
from shoal.checkpoint.keep import Keeper
from shoal.config import ClientOptions
from shoal.errors import BadInput, Refused, ShoalError
from shoal.store.client import Session
from shoal.store.connect import _LocalDirectory

from .disk import SCHEME, Crash, Disk
from .ledger import Violation
from .plan import Action

URL = f"{SCHEME}:///ckpt/run"
SHARDS = 3
FILE_BYTES, PAGE_BYTES = 1500, 300  # several files, several pages
TIMEOUT_S = 60.0
FLIPPED_MAX = 3  # with more the keeper may take damaged ones for the newest
KINDS = ("push",) * 6 + ("save",) * 7 + ("crash", "flip", "full", "room")
State = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """One run. In `detail` of save: operations until a crash and until an error of the device (0: none),
    and whether there are pushes meanwhile; of push: which; of flip: file and bit; of full: bytes left."""

    seed: int
    actions: tuple[Action, ...]


def make_disk_plan(seed: int) -> DiskPlan:
    rng = random.Random(f"checkpoints {seed}")

    def detail(kind: str) -> tuple[int, ...]:
        if kind == "save":
            fault = rng.choice(("", "", "crash", "device"))
            at = rng.randint(1, 50)
            return at * (fault == "crash"), at * (fault == "device"), rng.randrange(2)
        return rng.randrange(1 << 16), rng.randrange(1 << 16)

    kinds = ["push", "save", *rng.choices(KINDS, k=rng.randint(6, 20))]
    return DiskPlan(
        seed=seed, actions=tuple(Action(float(at), k, 0, detail(k)) for at, k in enumerate(kinds))
    )


@dataclass
class Met:
    """What a run that found nothing went through."""

    saved: int = 0
    failed: int = 0
    crashes: int = 0
    fell_back: int = 0
    deltas: int = 0


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class CheckpointWorld:
    """One run."""

    def __init__(self, plan: DiskPlan) -> None:
        self._plan = plan
        self._rng = random.Random(f"pushes {plan.seed}")
        self._tokens = random.Random(f"tokens {plan.seed}")
        self.disk = Disk(plan.seed)
        self._cuts: dict[str, State] = {}  # by name: what the store was
        self._promised: list[str] = []  # saves that have returned, and were not tidied away
        self._flipped: set[str] = set()
        self.met = Met()

    def run(self) -> Met:
        """Raises Violation."""
        with self.disk.mounted(), self._watched():
            self._start()
            try:
                for action in self._plan.actions:
                    self._act(action)
                self._end()
            finally:
                self._client.close()
        return self.met

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Small files, names from the seed, and what the store is when a save begins."""
        kept = shards.FILE_BYTES, shards.PAGE_BYTES, secrets.token_hex, manifest.new_name
        log, self._warnings = logging.getLogger("shoal.checkpoint"), _Warnings()
        propagate = log.propagate

        def new_name(place: Any) -> str:
            name = kept[3](place)
            self._cuts[name] = _state(self._client)
            return name

        shards.FILE_BYTES, shards.PAGE_BYTES = FILE_BYTES, PAGE_BYTES
        secrets.token_hex = lambda nbytes=None: self._tokens.randbytes(nbytes or 8).hex()
        manifest.new_name = new_name
        log.addHandler(self._warnings)
        log.propagate = False
        try:
            yield
        finally:
            shards.FILE_BYTES, shards.PAGE_BYTES, secrets.token_hex, manifest.new_name = kept
            log.removeHandler(self._warnings)
            log.propagate = propagate

    def _act(self, action: Action) -> None:
        if action.kind == "push":
            self._push(random.Random(action.detail[0]))
        elif action.kind == "save":
            self._save(*action.detail)
        elif action.kind == "crash":
            self._crash()
        elif action.kind == "full":
            self.disk.room = action.detail[0] % 4000
        elif action.kind == "room":
            self.disk.room = None
        elif files := [path for path in self.disk.files() if self.disk.read(path)]:
            path = files[action.detail[0] % len(files)]
            self.disk.flip(path, action.detail[1])
            self._flipped.add(path.split("/")[3])

    def _end(self) -> None:
        """The faults are over."""
        self.disk.room = None
        self._crash()
        self._push(self._rng)
        if not self._save():
            raise Violation("there is room, and no checkpoint can be made")
        self._crash()

    # The store.

    def _start(self) -> None:
        core = _core.Client.embedded(shards=SHARDS, threads=1)
        session = Session(core, "memory://", ClientOptions(), None)
        self._client = shoal.Client(session, _LocalDirectory())
        self._keeper = Keeper(self._client, URL)

    def _push(self, rng: random.Random) -> None:
        keys = rng.sample(range(40), rng.randint(1, 12))
        table = self._client.table("rows", dim=3, optimizer=shoal.optim.Adagrad(lr=0.5))
        table.push(keys, np.full((len(keys), 3), rng.randint(-4, 4), np.float32))
        if rng.random() < 0.3:
            ones = np.ones((3, 2), np.float32)
            self._client.tensor("w", ones, optimizer=shoal.optim.SGD(lr=0.5)).push(ones)

    def _save(self, crash: int = 0, fail: int = 0, pushes: int = 0) -> bool:
        disk, before = self.disk, self._names()
        disk.crash_at, disk.fail_at = (disk.operations + n if n else 0 for n in (crash, fail))
        if pushes:
            disk.meanwhile = lambda: self._push(self._rng) if self._rng.random() < 0.2 else None
        try:
            name = self._keeper.save()
        except ShoalError:
            self.met.failed += 1
            left = self._names() - before
            if left and not fail:  # which may have struck the tidying up
                raise Violation(f"a save that failed leaves {sorted(left)}") from None
            return False
        except Crash:
            self._crash()
            return False
        finally:
            disk.crash_at = disk.fail_at = 0
            disk.meanwhile = lambda: None
        self.met.saved += 1
        self.met.deltas += self._base(name) is not None
        self._forget_removed()
        self._promised.append(name)
        return True

    def _forget_removed(self) -> None:
        """What the keeper has removed, or begun to."""
        removed = {path.removeprefix("/ckpt/run/").partition("/")[0] for path in self.disk.removed}
        kept = [one for one in self._promised if not self._chain(one) & removed]
        if kept[-1:] != self._promised[-1:] and len(self._flipped) < FLIPPED_MAX:
            raise Violation(f"{self._promised[-1]} was removed, and was the newest")
        self._promised = kept

    def _crash(self) -> None:
        self.met.crashes += 1
        self._forget_removed()
        self.disk.restart()
        for name in self._promised:
            if not self._whole(name) and not self._chain(name) & self._flipped:
                raise Violation(f"{name} was saved, and is not whole after a crash")
        self._client.close()
        self._start()
        self._warnings.said.clear()
        expected = max(filter(self._whole, self._names()), default=None)
        try:
            loaded, passed_over = checkpoints.load(self._client, URL, TIMEOUT_S, resume=True)
        except (BadInput, Refused) as error:
            if expected is not None:
                raise Violation(f"{expected} is whole and is not loaded: {error}") from None
            self._promised = []
            return
        if loaded != expected:
            raise Violation(f"{loaded} is loaded; the newest that is whole is {expected}")
        newer = [name for name in self._names() if name > loaded]
        self.met.fell_back += bool(newer)
        for name in newer:
            if name not in passed_over or not any(name in said for said in self._warnings.said):
                raise Violation(f"{name} is not loaded, and nobody says why")
        if difference := _difference(self._cuts[loaded], _state(self._client)):
            raise Violation(f"{loaded} is not what was saved: {difference}")
        self._promised = [name for name in self._promised if name < loaded and self._whole(name)] + [loaded]

    # What must be there.

    def _names(self) -> set[str]:
        root = self.disk.find("/ckpt/run")
        return set() if root is None else set(root.entries)

    def _files(self, name: str) -> dict[str, bytes]:
        start = f"/ckpt/run/{name}/"
        return {path: data for path, data in self.disk.put_in_place.items() if path.startswith(start)}

    def _base(self, name: str) -> str | None:
        _, _, body = self.disk.put_in_place[f"/ckpt/run/{name}/manifest.json"].partition(b"\n")
        base: str | None = json.loads(body)["base"]
        return base

    def _chain(self, name: str) -> set[str]:
        base = self._base(name)
        return {name} if base is None else {name} | self._chain(base)

    def _whole(self, name: str) -> bool:
        """By what was meant to be written, not by what the files say of each other."""
        written = self._files(name)
        if f"/ckpt/run/{name}/manifest.json" not in written:
            return False
        for path, data in written.items():
            file = self.disk.find(path)
            if file is None or file.data != data:
                return False
        base = self._base(name)
        return base is None or self._whole(base)


def _state(client: shoal.Client) -> State:
    """Every byte that a store is, by shard."""
    store = client._session.core.store()
    found: list[Any] = [store.sync_image()]
    for shard in range(SHARDS):
        image, head = store.begin_image(shard)
        rows = []
        while (page := store.read_image(shard, image, 1 << 20)) is not None:
            table, keys, metas, values = page
            for key, meta, row in zip(keys.tolist(), metas, values, strict=True):
                rows.append((table, key, meta.tobytes(), row.tobytes()))
        store.end_image(shard, image)
        found.append((head, sorted(rows)))
    return tuple(found)


def _difference(saved: State, loaded: State) -> str:
    if saved[0] != loaded[0]:
        return "the sync shards differ"
    for shard, (before, after) in enumerate(zip(saved[1:], loaded[1:], strict=True)):
        if before[1] != after[1]:
            wrong = dict.fromkeys(row[:2] for row in {*before[1]} ^ {*after[1]})
            return f"shard {shard}: (table, key) {', '.join(map(str, sorted(wrong)))}"
        if before[0] != after[0]:
            return f"shard {shard}: head {before[0].hex()} is {after[0].hex()}"
    return ""


def run_disk_plan(plan: DiskPlan) -> Met:
    """What was met on the way; raises Violation."""
    return CheckpointWorld(plan).run()
