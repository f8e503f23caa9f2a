"""A simulated disk, as unkind as POSIX allows.

What is written is there after a crash only if the file was synced, and under its name only if its directory
was: of what was not, any prefix of the bytes and any of the changes of names may have come through. A disk
that is full takes a part of the bytes and fails. A crash may strike at each operation, before or after it
took effect; from then on nothing works until `restart`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shoal.checkpoint import place

SCHEME = "simdisk"
DIRECTORY_BYTES = 64


class Crash(BaseException):
    """The machine is gone. No `except Exception` sees it, as none would see the real thing."""


class _File:
    def __init__(self) -> None:
        self.data = b""
        self.durable = b""


class _Directory:
    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.durable: dict[str, Any] = {}
        self.pending: list[dict[str, Any]] = []  # changes since the last sync: names -> what, or None: gone

    def change(self, change: dict[str, Any]) -> None:
        self.pending.append(change)
        _apply(self.entries, change)


def _apply(entries: dict[str, Any], change: dict[str, Any]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """All files of one machine, below "/"."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"disk {seed}")
        self._root = _Directory()
        self._open: dict[int, _File | _Directory] = {}
        self._dead = False
        self.operations = 0
        self.room: int | None = None  # bytes that are left; None: enough
        self.crash_at = 0  # the number of an operation
        self.fail_at = 0  # of an operation that fails with an error of the device
        self.meanwhile: Callable[[], None] = lambda: None  # what others do while a file is written
        self.removed: set[str] = set()
        self.put_in_place: dict[str, bytes] = {}  # by path: what was renamed to it last

    def restart(self) -> None:
        """After a crash, or as if there was one."""
        self._survive(self._root)
        self._dead, self._open, self.crash_at, self.fail_at = False, {}, 0, 0

    def _survive(self, directory: _Directory) -> None:
        rng, kept = self._rng, directory.pending
        if kept and rng.random() < 0.5:  # a journal of the file system's keeps the order; not all have one
            kept = kept[: rng.randint(0, len(kept))]
        else:
            kept = [change for change in kept if rng.random() < 0.5]
        entries = dict(directory.durable)
        for change in kept:
            _apply(entries, change)
        directory.entries, directory.durable, directory.pending = entries, dict(entries), []
        for node in entries.values():
            if isinstance(node, _Directory):
                self._survive(node)
            elif node.data != node.durable:
                torn = node.data[: rng.randint(0, len(node.data))]
                node.data = node.durable = torn + bytes(rng.choice((0, len(node.data) - len(torn))))

    # Operations, each with its faults.

    def write(self, file: _File, data: bytes) -> None:
        with self._operation():
            fits = len(data) if self.room is None else min(len(data), self.room)
            if self.operations == self.crash_at:
                fits = self._rng.randint(0, fits)
            file.data += data[:fits]
            self._use(fits)
            if fits < len(data) and self.operations != self.crash_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self, node: _File | _Directory) -> None:
        with self._operation():
            if isinstance(node, _File):
                node.durable = node.data
            else:
                node.durable, node.pending = dict(node.entries), []

    def create(self, path: str) -> _File:
        with self._operation():
            directory, name = self._parent(path)
            file = _File()
            directory.change({name: file})
            return file

    def make_directory(self, path: str) -> None:
        with self._operation():
            directory, name = self._parent(path)
            if name in directory.entries:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._use(DIRECTORY_BYTES)
            directory.change({name: _Directory()})

    def rename(self, old: str, new: str) -> None:
        with self._operation():
            directory, name = self._parent(old)
            _, to = self._parent(new)
            file = directory.entries[name]
            directory.change({name: None, to: file})
            self.put_in_place[new] = file.data

    def remove(self, path: str) -> None:
        with self._operation():
            directory, name = self._parent(path)
            if name not in directory.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = directory.entries[name]
            self.removed.add(path)
            self._use(-(DIRECTORY_BYTES if isinstance(node, _Directory) else len(node.data)))
            directory.change({name: None})

    def _use(self, size: int) -> None:
        if self.room is not None:
            if size > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= size

    @contextmanager
    def _operation(self) -> Iterator[None]:
        if self._dead:
            raise Crash
        self.operations += 1
        crashes = self.operations == self.crash_at
        if crashes and self._rng.random() < 0.5:
            self._dead = True
            raise Crash
        if self.operations == self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield
        if crashes:
            self._dead = True
            raise Crash
        self.meanwhile()

    # What is there.

    def find(self, path: str) -> Any:
        node: Any = self._root
        for name in filter(None, path.split("/")):
            node = node.entries.get(name) if isinstance(node, _Directory) else None
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        above, _, name = path.rpartition("/")
        directory = self.find(above)
        if not isinstance(directory, _Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), above)
        return directory, name

    def read(self, path: str) -> bytes:
        if self._dead:
            raise Crash
        file = self.find(path)
        if not isinstance(file, _File):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return file.data

    def files(self) -> list[str]:
        """The paths of all, in order."""

        def below(directory: _Directory, path: str) -> Iterator[str]:
            for name, node in sorted(directory.entries.items()):
                if isinstance(node, _Directory):
                    yield from below(node, f"{path}/{name}")
                else:
                    yield f"{path}/{name}"

        return list(below(self._root, ""))

    def flip(self, path: str, bit: int) -> None:
        """What the device does to data at rest."""
        file = self.find(path)
        data = bytearray(file.data)
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        file.data = file.durable = bytes(data)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Checkpoints at simdisk:// lie here."""
        before = place.Path, place.os  # type: ignore[attr-defined]
        fsspec.register_implementation(SCHEME, DiskFileSystem, clobber=True)
        DiskFileSystem.disk = self
        place.Path = lambda path: _Path(self, path)  # type: ignore[attr-defined, assignment]
        place.os = _Os(self)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            place.Path, place.os = before  # type: ignore[attr-defined]

    def descriptor(self, node: _File | _Directory) -> int:
        self._open[len(self._open)] = node
        return len(self._open) - 1

    def opened(self, descriptor: int) -> _File | _Directory:
        if self._dead:
            raise Crash
        return self._open[descriptor]


