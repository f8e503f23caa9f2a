"""A place that does not answer: every call ends, with the URL and the time in its error."""

import threading
import time
from collections.abc import Callable, Iterator

import fsspec
import numpy as np
import pytest

import shoal
from shoal.checkpoint.client import check_writable
from shoal.checkpoint.place import Place
from shoal.errors import BadInput, Unavailable

URL = "silent://there/run1"
SAID = f"no answer from {URL} within 0.05 s; is the address right, and its service up"


class SilentFileSystem(fsspec.AbstractFileSystem):
    """Of a service that answers when the event is set, and has nothing."""

    protocol = "silent"
    answers = threading.Event()

    def _answer(self, *_: object, **__: object) -> None:
        assert self.answers.wait(60)
        raise FileNotFoundError("there is nothing")

    makedirs = pipe_file = cat_file = ls = rm = _answer


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set it to be answered."""
    monkeypatch.setattr(SilentFileSystem, "answers", threading.Event())
    fsspec.register_implementation("silent", SilentFileSystem, clobber=True)
    yield SilentFileSystem.answers
    SilentFileSystem.answers.set()  # so that no thread stays


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda place: place.write("a/b", b"x"), f"cannot write {URL}/a/b"),
        (lambda place: place.read("a"), f"cannot read {URL}/a"),
        (lambda place: place.names(), f"cannot list {URL}"),
        (lambda place: place.remove("a"), f"cannot remove {URL}/a"),
        (lambda place: place.check(), f"cannot write {URL}/.probe-"),
    ],
)
@pytest.mark.usefixtures("silent")
def test_a_call_that_is_not_answered_ends(call: Callable[[Place], object], said: str) -> None:
    with pytest.raises(Unavailable, match=SAID) as caught:
        call(Place(URL, answer_s=0.05))
    assert str(caught.value).startswith(said)


@pytest.mark.usefixtures("silent")
def test_a_checkpoint_url_that_does_not_answer_is_found_in_time() -> None:
    with pytest.raises(BadInput, match=f"no checkpoint can be written: {SAID}"):
        check_writable(URL, wait_s=0.05)


@pytest.mark.usefixtures("silent")
def test_a_save_that_is_not_answered_leaves_the_store_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place.__init__, "__defaults__", (0.05,))
    with shoal.connect("memory://") as client:
        table = client.table("t", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        with pytest.raises(Unavailable, match=SAID):
            client.save(URL)
        table.push([1], np.ones((1, 1), np.float32))
        assert table.pull([1]).tolist() == [[-1.0]]


def test_an_answer_that_comes_late_but_in_time_is_taken(silent: threading.Event) -> None:
    timer = threading.Timer(0.1, silent.set)
    timer.start()
    began = time.monotonic()
    assert Place(URL, answer_s=60).names() == []
    assert 0.05 < time.monotonic() - began < 30
    with pytest.raises(Unavailable, match=f"cannot read {URL}/a: there is nothing"):
        Place(URL).read("a")
    timer.join()


@pytest.mark.parametrize("url", ["s3//bucket/x", "s3:/bucket/x", "gs:bucket", "file:/ckpt", "hdfs//host/x"])
def test_a_scheme_that_was_mistyped_is_no_directory(url: str) -> None:
    with pytest.raises(BadInput, match=r"is .* meant"):
        Place(url)


@pytest.mark.parametrize("url", ["s3/bucket", "files/x", "./s3//x", "file"])
def test_a_path_is_a_directory_here(url: str) -> None:
    assert Place(url).url == url
