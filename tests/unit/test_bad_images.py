"""The head of a shard's image as an enemy would write it: refused, whatever it says of what waits there."""

import struct

import pytest

from shoal import _core

TABLE, TENSOR, DIM = 1, 2, 3


def store() -> _core.Store:
    client = _core.Client.embedded(shards=1, threads=1)
    for identity, dense in ((TABLE, False), (TENSOR, True)):
        spec = _core.TableSpec()
        spec.id, spec.name, spec.dim, spec.dense = identity, f"t{identity}", DIM, dense
        spec.optimizer, spec.init = _core.OptimizerSpec("sgd"), _core.InitSpec("zeros")
        client.declare(spec, 5.0)
    return client.store()


def head(*parts: bytes, count: int | None = None) -> bytes:
    """One contribution that waits for its round, of these parts."""
    shard = struct.pack("<8Q", 0, 1, 0, 0, 0, 0, 0, 0)
    records, contributions = struct.pack("<Q", 0), struct.pack("<Q", 1)
    name = struct.pack("<5Q", 0, 0, 9, 1, len(parts) if count is None else count)
    return shard + records + contributions + name + b"".join(parts)


def part(table: int = TABLE, stride: int = DIM, key: int = 7, keys: int = 1) -> bytes:
    about = struct.pack("<IIf3Q", table, stride, float("nan"), 0, 0, keys)
    return about + struct.pack("<q", key) + struct.pack(f"<{stride}f", *[0.0] * stride)


def test_a_sound_one_is_taken() -> None:
    store().restore_head(0, head(part(), part(TENSOR, key=0)))


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(head(part(stride=1)), id="rows that are too short"),
        pytest.param(head(part(stride=DIM + 1)), id="rows that are too long"),
        pytest.param(head(part(table=77)), id="no such table"),
        pytest.param(head(part(TENSOR, key=1)), id="no such piece"),
        pytest.param(head(part(TENSOR, key=-1)), id="no such piece, below"),
        pytest.param(head(), id="nothing at all"),
        pytest.param(head(part(), count=2), id="cut short"),
        pytest.param(head(part(keys=1 << 61)), id="more keys than there can be"),
        pytest.param(head(part()) + b"x", id="more than a head"),
    ],
)
def test_others_are_refused(bad: bytes) -> None:
    with pytest.raises(_core.CoreError, match="not the head of a shard's image"):
        store().restore_head(0, bad)
