"""What a checkpoint consists of: one manifest, a part for each server that wrote, files with rows.

    URL/000001-5f0c21aa/manifest.json           written last: without it there is no checkpoint
    URL/000001-5f0c21aa/part-0.json             the files of one server
    URL/000001-5f0c21aa/part-0-0.safetensors    rows, up to about 64 MB
    URL/000001-5f0c21aa/worker-0.safetensors    what lay on a worker alone (`shoal.checkpoint.states`)

The manifest has the checksums of the parts, a part those of its files, and the first line of the manifest
that of the rest.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import TypeVar

import msgspec

from shoal.checkpoint.place import Place
from shoal.errors import BadInput, Refused, Unavailable
from shoal.store.catalogue import TableEntry, decode_setting
from shoal.store.messages import PartInfo

FORMAT = 2
MANIFEST = "manifest.json"
_SHOWN_MAX = 8
StructT = TypeVar("StructT", bound=msgspec.Struct)


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """A safetensors file, and of which shards it has something."""

    name: str
    bytes: int
    sha256: str
    shards: tuple[int, ...]
    rows: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one server wrote. `life` changes when rows were loaded: versions compare within one life."""

    files: tuple[DataFile, ...]
    versions: dict[int, int]  # by shard
    life: str


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker added; without bytes nothing, and `why`. `since`: it is what that earlier checkpoint has,
    which the job went on from, and the worker has made no step since.
    """

    rank: int
    clock: int
    bytes: int = 0
    sha256: str = ""
    why: str = ""
    since: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. With a `base`: the rows that have changed since that one."""

    format: int = FORMAT
    name: str
    time: float
    shards: int
    tables: tuple[TableEntry, ...]
    parts: tuple[PartInfo, ...]
    clocks: tuple[int, ...] = ()  # of the workers, by rank
    base: str | None = None
    workers: tuple[WorkerState, ...] = ()  # of those that have made steps, where they were asked

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def digest(data: bytes) -> str:
    """The checksum by which files are known."""
    return hashlib.sha256(data).hexdigest()


def new_name(place: Place) -> str:
    """A name after all that are there; two that save at once get different ones."""
    numbers = [int(name[:6]) for name in names(place)]
    return f"{1 + max(numbers, default=0):06d}-{secrets.token_hex(4)}"


def names(place: Place) -> list[str]:
    """The names of all checkpoints there, whole or not, the oldest first."""
    return [name for name in place.names() if is_name(name)]


def is_name(text: str) -> bool:
    """Whether checkpoints are called so."""
    return text[:6].isdigit() and text[6:7] == "-"


def write(place: Place, manifest: Manifest) -> None:
    """The last act of saving."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    place.write(f"{manifest.name}/{MANIFEST}", digest(body).encode() + b"\n" + body)


def find(place: Place, name: str) -> Manifest:
    """The manifest of that checkpoint; Refused, with the reason, if it is not whole."""
    where = f"checkpoint {place.url}/{name}"
    if MANIFEST not in place.names(name):
        if name not in (there := names(place)):
            shown = ", ".join(["..."] * (len(there) > _SHOWN_MAX) + there[-_SHOWN_MAX:])
            raise Refused(f"there is no {where}; there is {shown or 'none at all'}")
        raise Refused(f"{where} is not complete: it has no {MANIFEST}, so its saving was broken off")
    sha, _, body = place.read(f"{name}/{MANIFEST}").partition(b"\n")
    if sha.decode(errors="replace") != digest(body):
        raise Refused(f"{where} is damaged: {MANIFEST} does not fit its checksum")
    manifest = _decode(body, Manifest, f"{where}: {MANIFEST}")
    if manifest.format != FORMAT:
        raise Refused(f"{where} has format {manifest.format}; this release reads {FORMAT}")
    return manifest


def newest(place: Place, before: str | None = None) -> str:
    """The name of the newest that was saved to its end, be it damaged since; of those `before` a name."""
    there = [name for name in names(place) if before is None or name < before]
    for name in reversed(there):
        if MANIFEST in place.names(name):
            return name
    if there:
        find(place, there[-1])  # says why it is none
    raise BadInput(f"there is no checkpoint at {place.url}")


def latest(place: Place) -> Manifest:
    """The manifest of the newest; Refused if it is damaged: an older one would be taken for the newest."""
    return find(place, newest(place))


def read_part(place: Place, manifest: Manifest, info: PartInfo) -> Part:
    """The list of files of one server; Refused if it is not what the manifest says."""
    data = read_checked(place, f"{manifest.name}/{info.name}", info.sha256)
    return _decode(data, Part, f"checkpoint {place.url}/{manifest.name}: {info.name}")


def read_checked(place: Place, name: str, sha256: str) -> bytes:
    """The bytes of a file that must have this checksum; Refused if it has another, or the file is gone.

    Unavailable: it is there and cannot be read now. That is no damage, and no reason to do without it.
    """
    try:
        data = place.read(name)
    except Unavailable as error:
        directory, _, file = name.rpartition("/")
        if file in place.names(directory):
            raise
        raise Refused(f"checkpoint file {place.url}/{name} is damaged or gone: {error}") from None
    if digest(data) != sha256:
        raise Refused(
            f"checkpoint file {place.url}/{name} is damaged: {len(data)} bytes that do not fit their checksum"
        )
    return data


def describe_time(manifest: Manifest) -> str:
    """When it was made, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _decode(body: bytes, kind: type[StructT], where: str) -> StructT:
    try:
        return msgspec.json.decode(body, type=kind, dec_hook=decode_setting)
    except (msgspec.MsgspecError, BadInput) as error:
        raise Refused(f"{where} cannot be read: {error}") from None
