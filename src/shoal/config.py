"""Options as frozen values, and the one function that reads the environment.

Order: default < environment < explicit argument. The environment holds at most ten variables; they are
the fields of `Environment`. (What `shoal run` hands to its workers is no setting of people's, and read by
`shoal.train.environment`.) Options say behaviour first and speed second; every field has its unit in
its name, a default and the reason to change it.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from shoal.errors import BadInput
from shoal.types import Lane, Reads

SHARDS = 64
SHARDS_MAX = 4096
# Of tables, tensors, clients and hosts; kNameMax of core/store/table_spec.cc.
NAME_BYTES_MAX = 512
TOKEN_CHARS_MAX = 4096
BYTES_MAX = 1 << 48
TOKEN_SOURCES = (
    "It is looked for in token= (--token-file of commands), then in SHOAL_TOKEN, then in the file that "
    "SHOAL_TOKEN_FILE names; `shoal up` prints the file of its cluster"
)


def check_timeout(seconds: float) -> float:
    """`seconds` as a float if it can be a deadline: finite and above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise BadInput(f"timeout is {seconds!r}; it must be a finite number of seconds above 0")
    return float(seconds)


def check_count(name: str, value: Any, low: int, high: int, why: str = "") -> int:
    """`value` if it is a whole number from `low` to `high`; `why` is added to the message otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise BadInput(f"{name} is {value!r}; allowed: a whole number from {low} to {high}{why}")
    return int(value)


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "worker"), counted(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def check_duration(name: str, text: str) -> float:
    """Seconds of a text as 30s, 5m or 1h."""
    number, unit = text[:-1], {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    if unit is None or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
        raise BadInput(f"{name} is {text!r}; allowed: a number above 0 and s, m or h, as in 30s or 5m")
    return float(number) * unit


def check_name(what: str, name: str) -> str:
    """`name` if it can name a table, a tensor or a client."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        seen = name[:64] if isinstance(name, str) else name
        raise BadInput(f"{what} is {seen!r}; allowed: printable text of 1 to {NAME_BYTES_MAX} bytes")
    return name


