"""`hdfs://` through hdfs-native: its filesystem class and its files are real, what is below speaks to no name
node but keeps all in memory. And the whole client, where nobody answers."""

import io
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import hdfs_native
import hdfs_native.fsspec
import numpy as np
import pytest

import shoal
from shoal.checkpoint.client import check_writable
from shoal.checkpoint.place import Place
from shoal.errors import Unavailable

URL = "hdfs://namenode:8020/ckpt/run1"


@dataclass
class Status:
    path: str


class Reader(io.BytesIO):
    def file_length(self) -> int:
        return len(self.getbuffer())


@dataclass
class Writer:
    files: dict[str, bytes]
    path: str

    def write(self, data: bytes) -> int:
        self.files[self.path] += bytes(data)
        return len(data)

    def close(self) -> None:
        pass


@dataclass
class NameNode:
    """What `hdfs_native.RawClient` does, as far as it is used, with HDFS's rules for what is missing."""

    files: dict[str, bytes] = field(default_factory=dict)
    directories: set[str] = field(default_factory=lambda: {"/"})
    urls: list[str] = field(default_factory=list)

    def __call__(self, url: str, *_: object) -> "NameNode":
        self.urls.append(url)
        return self

    def mkdirs(self, path: str, permission: int, create_parent: bool) -> None:
        assert create_parent
        self.directories |= {str(each) for each in (PurePosixPath(path), *PurePosixPath(path).parents)}

    def create(self, path: str, options: hdfs_native.WriteOptions) -> Writer:
        if str(PurePosixPath(path).parent) not in self.directories:
            raise FileNotFoundError(f"{path}: no such directory")
        assert options.overwrite
        self.files[path] = b""
        return Writer(self.files, path)

    def read(self, path: str) -> Reader:
        if path not in self.files:
            raise FileNotFoundError(path)
        return Reader(self.files[path])

    def list_status(self, path: str, recursive: bool) -> list[Status]:
        assert not recursive
        if path not in self.directories:
            raise FileNotFoundError(path)
        known = [*self.files, *self.directories - {"/"}]
        return [Status(each) for each in known if str(PurePosixPath(each).parent) == path]

    def delete(self, path: str, recursive: bool) -> bool:
        assert recursive
        gone = {each for each in [*self.files, *self.directories] if PurePosixPath(each).is_relative_to(path)}
        self.directories -= gone
        for each in gone & self.files.keys():
            del self.files[each]
        return bool(gone)


@pytest.fixture
def namenode(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameNode]:
    node = NameNode()
    monkeypatch.setattr(hdfs_native, "RawClient", node)
    hdfs_native.fsspec.HdfsFileSystem.clear_instance_cache()
    yield node
    hdfs_native.fsspec.HdfsFileSystem.clear_instance_cache()


def test_files_are_written_whole_read_listed_and_removed(namenode: NameNode) -> None:
    place = Place(URL)
    place.write("000001-a/part-0", b"one")
    place.write("000001-a/part-0", b"another")
    place.write("000002-b/part-0", b"")
    assert place.read("000001-a/part-0") == b"another"
    assert place.names() == ["000001-a", "000002-b"]
    assert place.names("000001-a") == ["part-0"]
    place.remove("000001-a")
    assert place.names() == ["000002-b"]
    assert namenode.files == {"/ckpt/run1/000002-b/part-0": b""}
    assert set(namenode.urls) == {"hdfs://namenode:8020"}


@pytest.mark.usefixtures("namenode")
def test_what_is_not_there_is_nothing_or_an_error() -> None:
    place = Place(URL)
    assert place.names() == place.names("000001-a") == []
    with pytest.raises(Unavailable, match=f"cannot read {URL}/000001-a/part-0"):
        place.read("000001-a/part-0")
    check_writable(URL)
    assert place.names() == []


@pytest.mark.usefixtures("namenode")
def test_what_was_saved_is_loaded() -> None:
    with shoal.connect("memory://") as first, shoal.connect("memory://") as second:
        table = first.table("t", dim=4, optimizer=shoal.optim.Adagrad(lr=0.1))
        table.push(np.arange(100), np.ones((100, 4), np.float32))
        name = first.save(URL)
        assert second.load(URL) == name
        np.testing.assert_array_equal(second.table("t").pull(np.arange(100)), table.pull(np.arange(100)))


@pytest.mark.parametrize("listens", [True, False])
def test_a_name_node_that_never_answers_is_given_up_and_the_process_ends(listens: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"hdfs://127.0.0.1:{silent.getsockname()[1]}/ckpt"
        if not listens:
            silent.close()
        code = f"from shoal.checkpoint.client import check_writable; check_writable({url!r}, wait_s=1.0)"
        began = time.monotonic()
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    assert f"BadInput: no checkpoint can be written: no answer from {url} within 1 s" in ran.stderr
    assert time.monotonic() - began < 30  # the client itself tries again for three minutes
