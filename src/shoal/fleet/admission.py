"""Which place in the cluster a server gets that registers."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config import NAME_BYTES_MAX, CoordinatorOptions
from shoal.errors import BadInput, Fenced, Refused
from shoal.fleet.decisions import ServerGone, ServerPlaced
from shoal.store.messages import RegisterServer

__all__ = ["index_for", "missing"]


def missing(options: CoordinatorOptions, servers: Mapping[int, ServerPlaced]) -> tuple[int, ...]:
    """Places of servers that the cluster waits for."""
    return tuple(index for index in range(options.servers) if index not in servers)


def index_for(
    request: RegisterServer,
    options: CoordinatorOptions,
    servers: Mapping[int, ServerPlaced],
    gone: Mapping[int, ServerGone],
) -> int:
    """The server's place, or a refusal that says why there is none."""
    if request.shards != options.shards:
        raise Refused(f"this cluster has {options.shards} shards, the server {request.shards}")
    texts = (request.identity, request.host, request.unix_path)
    if any(len(text.encode()) > NAME_BYTES_MAX for text in texts) or not 0 < request.port < 65536:
        raise BadInput(f"a server registers with a port above 0, and texts of up to {NAME_BYTES_MAX} bytes")
    for server in servers.values():
        if server.identity == request.identity:
            if server.index in gone:
                raise Fenced(f"server {server.index} was given up: {gone[server.index].why}")
            return server.index
    free = missing(options, servers)
    if request.index is None:
        return free[0] if free else max(servers) + 1
    if request.index in free:
        return request.index
    if request.index in servers:
        other = servers[request.index]
        raise Refused(
            f"index {request.index} belongs to the server of pid {other.pid} at "
            f"{other.host}:{other.port}; join without an index to be a new server"
        )
    return max(servers) + 1
