"""How both ends of a control connection prove that they have the token, without sending it."""

from __future__ import annotations

import hashlib
import hmac

from shoal.errors import Refused

NONCE_BYTES = 32


def prove(token: str, side: str, client_nonce: bytes, coordinator_nonce: bytes) -> bytes:
    """The proof that `side` ("client" or "coordinator") has the token."""
    if len(client_nonce) != NONCE_BYTES or len(coordinator_nonce) != NONCE_BYTES:
        raise Refused(f"a nonce must be {NONCE_BYTES} bytes")
    text = b"shoal control " + side.encode() + b"\0" + client_nonce + coordinator_nonce
    return hmac.new(token.encode(), text, hashlib.sha256).digest()
