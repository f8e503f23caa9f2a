"""What the processes of a cluster have in common: how they start, and how they say that they cannot."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.config import TOKEN_SOURCES, ServerOptions, read_environment
from shoal.errors import BadInput, Refused, ShoalError
from shoal.fleet.token import check_bind

# How the one line begins by which a process says why it ends.
ERROR = "error: "


def run_process(role: str, host: str, token_file: Path | None, serve: Callable[[str], int]) -> int:
    """The exit code of `serve(token)`; if that cannot start, one sentence on stderr, and 1."""
    try:
        environment = read_environment()
        logging.basicConfig(level=environment.log, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        token = environment.find_token(file=token_file)
        check_bind(host, token)
        if token is None:
            raise Refused(f"a {role} needs a token. {TOKEN_SOURCES}")
        return serve(token)
    except (ShoalError, OSError) as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return 1


def listen(options: ServerOptions) -> socket.socket:
    """A socket that listens there; BadInput if that cannot be."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BadInput(
                f"port {options.port} on {options.host} is in use; choose another, or port=0 for a free one"
            ) from None
        raise BadInput(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
