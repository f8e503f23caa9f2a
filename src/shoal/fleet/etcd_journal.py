"""The journal of several coordinators, in etcd: whoever holds the leader's key writes it, and nobody else.

    /shoal/CLUSTER/leader       the leader's address, bound to a lease that it renews
    /shoal/CLUSTER/journal/...  one key for each decision in force

Each write is a transaction that compares the revision at which the leader's key was made: a leader that was
deposed, and has not noticed, can write nothing. Requests go to any member of etcd that answers; one whose
outcome is not known may be repeated, since it would write the same.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from etcd3gw.lease import Lease

from shoal.errors import BadInput, Unavailable
from shoal.fleet.decisions import Decision, decode, encode
from shoal.fleet.journal import JournalLost

# How long a leader that is gone keeps others out. Long enough for etcd to choose a leader of its own.
LEADER_S = 5
_REQUEST_S = 1.5
_PAUSE_S = 0.1
_TAKE_OVER_S = 5.0
_PORT = 2379
# etcd takes 128 operations in a transaction, and 1.5 MB.
_DECISIONS_MAX = 100
_PAGE = 500
_SEQ_BYTES = 8

_T = TypeVar("_T")


class Etcd:
    """An etcd by the URLs of its members, for one thread."""

    def __init__(self, urls: str) -> None:
        self.urls = urls
        self._clients = [_client(url) for url in urls.split(",")]

    def ask(self, question: Callable[[Etcd3Client], _T], deadline: float) -> _T:
        """The answer of the first member that has one; at least one is asked. Raises Unavailable."""
        while True:
            client = self._clients[0]
            try:
                return question(client)
            except (Etcd3Exception, OSError, ValueError) as error:
                self._clients = [*self._clients[1:], client]
                if time.monotonic() + _PAUSE_S >= deadline:
                    why = getattr(error, "detail_text", None) or str(error) or type(error).__name__
                    raise Unavailable(f"no etcd answers at {self.urls}: {why}") from None
            time.sleep(_PAUSE_S)

    def transaction(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The response to a transaction in etcd's JSON; `text` makes what is in it."""
        return self.ask(lambda client: dict(client.transaction(body)), deadline)


def _client(url: str) -> Etcd3Client:
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.username:
        raise BadInput(
            f"etcd is {url!r}; allowed: 'http://host:{_PORT}' or https, of several members with commas"
        )
    return Etcd3Client(host, port, parts.scheme, timeout=_REQUEST_S, api_path="/v3/")


def check_etcd(urls: str) -> None:
    """Raise BadInput unless an etcd answers there, with a majority of its members."""
    etcd = Etcd(urls)
    try:
        etcd.ask(lambda client: client.get("/shoal"), time.monotonic() + _REQUEST_S)
    except Unavailable as error:
        raise BadInput(f"{error}; is it running, and are most of its members?") from None


def text(value: str | bytes) -> str:
    """As etcd's JSON has keys and values."""
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


