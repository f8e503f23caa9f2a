"""Where checkpoints lie: a directory at any URL that fsspec can write to.

A file is there whole or not at all: on a local disk it is written under another name, made durable and then
renamed; object stores do the same by themselves. A service that does not answer is waited for so long and no
longer.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from shoal.errors import BadInput, Unavailable

_T = TypeVar("_T")
# For one file, which may have gigabytes; clients of services mostly give up before, with a better reason.
_ANSWER_S = 600.0
_FLAT = frozenset({"s3", "s3a", "gs", "gcs", "memory"})
# `s3//bucket`, `s3:/bucket`: a directory here would be made of it.
_MISTYPED = re.compile(r"(s3a?|gs|gcs|hdfs|file|memory|abfs|az|https?)(//|:(?!//))")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hdfs": "hdfs"}


class Place:
    """The directory at `url`; nothing is read or written before it is asked for."""

    def __init__(self, url: str, answer_s: float = _ANSWER_S) -> None:
        # At the top it would be a quarter of a server's starting time; it is needed later or never.
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        scheme = url.partition("://")[0] if isinstance(url, str) and "://" in url else "file"
        if isinstance(url, str) and (found := _MISTYPED.match(url)):
            raise BadInput(
                f"checkpoint URL is {url!r}: is {found[1]}://... meant? A directory of that name is ./{url}"
            )
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            how = f"; pip install 'shoal[{extra}]'" if extra else ""
            raise BadInput(f"{url}: {error}{how}") from None
        except OSError as error:  # some connect at once
            raise Unavailable(f"checkpoint URL is {url!r}, and nobody answers there: {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise BadInput(f"checkpoint URL is {url!r}: {error}; as in file:///ckpt/run1") from None
        self.url = url
        # Its files are seen by this process alone.
        self.is_private = scheme == "memory"
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._is_flat = scheme in _FLAT
        self._answer_s = answer_s

    def check(self) -> None:
        """Raise unless files can be written, read and removed there."""
        name, data = f".probe-{secrets.token_hex(4)}", b"shoal"
        self.write(name, data)
        if self.read(name) != data:
            raise Unavailable(f"{self.url}: what was written does not read back")
        self.remove(name)

    def write(self, name: str, data: bytes) -> None:
        """Write the file, whole or not at all."""
        with _said(f"cannot write {self.url}/{name}"):
            if self._is_local:
                _write_local(Path(self._path(name)), data)
            else:
                self._ask(lambda: self._write_there(self._path(name), data))

    def read(self, name: str) -> bytes:
        """The file's bytes; Unavailable if there is none, or it cannot be read."""
        with _said(f"cannot read {self.url}/{name}"):
            data: bytes = self._ask(lambda: self._fs.cat_file(self._path(name)))
            return data

    def names(self, directory: str = "") -> list[str]:
        """What lies in there, by name; nothing where it does not exist."""
        with _said(f"cannot list {self.url}"):
            path = self._path(directory)
            self._fs.invalidate_cache(path)
            try:
                found = self._ask(lambda: self._fs.ls(path, detail=False))
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(str(each).rstrip("/").rpartition("/")[2] for each in found)

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with all that is in it."""
        with _said(f"cannot remove {self.url}/{name}"):
            self._ask(lambda: self._fs.rm(self._path(name), recursive=True))

    def _write_there(self, path: str, data: bytes) -> None:
        # Object stores have no directories, and would make a bucket that was misspelt.
        if not self._is_flat:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, data)

    def _ask(self, call: Callable[[], _T]) -> _T:
        return call() if self._is_local or self.is_private else in_time(call, self.url, self._answer_s)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")


def in_time(call: Callable[[], _T], url: str, wait_s: float) -> _T:
    """What `call` returns; Unavailable if that takes longer.

    It runs in a thread that is then left behind, and keeps no process from ending: clients of services try
    again for minutes, some in native code that no signal interrupts.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
            future.set_exception(error)

    thread = threading.Thread(target=run, name="shoal-place", daemon=True)
    thread.start()
    thread.join(wait_s)
    if not future.done():
        raise Unavailable(
            f"no answer from {url} within {wait_s:g} s; is the address right, and its service up?"
        )
    return future.result()


def _write_local(path: Path, data: bytes) -> None:
    _make_directory(path.parent)
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with half.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _make_directory(path: Path) -> None:
    """It outlives a crash only if its entry in the one above is durable, too."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        try:
            _sync_directory(path.parent)
        except OSError:
            path.rmdir()  # or the next one would take it for durable
            raise


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _said(what: str) -> Iterator[None]:
    """What a file system raises, as Unavailable that begins so."""
    try:
        yield
    except Exception as error:  # clients of object stores have errors with no common class
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unavailable(f"{what}: {reason}") from error
