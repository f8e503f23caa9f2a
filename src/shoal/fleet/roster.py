"""Which servers there are: their places for the life of the cluster, and who is up, leaving or gone."""

from __future__ import annotations

from shoal.config import NAME_BYTES_MAX, CoordinatorOptions
from shoal.errors import BadInput, Fenced, Refused
from shoal.fleet.decisions import LEFT, Placed, ServerGone, ServerPlaced
from shoal.store import messages as m


class Roster:
    """All servers that ever registered, by index."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self._options = options
        self.servers: dict[int, ServerPlaced] = {}
        self.peers: dict[int, int] = {}  # the connections of those that are there
        self.gone: dict[int, ServerGone] = {}
        self.leaving: set[int] = set()

    @property
    def up(self) -> set[int]:
        """Those that were not given up."""
        return self.servers.keys() - self.gone.keys()

    @property
    def away(self) -> set[int]:
        """Those of them that are not connected."""
        return self.up - self.peers.keys()

    @property
    def missing(self) -> tuple[int, ...]:
        """Those that the cluster was to begin with, and that have not come."""
        return tuple(index for index in range(self._options.servers) if index not in self.servers)

    @property
    def expected(self) -> int:
        """How many the cluster was to begin with."""
        return self._options.servers

    def placement(self, placed: Placed) -> m.PlacementInfo:
        """What others are told of where shards are."""
        return m.PlacementInfo(
            version=placed.version,
            weak=self._options.weak,
            servers=self.infos(),
            terms=placed.terms,
            chains=placed.chains,
        )

    def check(self, index: int, identity: str) -> None:
        """Raise unless it is a server of this cluster; Fenced: it was one."""
        server = self.servers.get(index)
        if server is None or server.identity != identity:
            raise Refused(f"no server {index} of that identity is registered")
        if index in self.gone:
            raise Fenced(f"server {index} was given up: {self.gone[index].why}")

    def place_for(self, request: m.RegisterServer) -> ServerPlaced:
        """What that server would be, or a refusal that says why it cannot be any."""
        return ServerPlaced(
            index=self._index_for(request),
            identity=request.identity,
            pid=request.pid,
            host=request.host,
            port=request.port,
            unix_path=request.unix_path,
        )

    def _index_for(self, request: m.RegisterServer) -> int:
        if request.shards != self._options.shards:
            raise Refused(f"this cluster has {self._options.shards} shards, the server {request.shards}")
        texts = (request.identity, request.host, request.unix_path)
        if any(len(text.encode()) > NAME_BYTES_MAX for text in texts) or not 0 < request.port < 65536:
            raise BadInput(
                f"a server registers with a port above 0, and texts of up to {NAME_BYTES_MAX} bytes"
            )
        for server in self.servers.values():
            if server.identity == request.identity:
                self.check(server.index, server.identity)
                return server.index
        free = self.missing
        if request.index is None:
            return free[0] if free else max(self.servers) + 1
        if request.index in free:
            return request.index
        if request.index in self.servers:
            other = self.servers[request.index]
            raise Refused(
                f"index {request.index} belongs to the server of pid {other.pid} at "
                f"{other.host}:{other.port}; join without an index to be a new server"
            )
        return max(self.servers) + 1

    def infos(self) -> tuple[m.ServerInfo, ...]:
        """What others are told of them."""
        return tuple(
            m.ServerInfo(
                index=server.index,
                pid=server.pid,
                host=server.host,
                port=server.port,
                unix_path=server.unix_path,
                state=self._state_of(server.index),
            )
            for _, server in sorted(self.servers.items())
        )

    def _state_of(self, index: int) -> str:
        if index in self.gone:
            return "left" if self.gone[index].why == LEFT else "evicted"
        if index not in self.peers:
            return "gone"
        return "leaving" if index in self.leaving else "up"
