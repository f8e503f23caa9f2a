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
CASES = [("bsp", 1), ("allreduce", 1), ("allreduce", 2)]


def newest(url: Path) -> str:
    return max((path.parent.name for path in url.glob("*/manifest.json")), default="")


def steps(url: Path) -> int:
    """Of the newest checkpoint that is whole."""
    if not list(url.glob("*/manifest.json")):
        return 0
    return max(manifest_.latest(Place(str(url))).clocks, default=0)


@pytest.mark.parametrize(
    ("sync", "optimizers"),
    [("bsp", 2), *(pytest.param(*case, marks=pytest.mark.soak) for case in CASES)],
)
def test_a_killed_job_ends_with_the_same_bits(tmp_path: Path, sync: str, optimizers: int) -> None:
    url, let_alone, killed = tmp_path / "ckpt", Jobs(tmp_path / "a"), Jobs(tmp_path / "b")
    for jobs in (let_alone, killed):
        jobs.environment["OPTIMIZERS"] = str(optimizers)
    saves = ["--sync", sync, "--checkpoint", str(url), "--every", "0.3s"]
    with (
        let_alone.started("--sync", sync, SCRIPT, str(tmp_path / "whole"), EPOCHS, "0") as whole,
        killed.started(*saves, SCRIPT, str(tmp_path / "again"), EPOCHS, "0.05") as process,
    ):
        wait_until(lambda: steps(url) > 2)  # which show that schedules move with them
        pids = killed.pids()
        assert process.poll() is None
        os.kill(pids[0], signal.SIGKILL)
        process.wait()
        all_end(pids)
        assert (whole.wait(), (tmp_path / "again").exists()) == (0, False)
    at = steps(url)
    assert 0 < at < 60 * optimizers
    assert at % optimizers == 0, "within a batch"
    shown = killed.shoal("ckpt", "show", str(url)).stdout
    assert f"state of worker 1: of step {at}, " in shown
    done = killed.shoal("run", "--name", "again", *saves, SCRIPT, str(tmp_path / "again"), EPOCHS, "0")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in "01":
        assert (tmp_path / "again" / rank).read_text() == (tmp_path / "whole" / rank).read_text()
    last = manifest_.latest(Place(str(url)))  # made behind the end, of what workers left
    assert [(state.clock, state.why) for state in last.workers] == [(60 * optimizers, "")] * 2


@pytest.mark.soak
@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_one_that_is_stopped_while_it_loads_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, sync: str
) -> None:
    """Checkpoints are made meanwhile, and no state of a worker may be missing in them."""
    url, let_alone, stopped, waits = (
        tmp_path / "ckpt",
        Jobs(tmp_path / "a"),
        Jobs(tmp_path / "b"),
        tmp_path / "w",
    )
    saves = ["--sync", sync, "--checkpoint", str(url), "--every", "0.3s"]
    script = [SCRIPT, str(tmp_path / "again"), EPOCHS]
    with (
        let_alone.started("--sync", sync, SCRIPT, str(tmp_path / "whole"), EPOCHS, "0") as whole,
        stopped.started(*saves, *script, "0.05") as process,
    ):
        wait_until(lambda: steps(url) > 2, process)
        process.send_signal(signal.SIGINT)
        assert (process.wait(), whole.wait()) == (130, 0)
    at, has = steps(url), [(state.clock, state.why) for state in manifest_.latest(Place(str(url))).workers]
    assert has == [(at, ""), (at, "")]
    for where in ("join", "model", "batch"):
        waits.write_text(where)
        for told in tmp_path.glob("w.*"):
            told.unlink()
        jobs = Jobs(tmp_path / where)
        with jobs.started(*saves, *script, "0", str(waits)) as process:
            wait_until(lambda: len(list(tmp_path.glob("w.*"))) == 2, process)
            before = newest(url)
            wait_until(lambda before=before: newest(url) > before, process)
            again = newest(url)
            wait_until(lambda again=again: newest(url) > again, process)  # begun while all of them waited
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate()
            assert process.returncode == 130
            assert "has no state" not in said
        found = manifest_.latest(Place(str(url))).workers
        assert [(state.clock, state.why) for state in found] == [(at, ""), (at, "")]
    waits.unlink()
    done = stopped.shoal("run", "--name", "again", *saves, *script, "0")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in "01":
        assert (tmp_path / "again" / rank).read_text() == (tmp_path / "whole" / rank).read_text()
