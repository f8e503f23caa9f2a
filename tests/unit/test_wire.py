"""The frame format, byte by byte: what is written here may only change together with the wire version."""

import struct

import numpy as np
import pytest

from shoal import _core

protocol = _core.protocol
HEADER_BYTES, PART_BYTES, CHECKSUM_AT = 128, 64, 124
# magic version kind flags namespace | client incarnation term | request seq low step round body | cut parts
HEADER = struct.Struct("<IHHIIQIIQQQQQQII")
# shard codec mode table term count lr samples version | keys values positions end | segments bytes
PART = struct.Struct("<HBBIIIfIQIIIIHHI")


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.fixture
def client() -> object:
    client = protocol.Client(0x1122334455667788, 9, 1, [0, 0])
    spec = _core.TableSpec()
    spec.id, spec.name, spec.dim = 5, "t", 3
    spec.optimizer, spec.init = _core.OptimizerSpec("sgd"), _core.InitSpec("zeros")
    client.declare(spec)
    return client


def pushed(client: object) -> bytes:
    client.push(5, np.array([1, 2, 1], np.int64), np.ones((3, 3), np.float32))
    return client.outgoing(0)[0]


def test_a_greeting(client) -> None:
    frame = client.hello()
    assert frame[:8].hex() == "484f414c02000100"
    assert HEADER.unpack_from(frame)[5:7] == (0x1122334455667788, 9)
    assert frame[HEADER_BYTES:] == bytes(32)


def test_a_push(client) -> None:
    frame = pushed(client)
    fields = HEADER.unpack_from(frame)
    assert fields[:3] == (0x4C414F48, 2, 12)
    assert fields[8:11] == (1, 1, 1)  # request, seq, low
    parts = [PART.unpack_from(frame, HEADER_BYTES + i * PART_BYTES) for i in range(fields[-1])]
    assert len(frame) == HEADER_BYTES + PART_BYTES * len(parts) + fields[13]
    body = frame[HEADER_BYTES + PART_BYTES * len(parts) :]
    sums = {}
    for _, _, _, table, term, count, lr, _, _, keys_at, values_at, *_ in parts:
        assert (table, term) == (5, 1)
        assert np.isnan(lr)
        keys = np.frombuffer(body, np.int64, count, 4 * keys_at)
        rows = np.frombuffer(body, np.float32, 3 * count, 4 * values_at).reshape(-1, 3)
        sums |= dict(zip(keys.tolist(), rows.tolist(), strict=True))
    assert sums == {1: [2.0] * 3, 2: [1.0] * 3}


def test_the_checksum_covers_header_and_parts(client) -> None:
    frame = pushed(client)
    head = HEADER_BYTES + PART_BYTES * HEADER.unpack_from(frame)[-1]
    blank = frame[:CHECKSUM_AT] + bytes(4) + frame[HEADER_BYTES:head]
    assert crc32c(blank) == int.from_bytes(frame[CHECKSUM_AT:HEADER_BYTES], "little")


@pytest.mark.parametrize("at", [0, 4, 6, 20, 60, 100, CHECKSUM_AT])
def test_a_changed_greeting_is_refused(client, at: int) -> None:
    session = protocol.Session(protocol.Server(2, b"token"))
    frame = bytearray(client.hello())
    frame[at] ^= 0x10
    replies, is_open = session.feed(bytes(frame))
    assert not is_open
    assert replies[0][6] == 5  # refuse


def test_requests_before_the_proof_are_refused(client) -> None:
    server = protocol.Server(2, b"token")
    replies, is_open = protocol.Session(server).feed(pushed(client))
    assert not is_open
    assert replies[0][6] == 5
    assert server.counters()["refused"] == 1
