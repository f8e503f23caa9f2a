"""Shards of a store in this process to the files of one part, and back. Servers and embedded stores both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from shoal import _core
from shoal.checkpoint.manifest import DataFile, Manifest, Part, digest, find, read_checked, read_part
from shoal.checkpoint.place import Place
from shoal.errors import Refused, Unavailable, from_core
from shoal.store.messages import PartInfo

FILE_BYTES = 64 << 20
# A page is copied under its shard's lock: small enough that no push waits for long.
PAGE_BYTES = 1 << 20
_META = np.dtype([("version", "<u8"), ("frequency", "<u4"), ("last_step", "<u4")])
_VERSION, _COMMIT = slice(8, 16), slice(16, 24)  # within a shard's head
_COMMIT_MAX = (1 << 63) - 1
_SYNC = "sync"


def _nobody_stops() -> None:
    pass


class Saving:
    """An image of these shards, begun when it is made; `write` brings it to files.

    `life` is a random word for the store, another one after each load: see `Part`.
    """

    def __init__(self, store: _core.Store, shards: Sequence[int], life: str) -> None:
        self._store = store
        images = {shard: store.begin_image(shard) for shard in shards}
        self._images = {shard: image for shard, (image, _) in images.items()}
        self._heads = {shard: head for shard, (_, head) in images.items()}
        self._sync, self.clocks = store.sync_image() if 0 in self._heads else (b"", [])
        self._life = life

    def write(
        self,
        place: Place,
        name: str,
        index: int,
        base: Manifest | None = None,
        check_stop: Callable[[], None] = _nobody_stops,
    ) -> PartInfo | None:
        """Write part `index` of checkpoint `name`; only what changed since `base`, where there is one.

        None: that base is of another life, so that nothing was written. `check_stop` may raise.
        """
        try:
            since = self._since(place, base)
            if since is None:
                return None
            files = list(self._files(place, f"{name}/part-{index}", since, check_stop))
        finally:
            self.end()
        part = Part(files=tuple(files), versions=self._versions(), life=self._life)
        data = msgspec.json.encode(part)
        place.write(f"{name}/part-{index}.json", data)
        return PartInfo(
            name=f"part-{index}.json",
            sha256=digest(data),
            rows=sum(file.rows for file in files),
            bytes=sum(file.bytes for file in files),
        )

    def end(self) -> None:
        """Let go of the image."""
        for shard, image in self._images.items():
            self._store.end_image(shard, image)

    def _versions(self) -> dict[int, int]:
        return {s: int.from_bytes(head[_VERSION], "little") for s, head in self._heads.items()}

    def _since(self, place: Place, base: Manifest | None) -> dict[int, int] | None:
        if base is None:
            return {}
        found: dict[int, int] = {}
        for info in base.parts:
            try:
                part = read_part(place, base, info)
            except Unavailable as error:  # or none would be made until it can be read again, if ever
                raise Refused(f"nothing can be based on {base.name}: {error}") from None
            mine = {shard: v for shard, v in part.versions.items() if shard in self._heads}
            if mine and part.life != self._life:
                return None
            found |= mine
        return found

    def _files(
        self, place: Place, stem: str, since: dict[int, int], check_stop: Callable[[], None]
    ) -> Iterator[DataFile]:
        tensors: dict[str, np.ndarray] = {}
        shards: set[int] = set()
        size = rows = number = 0

        def flush() -> DataFile:
            nonlocal tensors, shards, size, rows, number
            data = save_tensors(tensors)
            file = f"{stem}-{number}.safetensors"
            place.write(file, data)
            written = DataFile(
                name=file.rpartition("/")[2],
                bytes=len(data),
                sha256=digest(data),
                shards=tuple(sorted(shards)),
                rows=rows,
            )
            tensors, shards, size, rows, number = {}, set(), 0, 0, number + 1
            return written

        for shard, page in self._pages(since):
            check_stop()
            tensors |= page
            shards.add(shard)
            size += sum(tensor.nbytes for tensor in page.values())
            rows += sum(len(tensor) for tensor_name, tensor in page.items() if tensor_name.endswith("/keys"))
            if size >= FILE_BYTES:
                yield flush()
        if tensors:
            yield flush()

    def _pages(self, since: dict[int, int]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Tensors of one shard at a time: heads, then pages of rows."""
        if self._sync:
            yield 0, {_SYNC: np.frombuffer(self._sync, np.uint8)}
        for shard, head in self._heads.items():
            yield shard, {f"{shard}/head": np.frombuffer(head, np.uint8)}
            number = 0
            while (page := self._store.read_image(shard, self._images[shard], PAGE_BYTES)) is not None:
                table, keys, raw, rows = page
                meta = raw.view(_META)[:, 0]
                if shard in since:
                    changed = meta["version"] > since[shard]
                    keys, meta, rows = keys[changed], meta[changed], rows[changed]
                if len(keys):
                    stem = f"{shard}/{table}/{number}"
                    metas = {
                        f"{stem}/{field}": np.ascontiguousarray(meta[field]) for field in _META.names or ()
                    }
                    yield shard, {f"{stem}/keys": keys, f"{stem}/rows": rows, **metas}
                    number += 1


