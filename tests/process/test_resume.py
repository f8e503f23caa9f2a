"""A job that is killed and goes on from a checkpoint ends with the bits of one that was let alone."""

import os
import signal
from pathlib import Path

import pytest
from tests.process.run_jobs import Jobs, all_end, wait_until

from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.place import Place

pytestmark = pytest.mark.process
SCRIPT = str(Path(__file__).with_name("dropout_script.py"))
EPOCHS = "6"


def steps(url: Path) -> int:
    """Of the newest checkpoint that is whole."""
    if not list(url.glob("*/manifest.json")):
        return 0
    return max(manifest_.latest(Place(str(url))).clocks, default=0)


@pytest.mark.soak
@pytest.mark.parametrize("sync", ["allreduce", "bsp"])
def test_a_killed_job_ends_with_the_same_bits(tmp_path: Path, sync: str) -> None:
    url, let_alone, killed = tmp_path / "ckpt", Jobs(tmp_path / "a"), Jobs(tmp_path / "b")
    saves = ["--sync", sync, "--checkpoint", str(url), "--every", "0.3s"]
    with (
        let_alone.started("--sync", sync, SCRIPT, str(tmp_path / "whole"), EPOCHS, "0") as whole,
        killed.started(*saves, SCRIPT, str(tmp_path / "again"), EPOCHS, "0.05") as process,
    ):
        wait_until(lambda: steps(url) > 0)
        pids = killed.pids()
        assert process.poll() is None
        os.kill(pids[0], signal.SIGKILL)
        process.wait()
        all_end(pids)
        assert (whole.wait(), (tmp_path / "again").exists()) == (0, False)
    at = steps(url)
    assert 0 < at < 60
    shown = killed.shoal("ckpt", "show", str(url)).stdout
    assert f"state of worker 1: of step {at}, " in shown
    done = killed.shoal("run", "--name", "again", *saves, SCRIPT, str(tmp_path / "again"), EPOCHS, "0")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in "01":
        assert (tmp_path / "again" / rank).read_text() == (tmp_path / "whole" / rank).read_text()
    last = manifest_.latest(Place(str(url)))  # made behind the end, of what workers left
    assert [(state.clock, state.why) for state in last.workers] == [(60, ""), (60, "")]
