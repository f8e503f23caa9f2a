"""A slow network and one that falls apart, where this machine can make one of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.soak]
ROOT = Path(__file__).parents[2]
_PROBE = (
    "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root htb && "
    "ip rule add from 10.9.0.2 blackhole && unshare -n true"
)


def _why_not() -> str:
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here"
    tried = subprocess.run(
        ["unshare", "-rn", "sh", "-c", _PROBE], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


WHY_NOT = _why_not()


@pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of its own can be made: {WHY_NOT}")
@pytest.mark.parametrize("case", ["partition", "hiccup", "slow"])
def test_nothing_is_lost_and_all_goes_on(case: str) -> None:
    command = ["unshare", "-rn", "--kill-child", sys.executable, "-m", "tests.process.network_world", case]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
