"""What is done about a worker that is not well, as far as it is a file: what it counts for from now on."""

from __future__ import annotations

from pathlib import Path

from shoal.launch.health import POLICIES, Trouble
from shoal.train.progress import read_trust, write_trust

_COUNTS = {0.0: ": it counts nothing", 0.1: ": it counts a tenth"}


def treat(job: Path, trouble: Trouble, policy: str) -> str:
    """Let the worker count for what the policy says, and say what is done about it.

    That never grows in a life of a worker: another trouble that is only reported gives nothing back.
    """
    rank, kind = trouble.rank, trouble.kind
    if kind == "nan":  # it abstains from such steps by itself, and all else that it sends counts as before
        kind, did = "not finite", ""
    else:
        trust = min(read_trust(job, rank), POLICIES[policy])
        write_trust(job, rank, trust)
        did = _COUNTS.get(trust, "")
    if policy == "replace":
        did = " and is replaced"
    return f"worker {rank} is {kind}{did} ({trouble.text})"