class DiskFileSystem(LocalFileSystem):
    """What fsspec would do on a local disk: reading, listing, removing."""

    protocol = SCHEME
    cachable = False
    disk: Disk

    def cat_file(self, path: str, *_: object, **__: object) -> bytes:
        return self.disk.read(path)

    def ls(self, path: str, *_: object, **__: object) -> list[str]:
        directory = self.disk.find(path)
        if directory is None:
            raise FileNotFoundError(path)
        return [f"{path}/{name}" for name in directory.entries]

    def rm(self, path: str, *_: object, **__: object) -> None:
        node = self.disk.find(path)
        if isinstance(node, _Directory):
            for name in list(node.entries):
                self.rm(f"{path}/{name}")
        self.disk.remove(path)


class _Os:
    """What a place needs of `os`."""

    O_RDONLY = os.O_RDONLY

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def open(self, path: _Path, _flags: int) -> int:
        return self._disk.descriptor(self._disk.find(path.text))

    def fsync(self, descriptor: int) -> None:
        self._disk.sync(self._disk.opened(descriptor))

    def close(self, descriptor: int) -> None:
        """Of a file that was written the end is `_Writing`'s."""


class _Writing:
    def __init__(self, disk: Disk, file: _File) -> None:
        self._disk, self._file = disk, file

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, data: bytes) -> None:
        self._disk.write(self._file, data)

    def flush(self) -> None:
        """`write` keeps nothing back."""

    def fileno(self) -> int:
        return self._disk.descriptor(self._file)


class _Path:
    """What a place needs of `pathlib.Path`."""

    def __init__(self, disk: Disk, text: str) -> None:
        self._disk, self.text = disk, text
        self.name = text.rpartition("/")[2]

    @property
    def parent(self) -> _Path:
        return _Path(self._disk, self.text.rpartition("/")[0])

    def with_name(self, name: str) -> _Path:
        return _Path(self._disk, f"{self.parent.text}/{name}")

    def is_dir(self) -> bool:
        return isinstance(self._disk.find(self.text), _Directory)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        if parents and self.text and not self.parent.is_dir():
            self.parent.mkdir(parents=True, exist_ok=True)
        if not (exist_ok and self.is_dir()):
            self._disk.make_directory(self.text)

    def rmdir(self) -> None:
        self._disk.remove(self.text)

    def open(self, _mode: str) -> _Writing:
        return _Writing(self._disk, self._disk.create(self.text))

    def replace(self, target: _Path) -> None:
        self._disk.rename(self.text, target.text)

    def unlink(self, missing_ok: bool = False) -> None:
        if not (missing_ok and self._disk.find(self.text) is None):
            self._disk.remove(self.text)
