"""Several tables in one operation, pushes by staleness, delay compensation: in memory and on servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from shoal import _core

WAIT_S = 20.0
PIECE = 65536
SIZES = {1: 3, 2: 8, 3: 5, 4: 2 * PIECE + 9}  # tables 1 and 2, tensors 3 and 4
SHARDS = 4


def declare(client: _core.Client) -> _core.Client:
    for identity, size in SIZES.items():
        spec = _core.TableSpec()
        spec.id, spec.name, spec.dim, spec.dense = identity, f"t{identity}", size, identity > 2
        spec.optimizer = _core.OptimizerSpec("sgd")
        spec.optimizer.lr = 1.0
        spec.init = _core.InitSpec("zeros")
        client.declare(spec, WAIT_S)
    return client


@pytest.fixture(params=["memory", "tcp", "unix", "shm"])
def clients(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[_core.Client]]:
    """Two clients of one store."""
    if request.param == "memory":
        first = declare(_core.Client.embedded(shards=SHARDS, threads=2))
        yield [first, first.fork()]
        return
    with ExitStack() as stack:
        servers = []
        for index in range(2):
            path = str(tmp_path_factory.mktemp("socket") / "s")
            server = _core.Server(
                host="127.0.0.1",
                port=0,
                unix_path=path,
                token=b"t",
                shards=SHARDS,
                threads=1,
                frame_bytes_max=1 << 28,
            )
            stack.callback(server.stop)
            servers.append(_core.ServerAddress(index, "127.0.0.1", server.port, path))
        made = [
            _core.Client.connect(
                client_id=number,
                incarnation=1,
                token=b"t",
                placement=_core.Placement(
                    version=0,
                    weak=False,
                    servers=servers,
                    terms=[1] * SHARDS,
                    chains=[[shard % 2] for shard in range(SHARDS)],
                ),
                lane=request.param,
                timeout_s=WAIT_S,
                shm_bytes_max=1 << 28,
            )
            for number in (1, 2)
        ]
        for client in made:
            stack.enter_context(closing(declare(client)))
        yield made


def gradients() -> dict[int, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {1: (50, 3), 2: (7, 8), 3: (5,), 4: (2 * PIECE + 9,)}
    return {identity: rng.integers(-9, 9, shape).astype(np.float32) for identity, shape in shapes.items()}


KEYS = {1: np.arange(50, dtype=np.int64) % 20, 2: np.arange(7, dtype=np.int64) * 1000}


def summed() -> dict[int, np.ndarray]:
    """What the rows of the keys (tensors: all) show after one push."""
    expected = {}
    for identity, grad in gradients().items():
        if identity in KEYS:
            total = {
                key: sum(grad[i] for i in np.flatnonzero(KEYS[identity] == key)) for key in KEYS[identity]
            }
            expected[identity] = -np.stack([total[key] for key in KEYS[identity]])
        else:
            expected[identity] = -grad
    return expected


def items(lr: float = math.nan) -> list[tuple[int, np.ndarray | None, np.ndarray, float]]:
    return [(identity, KEYS.get(identity), grad, lr) for identity, grad in gradients().items()]


def pull_all(client: _core.Client, codec: str = "fp32") -> list[np.ndarray]:
    asked = [(identity, KEYS.get(identity), None) for identity in SIZES]
    answer = client.pull_many(asked, codec=codec, timeout_s=WAIT_S).wait(WAIT_S)
    assert isinstance(answer, list)
    return answer


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_several_tables_are_pushed_and_pulled_at_once(clients: list[_core.Client], codec: str) -> None:
    client = clients[0]
    before = client.counters()["requests"]
    client.push_many(items(), codec=codec, timeout_s=WAIT_S).wait(WAIT_S)
    for got, expected in zip(pull_all(client, codec), summed().values(), strict=True):
        np.testing.assert_array_equal(got, expected)
    if client.counters()["lanes"] != ["memory"]:
        # The tensor of several pieces is cut; everything else travels together.
        assert client.counters()["requests"] - before <= 2 + 3 + 2


def test_small_items_are_one_request_per_server(clients: list[_core.Client]) -> None:
    client = clients[0]
    if client.counters()["lanes"] == ["memory"]:
        return
    before = client.counters()["requests"]
    client.push_many(items()[:3], timeout_s=WAIT_S).wait(WAIT_S)
    client.pull_many([(1, KEYS[1], None), (2, KEYS[2], None), (3, None, None)], timeout_s=WAIT_S).wait(WAIT_S)
    assert client.counters()["requests"] - before <= 4


def test_rows_go_to_the_caller_s_memory_where_it_gives_some(clients: list[_core.Client]) -> None:
    client = clients[0]
    client.push_many(items(), timeout_s=WAIT_S).wait(WAIT_S)
    out = np.empty((7, 8), np.float32)
    ticket = client.pull_many([(1, KEYS[1], None), (2, KEYS[2], out), (3, None, None)], timeout_s=WAIT_S)
    first, second, third = ticket.wait(WAIT_S)
    assert second is None
    for got, identity in ((first, 1), (out, 2), (third, 3)):
        np.testing.assert_array_equal(got, summed()[identity])


def test_nothing_of_a_push_is_applied_where_one_item_is_bad(clients: list[_core.Client]) -> None:
    client, bad = clients[0], items()
    bad[2][2][0] = math.nan
    with pytest.raises(_core.CoreError, match="must be finite"):
        client.push_many(bad, timeout_s=WAIT_S)
    assert not any(rows.any() for rows in pull_all(client))
    huge = np.full((2, 3), 3e38, np.float32)
    overflowing = [items()[1], (1, np.zeros(2, np.int64), huge, math.nan)]
    with pytest.raises(_core.CoreError, match="duplicates summed"):
        client.push_many(overflowing, timeout_s=WAIT_S)
    assert not any(rows.any() for rows in pull_all(client))


def test_several_tables_are_staged_and_committed_together(clients: list[_core.Client]) -> None:
    client = clients[0]
    client.sync_open(rank=0, workers=1, take="round", timeout_s=WAIT_S)
    client.push_many(items(), step=0, stage_rank=0, timeout_s=WAIT_S).wait(WAIT_S)
    assert not any(rows.any() for rows in pull_all(client))
    client.advance(rank=0, step=0, weight=1.0, timeout_s=WAIT_S)
    for got, expected in zip(pull_all(client), summed().values(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_lr_is_divided_by_the_updates_since_the_last_pull(clients: list[_core.Client]) -> None:
    client, other = clients
    key, ones = np.zeros(1, np.int64), np.ones((1, 3), np.float32)
    push = {"lr": math.nan, "timeout_s": WAIT_S}

    def value() -> float:
        return -float(other.pull(1, key, timeout_s=WAIT_S).wait(WAIT_S)[0, 0])

    client.pull(1, key, timeout_s=WAIT_S).wait(WAIT_S)
    client.push(1, key, ones, by_staleness=True, **push).wait(WAIT_S)
    assert value() == 1.0  # nothing between
    client.pull(1, key, timeout_s=WAIT_S).wait(WAIT_S)
    for _ in range(4):
        other.push(1, key, ones, **push).wait(WAIT_S)
    client.push(1, key, ones, by_staleness=True, **push).wait(WAIT_S)
    assert value() == pytest.approx(5.2)  # its own update counts
    client.sync_open(rank=0, workers=1, take="each", timeout_s=WAIT_S)
    assert client.sync_state(WAIT_S)["staleness"] == {"count": 6, "sum": 16, "max": 5}


def test_delay_compensation_adds_what_the_values_have_moved_by(clients: list[_core.Client]) -> None:
    client = clients[0]
    for identity, size in ((3, 5), (4, 2 * PIECE + 9)):
        values = np.linspace(-1, 1, size, dtype=np.float32)
        client.init_tensor(identity, values, timeout_s=WAIT_S).wait(WAIT_S)
        pulled, grad = values - np.float32(0.25), np.linspace(2, 3, size, dtype=np.float32)
        client.push_tensor(identity, grad, lr=0.5, pulled=pulled, dc_lambda=0.5, timeout_s=WAIT_S).wait(
            WAIT_S
        )
        now = client.pull_tensor(identity, timeout_s=WAIT_S).wait(WAIT_S)
        np.testing.assert_allclose(now, values - 0.5 * (grad + 0.5 * grad * grad * 0.25), atol=1e-5)
    with pytest.raises(_core.CoreError, match="dc_lambda needs pulled="):
        client.push_tensor(3, np.ones(5, np.float32), lr=1.0, dc_lambda=0.5, timeout_s=WAIT_S)


@pytest.mark.parametrize("lane", ["tcp", "shm"])
def test_more_tables_than_a_frame_has_room_for(lane: str, tmp_path: Path) -> None:
    shards, tables = 64, 300  # 19,200 parts, where a frame holds 16,384
    path = str(tmp_path / "s")
    server = _core.Server(
        host="127.0.0.1",
        port=0,
        unix_path=path,
        token=b"t",
        shards=shards,
        threads=1,
        frame_bytes_max=1 << 28,
    )
    try:
        address = _core.ServerAddress(0, "127.0.0.1", server.port, path)
        client = _core.Client.connect(
            client_id=1,
            incarnation=1,
            token=b"t",
            placement=_core.Placement(
                version=0, weak=False, servers=[address], terms=[1] * shards, chains=[[0]] * shards
            ),
            lane=lane,
            timeout_s=WAIT_S,
            shm_bytes_max=1 << 28,
        )
        for identity in range(1, tables + 1):
            spec = _core.TableSpec()
            spec.id, spec.name, spec.dim = identity, f"t{identity}", 1
            spec.optimizer, spec.init = _core.OptimizerSpec("sgd"), _core.InitSpec("zeros")
            client.declare(spec, WAIT_S)
        _, first = np.unique(_core.protocol.key_shards(np.arange(1000), shards), return_index=True)
        keys = np.sort(first)  # one of each shard
        assert len(keys) == shards
        each = [
            (identity, keys, np.full((shards, 1), identity, np.float32), 1.0) for identity in range(1, 301)
        ]
        client.push_many(each, codec="fp32", timeout_s=WAIT_S).wait(WAIT_S)
        found = client.pull_many(
            [(identity, keys, None) for identity in range(1, 301)], codec="fp32", timeout_s=WAIT_S
        ).wait(WAIT_S)
        for identity, rows in enumerate(found, 1):
            assert (rows == -identity).all()
        client.close()
    finally:
        server.stop()
