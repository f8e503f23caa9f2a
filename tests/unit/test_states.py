"""States of workers in a checkpoint: written, taken over from the one before, left out with a reason."""

import time
from pathlib import Path

import pytest

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint import states
from shoal.checkpoint.manifest import Manifest, WorkerState
from shoal.checkpoint.place import Place
from shoal.errors import Unavailable
from shoal.store.messages import StoreSaved

FIRST, SECOND, THIRD = "000001-a", "000002-b", "000003-c"


def made(place: Place, name: str, clocks: tuple[int, ...], workers: tuple[WorkerState, ...]) -> states.Origin:
    written = Manifest(
        name=name, time=time.time(), shards=1, tables=(), parts=(), clocks=clocks, workers=workers
    )
    manifest_.write(place, written)
    return states.Origin(place, written)


def first(place: Place) -> states.Origin:
    """Two workers; the second was left out."""
    own = states.write(place, FIRST, 0, 5, b"zero at 5")
    third = states.write(place, FIRST, 2, 5, b"two at 5")
    return made(place, FIRST, (5, 5, 5), (own, WorkerState(rank=1, clock=5, why="it died"), third))


def collect(
    place: Place, name: str, cut: StoreSaved, origin: states.Origin | None, phases: tuple[str, ...] = ()
) -> dict[int, tuple[str, str]]:
    """By rank: since which checkpoint it is what it is, and why it is not there."""
    found = states.collect(place, name, cut, 0.0, None, origin, lambda: list(phases))
    made(place, name, cut.clocks, found)
    return {state.rank: (state.since, state.why) for state in found}


def data(place: Place, name: str, rank: int, *, common: bool = False) -> bytes | None:
    found = states.read(place, name, rank, common=common)
    return None if found is None else found[1]


def test_what_has_not_come_since_is_carried_over_however_often(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    origin = first(place)
    assert collect(place, SECOND, StoreSaved(clocks=(5, 5, 5)), origin) == {
        0: (FIRST, ""),
        1: (FIRST, "it died"),
        2: (FIRST, ""),
    }
    again = states.Origin(place, manifest_.find(place, SECOND))
    assert 2 in collect(place, "000004-d", StoreSaved(clocks=(5, 5)), again)  # begun with fewer workers
    states.write(place, "000005-e", 0, 6, b"zero at 6")
    assert 2 not in collect(place, "000005-e", StoreSaved(clocks=(6, 5), came=(0,)), again)
    states.write(place, THIRD, 2, 7, b"two at 7")
    cut = StoreSaved(clocks=(6, 5, 7), came=(2,))  # under another word all begin where the first was
    assert collect(place, THIRD, cut, again) == {0: (FIRST, ""), 1: (FIRST, "it died"), 2: ("", "")}
    assert [data(place, THIRD, rank) for rank in range(3)] == [b"zero at 5", b"two at 7", b"two at 7"]


def test_a_model_in_common_is_that_of_who_has_made_steps(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    states.write(place, SECOND, 2, 7, b"two at 7")
    collect(place, SECOND, StoreSaved(clocks=(5, 5, 7), came=(2,)), first(place))
    assert data(place, SECOND, 0) == b"zero at 5"
    assert data(place, SECOND, 0, common=True) == b"two at 7"
    again = states.Origin(place, manifest_.find(place, SECOND))
    collect(place, THIRD, StoreSaved(clocks=(5, 5, 7)), again)  # nobody has come since
    assert data(place, THIRD, 0, common=True) == b"two at 7"
    assert data(place, FIRST, 0, common=True) == b"zero at 5"


def test_who_has_come_and_adds_nothing_is_left_out_unless_it_stands_where_it_did(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    origin = first(place)
    cut = StoreSaved(clocks=(5, 6, 6), came=(0, 1, 2), workers=(1,))
    states.write(place, SECOND, 0, 5, None, "it has no copy")
    assert collect(place, SECOND, cut, origin, ("working", "working", "left")) == {
        0: (FIRST, ""),
        1: ("", "it was not written in time"),
        2: ("", states.LEFT),
    }
    told = states.missing(manifest_.find(place, SECOND), 3)
    assert told == {"it was not written in time": [1], states.LEFT: [2]}
    assert list(states.missing(manifest_.find(place, SECOND), 2)) == ["it was not written in time"]
    store = made(place, THIRD, (3, 0), ())
    assert states.missing(store.manifest, 2) == {"the store alone was saved": [0]}


def test_no_checkpoint_is_made_without_what_cannot_be_read_now(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    origin = first(place)
    (tmp_path / FIRST / "worker-0.safetensors").write_bytes(b"damaged")
    with pytest.raises(Unavailable, match="worker 0 has made no step since 000001-a"):
        collect(place, SECOND, StoreSaved(clocks=(5, 5, 5)), origin)
    (tmp_path / FIRST / "worker-0.safetensors").unlink()
    found = collect(place, SECOND, StoreSaved(clocks=(5, 5, 5)), origin)
    assert found[0] == (FIRST, "it has made no step since checkpoint 000001-a, of which that is gone")
