"""A server of a job has ended: its copies go on in its place, and another server takes new ones."""

from __future__ import annotations

from shoal.errors import Unavailable
from shoal.fleet.local import LocalCluster, ServerHandle
from shoal.launch.records import ServerRecord
from shoal.launch.verdict import Verdict

__all__ = ["replace_server", "server_records"]


def replace_server(
    cluster: LocalCluster, verdict: Verdict, index: int, pid: int, replicas: int
) -> tuple[str, ServerHandle | None]:
    """What is said of it, and the server that was started for it, as often as the job allows.

    Raises an error where the rows of the lost one are nowhere else.
    """
    if replicas == 0:
        raise Unavailable(f"server {index} has the only copy of its rows")
    cluster.evict_server(index, f"its process, pid {pid}, has ended")
    text = f"server {index} (pid {pid}) has ended; the copies of its rows go on"
    if not verdict.server_replaced():
        return text, None
    new = cluster.add_server()
    return f"{text}, and server {new.index} takes its place", new


def server_records(cluster: LocalCluster) -> tuple[ServerRecord, ...]:
    """The servers as the job's record has them."""
    return tuple(ServerRecord(index=s.index, pid=s.pid, address=s.address) for s in cluster.servers)
