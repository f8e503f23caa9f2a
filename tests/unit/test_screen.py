"""What a job shows where there is no terminal, also to a reader that stalls or goes away."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest

from shoal.launch import screen as screen_
from shoal.launch.board import Board
from shoal.launch.screen import LogFile, Screen


class Reader(NamedTuple):
    """The end of a pipe that the test holds, and the end that the screen writes to."""

    descriptor: int
    file: TextIO

    def read(self) -> str:
        self.file.close()
        with os.fdopen(self.descriptor) as end:
            return end.read()


@pytest.fixture
def ends() -> Iterator[tuple[Reader, Reader]]:
    readers = []
    for _ in range(2):
        read, write = os.pipe()
        readers.append(Reader(read, os.fdopen(write, "w")))
    yield readers[0], readers[1]
    for reader in readers:
        reader.file.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogFile]:
    log = LogFile(tmp_path / "job.log")
    yield log
    log.close()


def show(log: LogFile, ends: tuple[Reader, Reader], *, interrupted: bool = False) -> Screen:
    return Screen(log, lambda: interrupted, stdout=ends[0].file, stderr=ends[1].file)


def test_each_output_goes_its_own_way_and_all_is_logged(tmp_path: Path, log: LogFile, ends) -> None:
    screen = show(log, ends)
    screen.lines(0, "stdout", [b"one", b"two \xff"])
    screen.lines(11, "stderr", [b"three"])
    screen.note("four")
    screen.plain(["five"])
    screen.close()
    assert (tmp_path / "job.log").read_bytes() == (
        b"[worker 0] one\n[worker 0] two \xff\n[worker 11] three\n[shoal] four\nfive\n"
    )
    assert ends[1].read() == "[worker 11] three\n[shoal] four\nfive\n"


def test_progress_is_a_line_now_and_then(tmp_path: Path, log: LogFile, ends, monkeypatch) -> None:
    board = Board(tmp_path, 1)
    screen = show(log, ends)
    screen.progress(board, changed=True)  # too early
    monkeypatch.setattr(screen_, "_PLAIN_EVERY_S", 0.0)
    screen.progress(board, changed=False)  # nothing new
    screen.progress(board, changed=True)
    assert ends[1].read() == "[shoal] step 0, 0 samples/s, not joined: worker 0\n"


def test_a_reader_that_stalls_does_not_hold_up_the_end(tmp_path: Path, log: LogFile, ends) -> None:
    screen = show(log, ends, interrupted=True)
    screen.lines(0, "stdout", [b"x" * 1000] * 1000)  # more than a pipe holds
    assert len((tmp_path / "job.log").read_bytes()) > 1_000_000
    os.close(ends[0].descriptor)


def test_a_reader_that_is_gone_is_written_to_no_more(tmp_path: Path, log: LogFile, ends) -> None:
    screen = show(log, ends)
    os.close(ends[0].descriptor)
    for _ in range(2):
        screen.lines(0, "stdout", [b"one"])
    screen.note("still here")
    assert ends[1].read() == "[shoal] still here\n"
