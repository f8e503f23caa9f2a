"""Checkpoints of an embedded store: what was saved is what is loaded; what is damaged is refused."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.checkpoint import shards
from shoal.checkpoint.client import check_writable
from shoal.checkpoint.client import load as load_
from shoal.checkpoint.client import save as save_
from shoal.checkpoint.export import export
from shoal.checkpoint.keep import Keeper
from shoal.checkpoint.manifest import find, names
from shoal.checkpoint.place import Place
from shoal.errors import BadInput, Mismatch, Refused, Unavailable

ADAGRAD = shoal.optim.Adagrad(lr=0.1)
OPTIMIZERS = [
    shoal.optim.SGD(lr=0.1, momentum=0.9),
    ADAGRAD,
    shoal.optim.Adam(lr=0.01),
    shoal.optim.FTRL(lr=0.1),
    shoal.optim.RowwiseAdagrad(lr=0.1),
]


def fill(client: shoal.Client, optimizer: shoal.optim.Optimizer = ADAGRAD) -> None:
    items = client.table("items", dim=4, optimizer=optimizer, init=shoal.init.Uniform(0.1), seed=3)
    random = np.random.default_rng(0)
    for _ in range(3):
        items.push(random.integers(-(2**60), 2**60, 500), random.normal(size=(500, 4)).astype(np.float32))
    items.push(np.arange(50), np.ones((50, 4), np.float32))
    for_rows_only = isinstance(optimizer, shoal.optim.RowwiseAdagrad)
    dense = ADAGRAD if for_rows_only else optimizer
    w = client.tensor("w", np.ones((300, 300), np.float32), optimizer=dense)
    w.push(np.full((300, 300), 0.5, np.float32))


def contents(client: shoal.Client) -> tuple[dict[int, bytes], bytes]:
    rows = {
        int(key): value.tobytes()
        for keys, values in client.table("items").scan()
        for key, value in zip(keys, values, strict=True)
    }
    return rows, client.tensor("w").pull().tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_what_was_saved_is_loaded_and_trained_on_alike(tmp_path: Path, optimizer: object) -> None:
    with shoal.connect("memory://") as first, shoal.connect("memory://") as second:
        fill(first, optimizer)
        name = first.save(f"file://{tmp_path}")
        saved = contents(first)
        assert second.load(f"file://{tmp_path}") == name
        assert contents(second) == saved
        for client in (first, second):  # state came with the values
            client.table("items").push(np.arange(50), np.ones((50, 4), np.float32))
            client.tensor("w").push(np.ones((300, 300), np.float32))
        assert contents(first) == contents(second) != saved


def test_a_load_replaces_all_rows(tmp_path: Path) -> None:
    with shoal.connect("memory://") as client:
        fill(client)
        saved = contents(client)
        first = client.save(str(tmp_path))
        client.table("items").push([123456789], np.ones((1, 4), np.float32))
        second = client.save(str(tmp_path))
        later = contents(client)
        assert client.load(str(tmp_path / first)) == first
        assert contents(client) == saved
        assert client.load(str(tmp_path)) == second
        assert contents(client) == later


def test_tables_of_a_checkpoint_may_have_other_ids_here(tmp_path: Path) -> None:
    with shoal.connect("memory://") as first, shoal.connect("memory://") as second:
        fill(first)
        first.save(str(tmp_path))
        second.tensor("w", np.zeros((300, 300), np.float32), optimizer=ADAGRAD)
        second.load(str(tmp_path))
        assert contents(second) == contents(first)


def test_another_model_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    with shoal.connect("memory://") as first, shoal.connect("memory://") as second:
        fill(first)
        first.save(str(tmp_path))
        second.table("items", dim=8, optimizer=shoal.optim.Adam(lr=0.1))
        second.table("users", dim=4, optimizer=ADAGRAD)
        with pytest.raises(Mismatch) as caught:
            second.load(str(tmp_path))
    said = str(caught.value)
    assert "table 'items': dim is 8 here, 4 in the checkpoint" in said
    assert "table 'items': optimizer is ('adam',) here, ('adagrad',) in the checkpoint" in said
    assert "table 'users' is not in the checkpoint" in said


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("which", ["part-0-0.safetensors", "part-0.json", "manifest.json"])
def test_what_is_damaged_is_refused_and_the_one_before_is_taken(
    tmp_path: Path, which: str, damage: str
) -> None:
    with shoal.connect("memory://") as client:
        fill(client)
        first = client.save(str(tmp_path))
        saved = contents(client)
        client.table("items").push(np.arange(9), np.ones((9, 4), np.float32))
        second = client.save(str(tmp_path))
        path = tmp_path / second / which
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(data if damage == "flip" else data[: len(data) // 2])
        before = contents(client)
        with pytest.raises(Refused, match=rf"{second}.*(damaged|not complete)"):
            client.load(str(tmp_path / second))
        assert contents(client) == before
        assert client.load(str(tmp_path)) == first
        assert contents(client) == saved


@pytest.mark.parametrize("which", ["part-0-0.safetensors", "part-0.json", "manifest.json"])
def test_what_cannot_be_read_now_is_no_damage_and_no_older_one_is_taken_for_it(
    tmp_path: Path, which: str
) -> None:
    with shoal.connect("memory://") as client:
        fill(client)
        first = client.save(str(tmp_path))
        client.table("items").push(np.arange(9), np.ones((9, 4), np.float32))
        second = client.save(str(tmp_path))
        saved = contents(client)
        client.load(str(tmp_path / first))
        path, away = tmp_path / second / which, tmp_path / "away"
        path.rename(away)
        path.symlink_to(tmp_path / "not mounted")
        before = contents(client)
        with pytest.raises(Unavailable, match=f"cannot read .*{second}/{which}"):
            client.load(str(tmp_path))
        assert contents(client) == before
        away.replace(path)
        assert client.load(str(tmp_path)) == second
        assert contents(client) == saved


def test_a_load_says_why_newer_ones_were_passed_over(tmp_path: Path) -> None:
    with shoal.connect("memory://") as client:
        fill(client)
        first, second = (client.save(str(tmp_path)) for _ in range(2))
        (tmp_path / second / "part-0.json").unlink()
        (tmp_path / "000003-a").mkdir()
        name, passed_over = load_(client, str(tmp_path), 10.0)
        assert name == first
        assert list(passed_over) == ["000003-a", second]
        assert "has no manifest.json, so its saving was broken off" in passed_over["000003-a"]
        assert f"{second}/part-0.json is damaged or gone" in passed_over[second]
        assert load_(client, str(tmp_path / first), 10.0) == (first, {})


def test_what_a_base_says_cannot_be_read_so_the_next_one_holds_all_rows(tmp_path: Path) -> None:
    with shoal.connect("memory://") as client:
        fill(client)
        keeper = Keeper(client, str(tmp_path))
        path = tmp_path / keeper.save() / "part-0.json"
        path.unlink()
        path.symlink_to(tmp_path / "not mounted")
        client.table("items").push([1], np.ones((1, 4), np.float32))
        assert find(Place(str(tmp_path)), keeper.save()).base is None


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shoal.connect("memory://") as client:
        fill(client)
        first = client.save(str(tmp_path))
        monkeypatch.setattr(shards, "save_tensors", lambda tensors: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            client.save(str(tmp_path))
        monkeypatch.undo()
        assert client.load(str(tmp_path)) == first


def test_bad_urls(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with shoal.connect("memory://") as client:
        with pytest.raises(BadInput, match=re.escape(f"there is no checkpoint at {tmp_path}")):
            client.load(str(tmp_path))
        with pytest.raises(BadInput, match="nosuch"):
            client.save("nosuch://x/y")
        with pytest.raises(Unavailable, match="cannot write"):
            client.save(str(tmp_path / "file" / "below"))
    with pytest.raises(BadInput, match="no checkpoint can be written: cannot write"):
        check_writable(str(tmp_path / "file" / "below"))
    with pytest.raises(BadInput, match="servers are other processes"):
        check_writable("memory://x")
    check_writable(str(tmp_path / "new"))
    assert list((tmp_path / "new").iterdir()) == []


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8), min_size=1, max_size=6))
def test_a_base_and_what_changed_since_are_the_whole(pushes: list[list[int]]) -> None:
    with shoal.connect("memory://") as client, shoal.connect("memory://") as other:
        items = client.table("items", dim=4, optimizer=ADAGRAD)
        client.tensor("w", np.ones((3, 3), np.float32), optimizer=ADAGRAD)
        url = f"memory://delta-{id(client)}"
        base = None
        for keys in pushes:
            items.push(keys, np.ones((len(keys), 4), np.float32))
            base = save_(client, url, 10.0, base)
        other.load(url)
        assert contents(other) == contents(client)


def test_a_delta_is_small_and_needs_the_same_life(tmp_path: Path) -> None:
    with shoal.connect("memory://") as client:
        fill(client)
        base = client.save(str(tmp_path))
        client.table("items").push([1], np.ones((1, 4), np.float32))
        delta = save_(client, str(tmp_path), 10.0, base)
        assert find(Place(str(tmp_path)), delta).rows == 1
        client.load(str(tmp_path))
        with pytest.raises(Refused, match="another life"):
            save_(client, str(tmp_path), 10.0, delta)


def test_a_save_is_one_instant_while_threads_push(tmp_path: Path) -> None:
    """Each push adds one to keys of many shards: in every checkpoint they are equal."""
    keys = np.arange(64)
    with shoal.connect("memory://") as client:
        table = client.table("items", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        stop = threading.Event()

        def push(own: shoal.Client, mine: np.ndarray) -> None:
            handle = own.table("items")
            while not stop.is_set():
                handle.push(mine, np.full((64, 1), -1.0, np.float32))

        threads = [threading.Thread(target=push, args=(client.fork(), keys + 64 * i)) for i in range(2)]
        for thread in threads:
            thread.start()
        names = [client.save(str(tmp_path)) for _ in range(5)]
        stop.set()
        for thread in threads:
            thread.join()
        assert len(table) == 128
        seen = []
        for name in names:
            with shoal.connect("memory://") as other:
                other.load(str(tmp_path / name))
                rows = other.table("items").pull(np.arange(128)).reshape(2, 64)
                assert (rows == rows[:, :1]).all()
                seen.append(rows[:, 0].sum())
        assert seen == sorted(seen)


def test_a_checkpoint_that_is_made_is_made_also_if_older_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(request: object) -> None:
        raise Unavailable("the coordinator does not answer")

    with shoal.connect("memory://") as client:
        keepers = [Keeper(client, str(tmp_path)) for _ in range(4)]
        monkeypatch.setattr(client._directory, "attend", away)
        made = [keeper.save() for keeper in keepers]
    assert names(Place(str(tmp_path))) == made
    assert f"older ones than {made[-1]} stay: the coordinator does not answer" in caplog.text


def test_an_export_of_nothing_is_refused(tmp_path: Path) -> None:
    with shoal.connect("memory://") as client:
        client.save(tmp_path.as_uri())
    place = Place(tmp_path.as_uri())
    with pytest.raises(BadInput, match="holds no table, no tensor and no model of a worker"):
        export(place, find(place, names(place)[-1]), tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