def check_choice(name: str, value: Any, choices: Any) -> Any:
    """`value` if it is one of the words of `choices`, a Literal."""
    allowed = get_args(choices)
    if value not in allowed:
        raise BadInput(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    return value


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How one client talks to the servers.

    >>> ClientOptions(timeout_s=5).lane
    'auto'
    """

    # Deadline of every call that is not given its own. Raise it for very large pulls on slow networks.
    timeout_s: float = 30.0
    # How bytes travel: auto takes shm, then unix, then tcp, whichever works. Fix it to measure one.
    lane: Lane = "auto"
    # Speed: memory that may be shared with the servers of this host, in all. Lower it in small containers.
    shm_bytes_max: int = 1 << 30
    # Of copies: strong pulls go to the server that acknowledges; any spreads them over all that have a copy.
    # What was acknowledged is on all of them (with weak replication perhaps not yet); they may also show
    # what is not acknowledged yet, and what a server's death takes back.
    reads: Reads = "strong"

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        check_choice("lane", self.lane, Lane)
        check_choice("reads", self.reads, Reads)
        check_count("shm_bytes_max", self.shm_bytes_max, 0, BYTES_MAX)


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """What a cluster is, and the limits of its control connections."""

    # Servers that must register before the first client may join. Fixed for the life of the cluster.
    servers: int = 1
    # Logical parts of the store. Fixed for the life of the cluster; 64 serves up to 64 servers.
    shards: int = SHARDS
    # Further servers that hold a copy of each shard. Fixed for the life of the cluster.
    replicas: int = 0
    # Acknowledge a push before the copies have it: faster, and the last of them are lost with a server.
    weak: bool = False
    # A server that has not been heard of for so long is given up, where copies of its shards exist.
    lease_s: float = 2.5
    # A connection that has not proved the token by then is closed.
    handshake_s: float = 5.0
    # Control connections at one time; more are refused.
    connections_max: int = 4096

    def __post_init__(self) -> None:
        check_count("shards", self.shards, 1, SHARDS_MAX)
        why = ", the number of shards, since a server without a shard has nothing to do"
        check_count("servers", self.servers, 1, self.shards, why)
        below = ", one less than the number of servers, since a copy needs a server of its own"
        check_count("replicas", self.replicas, 0, self.servers - 1, below)
        check_timeout(self.lease_s)
        check_timeout(self.handshake_s)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where one server listens and what it may use."""

    # Address to listen on. Anything but loopback is reachable from outside and needs an explicit token.
    host: str = "127.0.0.1"
    # 0 lets the system choose.
    port: int = 0
    # Speed: threads that serve requests; 0 chooses by the number of cores.
    threads: int = 0
    # The largest message taken from a client; a larger one is refused and its connection closed.
    frame_bytes_max: int = 1 << 30

    def __post_init__(self) -> None:
        if not isinstance(self.host, str):
            raise BadInput(f"the address to listen on is {self.host!r}; allowed: text, as '127.0.0.1'")
        check_count("port", self.port, 0, 65535, "; 0 is any free one")
        check_count("threads", self.threads, 0, 1024, "; 0 is by the number of cores")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says; None = the variable is not set."""

    address: str | None = None  # SHOAL_ADDRESS: where `shoal.connect()` and `shoal status` go
    token: str | None = field(default=None, repr=False)  # SHOAL_TOKEN: the cluster's token itself
    token_file: Path | None = None  # SHOAL_TOKEN_FILE: a file that holds it, mode 0600
    timeout_s: float | None = None  # SHOAL_TIMEOUT_S: default deadline of a client's calls
    lane: Lane | None = None  # SHOAL_LANE: auto, shm, unix or tcp
    reads: Reads | None = None  # SHOAL_READS: strong or any
    log: str = "WARNING"  # SHOAL_LOG: level of what coordinator and servers log to stderr

    def find_token(self, token: str | None = None, file: Path | None = None) -> str | None:
        """The explicit token or that in `file` if given, else that of SHOAL_TOKEN or SHOAL_TOKEN_FILE."""
        if token is not None:
            return check_token(token)
        if file is not None:
            return read_token_file(file)
        if self.token is not None:
            return check_token(self.token)
        return None if self.token_file is None else read_token_file(self.token_file)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The settings in `environ` (default: those of this process). An empty variable counts as not set.

    >>> read_environment({"SHOAL_ADDRESS": "shoal://10.0.0.7:7700"}).address
    'shoal://10.0.0.7:7700'
    """
    source = os.environ if environ is None else environ
    token_file = source.get("SHOAL_TOKEN_FILE")
    timeout = source.get("SHOAL_TIMEOUT_S")
    lane = source.get("SHOAL_LANE")
    reads = source.get("SHOAL_READS")
    log = source.get("SHOAL_LOG") or "WARNING"
    if log.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise BadInput(f"SHOAL_LOG is {log!r}; allowed: DEBUG, INFO, WARNING, ERROR")
    try:
        timeout_s = check_timeout(float(timeout)) if timeout else None
    except ValueError:
        raise BadInput(f"SHOAL_TIMEOUT_S is {timeout!r}; it must be a number of seconds above 0") from None
    return Environment(
        address=source.get("SHOAL_ADDRESS") or None,
        token=source.get("SHOAL_TOKEN") or None,
        token_file=Path(token_file) if token_file else None,
        timeout_s=timeout_s,
        lane=check_choice("lane", lane, Lane) if lane else None,
        reads=check_choice("reads", reads, Reads) if reads else None,
        log=log.upper(),
    )


def check_token(token: str) -> str:
    """`token` if it can be one: text that is not empty, without spaces around it."""
    if not isinstance(token, str) or not token.strip() or len(token) > TOKEN_CHARS_MAX:
        raise BadInput(f"a token is text of 1 to {TOKEN_CHARS_MAX} characters; make one with `shoal up`")
    return token.strip()


def read_token_file(path: Path) -> str:
    """The token in the file `path`."""
    try:
        with path.open(encoding="utf-8") as file:
            return check_token(file.read(TOKEN_CHARS_MAX + 1))
    except UnicodeDecodeError:
        raise BadInput(f"token file {path} is not text") from None
    except OSError as error:
        raise BadInput(
            f"cannot read the token file {path}: {error.strerror}; --token-file or SHOAL_TOKEN_FILE names "
            "the file of a cluster that runs (`shoal up` removes its own when it stops)"
        ) from None
    except BadInput as error:
        raise BadInput(f"token file {path}: {error}") from None
