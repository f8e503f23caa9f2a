"""Tokens and who may be reached: the rules of joining.

A token is text that all processes of a cluster share. It is proved by HMAC over both ends' nonces and
never sent (`shoal.store.messages`, and the core's handshake). Files that hold one have mode 0600.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path

from shoal.config import check_token
from shoal.errors import BadInput

PUBLIC_TOKEN_CHARS_MIN = 16


def generate() -> str:
    """A new token: 256 random bits as 43 characters that need no quoting.

    >>> len(generate())
    43
    """
    return secrets.token_urlsafe(32)


def write_token_file(path: Path, token: str) -> None:
    """Write `token` to a new file that only this user can read; an existing file is not touched."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BadInput(f"the token file {path} exists; remove it, or use the token in it") from None
    except OSError as error:
        raise BadInput(f"cannot write the token file {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(check_token(token) + "\n")


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, token: str | None) -> None:
    """Refuse to listen where others can connect unless the user chose a token, and a long one."""
    if is_loopback(host):
        return
    if token is None:
        raise BadInput(
            f"refusing to listen on {host!r} without a token: set SHOAL_TOKEN, pass a token or a token "
            f"file, or stay on 127.0.0.1"
        )
    if len(token) < PUBLIC_TOKEN_CHARS_MIN:
        raise BadInput(
            f"refusing to listen on {host!r} with a token of {len(token)} characters; "
            f"at least {PUBLIC_TOKEN_CHARS_MIN} are needed where others can connect"
        )


def reachable_host(bind: str) -> str:
    """What others must call a process that listens on `bind`."""
    if bind not in ("", "0.0.0.0", "::"):
        return bind
    family = socket.AF_INET6 if bind == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: connecting a datagram socket only asks for the route (to a test network).
            probe.connect(("2001:db8::1" if bind == "::" else "192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