def _chain(place: Place, name: str) -> list[Manifest]:
    """The checkpoint and what it is based on, the oldest first."""
    manifests = [find(place, name)]
    while (base := manifests[0].base) is not None:
        manifests.insert(0, find(place, base))
    return manifests


def _contents(
    place: Place, manifest: Manifest, shards: Iterable[int] | None
) -> Iterator[dict[str, np.ndarray]]:
    """The tensors of every file that has something of these shards (None: of any), one file at a time."""
    wanted = None if shards is None else set(shards)
    for info in manifest.parts:
        for file in read_part(place, manifest, info).files:
            if wanted is None or not wanted.isdisjoint(file.shards):
                data = read_checked(place, f"{manifest.name}/{file.name}", file.sha256)
                try:
                    yield load_tensors(data)
                except (SafetensorError, ValueError, KeyError, TypeError) as error:
                    raise Refused(
                        f"checkpoint file {place.url}/{manifest.name}/{file.name}: {error}"
                    ) from None


def check(place: Place, name: str, shards: Iterable[int] | None = None) -> None:
    """Read all that would be loaded; Refused names the first file that is not as it was written."""
    for manifest in _chain(place, name):
        for _ in _contents(place, manifest, shards):
            pass


def load(
    store: _core.Store,
    place: Place,
    name: str,
    shards: Sequence[int],
    tables: dict[int, int],
    *,
    resume: bool = False,
    alone: bool = False,
) -> None:
    """Make the rows of these shards those of the checkpoint; `tables` says what its table ids are here.

    With `resume` also what goes with them: dedupe records, finished contributions, clocks, the ledger.
    `alone`: the other shards are not taken back, so what waited for its round is not summed any more.
    """
    chain = _chain(place, name)
    mine = set(shards)
    with _mapped(f"checkpoint {place.url}/{name}"):
        for manifest in chain:
            newest = manifest is chain[-1]
            for tensors in _contents(place, manifest, mine):
                if manifest is chain[0]:
                    _clear(store, tensors, mine)
                _load_rows(store, tensors, mine, tables)
                if newest and resume:
                    _load_heads(store, tensors, mine, None if alone else manifest.clocks)


def pages(place: Place, name: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(table, keys, rows) of all pages, of a base before what changed since."""
    for manifest in _chain(place, name):
        for tensors in _contents(place, manifest, None):
            for stem, _, table in _stems(tensors):
                yield table, tensors[f"{stem}/keys"], tensors[f"{stem}/rows"]


def _stems(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, int, int]]:
    for tensor in tensors:
        if tensor.endswith("/keys"):
            stem = tensor.removesuffix("/keys")
            shard, table, _ = map(int, stem.split("/"))
            yield stem, shard, table


def _clear(store: _core.Store, tensors: dict[str, np.ndarray], shards: set[int]) -> None:
    for shard in shards:
        if f"{shard}/head" in tensors:
            store.clear(shard)


def _load_rows(
    store: _core.Store, tensors: dict[str, np.ndarray], shards: set[int], tables: dict[int, int]
) -> None:
    for stem, shard, table in _stems(tensors):
        if shard in shards:
            keys = tensors[f"{stem}/keys"]
            metas = np.empty(len(keys), _META)
            for field in _META.names or ():
                metas[field] = tensors[f"{stem}/{field}"]
            raw = metas.view(np.uint8).reshape(-1, _META.itemsize)
            store.restore_page(shard, tables[table], keys, raw, tensors[f"{stem}/rows"])


def _load_heads(
    store: _core.Store, tensors: dict[str, np.ndarray], shards: set[int], clocks: Sequence[int] | None
) -> None:
    for shard in shards:
        if f"{shard}/head" in tensors:
            head = tensors[f"{shard}/head"].tobytes()
            store.restore_head(shard, head)
            if clocks is None:
                store.rejoin(shard)
                continue
            store.drop_unfinished(shard, clocks)
            # The same for all shards of a cut, but for those that were reloaded just before.
            committed = int.from_bytes(head[_COMMIT], "little") & _COMMIT_MAX
            for other in set(range(store.shards)) - shards:
                store.skip_commits(other, committed)
    if _SYNC in tensors and 0 in shards:
        store.restore_sync(tensors[_SYNC].tobytes())


@contextmanager
def _mapped(where: str) -> Iterator[None]:
    try:
        yield
    except _core.CoreError as error:
        raise from_core(error, where) from None
    except KeyError as error:
        raise Refused(f"{where} is not whole: it has no {error.args[0]}") from None