class EtcdJournal:
    """The journal of `cluster` for one reign: from winning the leader's key until the lease ends."""

    def __init__(self, etcd: Etcd, cluster: str, lease: int, fence: int, until: float) -> None:
        self._etcd = etcd
        self._prefix = f"/shoal/{cluster}/journal/"
        self._fence = {
            "key": text(_leader_key(cluster)),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": str(fence),
        }
        self._seq = 0
        self.lease = lease
        self.until = until  # by this clock: etcd's begins later, and so ends later

    @property
    def holds(self) -> bool:
        """Whether the lease runs."""
        return time.monotonic() < self.until

    def append(self, decisions: Sequence[Decision]) -> None:
        """Make the decisions durable, a hundred at a time."""
        for begin in range(0, len(decisions), _DECISIONS_MAX):
            values = {}  # etcd takes a key once in a transaction: the last one counts
            for decision in decisions[begin : begin + _DECISIONS_MAX]:
                self._seq += 1
                value = self._seq.to_bytes(_SEQ_BYTES, "big") + encode(decision)
                values[text(self._prefix + decision.key)] = text(value)
            puts = [{"request_put": {"key": key, "value": value}} for key, value in values.items()]
            try:
                body = {"compare": [self._fence], "success": puts, "failure": []}
                done = self._etcd.transaction(body, self.until)
            except Unavailable as error:
                raise JournalLost(str(error)) from None
            if not done.get("succeeded", False):
                raise JournalLost("another coordinator leads")

    def __iter__(self) -> Iterator[Decision]:
        """All decisions that are in force, in the order in which they were made."""
        found: list[bytes] = []
        after = self._prefix
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        while True:
            page = self._etcd.ask(partial(_page, key=after, end=end), self.until)
            found += [value for value, _ in page]
            if len(page) < _PAGE:
                break
            after = page[-1][1]["key"].decode() + "\0"
        for value in sorted(found):
            self._seq = int.from_bytes(value[:_SEQ_BYTES], "big")
            try:
                yield decode(value[_SEQ_BYTES:])
            except msgspec.MsgspecError as error:
                raise BadInput(f"the journal {self._prefix} in etcd is damaged: {error}") from None

    def renew(self, etcd: Etcd, deadline: float) -> None:
        """Hold it for longer; by a thread of its own, which has its own `etcd`. Raises JournalLost."""
        asked = time.monotonic()
        try:
            seconds = etcd.ask(lambda client: Lease(self.lease, client).refresh(), deadline)
        except Unavailable as error:
            raise JournalLost(str(error)) from None
        if seconds <= 0:
            raise JournalLost("the lease in etcd has ended")
        self.until = asked + LEADER_S

    def close(self) -> None:
        """Hold it no more."""
        self.until = 0.0


def _page(client: Etcd3Client, *, key: str, end: str) -> list[Any]:
    order = {"sort_order": "ascend", "sort_target": "key"}
    return list(client.get(key, metadata=True, range_end=end, limit=_PAGE, **order))


def take_over(etcd: Etcd, cluster: str, address: str) -> EtcdJournal | str:
    """The journal, if nobody had it; else the address of the one that leads. Raises Unavailable."""
    end = time.monotonic() + _TAKE_OVER_S
    key = _leader_key(cluster)
    if found := _holder(etcd, key, end):
        leader, lease, _ = found
        if leader != address:
            return leader
        revoke(etcd, lease)  # an earlier life of this one, which is over: this one has its socket
    began = time.monotonic()
    granted = etcd.ask(lambda client: client.lease(LEADER_S), end)
    put = {"key": text(key), "value": text(address), "lease": str(granted.id)}
    nobody = {"key": text(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    etcd.transaction({"compare": [nobody], "success": [{"request_put": put}], "failure": []}, end)
    # Whatever was answered to that, and if the answer was lost: it is ours if our lease is on it.
    if not (found := _holder(etcd, key, end)):
        return ""
    leader, lease, made = found
    if lease != granted.id:
        return leader
    return EtcdJournal(Etcd(etcd.urls), cluster, lease, made, began + LEADER_S)


def revoke(etcd: Etcd, lease: int) -> None:
    """End a lease, if that can be done at once: it ends by itself."""
    with suppress(Unavailable):
        etcd.ask(lambda client: Lease(lease, client).revoke(), time.monotonic())


def forget(etcd: Etcd, cluster: str) -> None:
    """Remove all that is known of a cluster that is over, if that can be done soon: nobody will read it."""
    with suppress(Unavailable):
        end = time.monotonic() + _TAKE_OVER_S
        etcd.ask(lambda client: client.delete_prefix(f"/shoal/{cluster}/"), end)


def _holder(etcd: Etcd, key: str, end: float) -> tuple[str, int, int] | None:
    """Whose the leader's key is: address, lease, and the revision at which it was made."""
    for value, about in etcd.ask(lambda client: client.get(key, metadata=True), end):
        return value.decode(), int(about["lease"]), int(about["create_revision"])
    return None


def _leader_key(cluster: str) -> str:
    return f"/shoal/{cluster}/leader"
