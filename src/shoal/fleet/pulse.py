"""The records of a client's pulse, as core/serve/pulse.h has them: fixed sizes, little endian."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from shoal.errors import Refused

MAGIC = 0x4C504853  # larger than any length with which a control message begins
_HELLO = struct.Struct("<IQ32s")  # behind the magic
_BEAT = struct.Struct("<IIQQQ")
_ORDER = struct.Struct("<II")


class BeatKind(IntEnum):
    """What a client says."""

    ALIVE = 1
    HELD = 2
    BYE = 3


@dataclass(frozen=True)
class Hello:
    """Whose pulse it is."""

    BYTES = _HELLO.size

    incarnation: int
    client_id: int
    nonce: bytes

    @staticmethod
    def decode(data: bytes) -> Hello:
        return Hello(*_HELLO.unpack(data))


@dataclass(frozen=True)
class Beat:
    """The client is there, and has come so far. Or: it holds its pushes, as order `number` says."""

    BYTES = _BEAT.size

    kind: int
    number: int
    clock: int
    pushes: int
    pulls: int

    @staticmethod
    def decode(data: bytes) -> Beat:
        beat = Beat(*_BEAT.unpack(data))
        if beat.kind not in list(BeatKind):
            raise Refused(f"a pulse of the unknown kind {beat.kind}")
        return beat


@dataclass(frozen=True)
class PulseOrder:
    """What a client is told: hold new pushes, or go on with them."""

    hold: bool
    number: int

    def encode(self) -> bytes:
        return _ORDER.pack(1 if self.hold else 2, self.number)


def prove(token: str, side: str, hello: Hello, nonce: bytes) -> bytes:
    """The proof of `side` ("client" or "server"), as core/net/handshake.h makes it."""
    names = struct.pack("<QI", hello.client_id, hello.incarnation)
    text = f"shoal {side} v1".encode() + hello.nonce + nonce + names
    return hmac.new(token.encode(), text, hashlib.sha256).digest()
