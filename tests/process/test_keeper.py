"""The process that makes a job's checkpoints dies, or cannot save: it is said, and mended if it can be."""

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until

from shoal.fleet.local import LocalCluster
from shoal.launch.saver import Saver
from shoal.store.rounds import Rounds

pytestmark = pytest.mark.process
SCRIPT = str(Path(__file__).with_name("counting_script.py"))
KEEP = b"shoal.checkpoint.keep"


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path / "state")


def keepers(url: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if KEEP in words and str(url).encode() in words:
            found.append(int(path.parent.name))
    return found


def whole(url: Path) -> set[str]:
    return {path.parent.name for path in url.glob("*/manifest.json")}


def said(jobs: Jobs, text: str) -> bool:
    return any(text in event["text"] for event in jobs.record()["events"])


def test_one_that_is_killed_is_started_again_and_saves(jobs: Jobs, tmp_path: Path) -> None:
    url = tmp_path / "checkpoints"
    options = ["--checkpoint", str(url), "--every", "0.3s"]
    with jobs.started(*options, SCRIPT, "400", "100", "0.02"):
        wait_until(lambda: bool(whole(url)) and bool(keepers(url)))
        (first,) = keepers(url)
        os.kill(first, signal.SIGKILL)
        how = f"the process that makes checkpoints (pid {first}) was killed by SIGKILL and is started again"
        wait_until(lambda: said(jobs, how))
        before = whole(url)
        wait_until(lambda: bool(whole(url) - before))
        wait_until(lambda: said(jobs, "checkpoints are made again"))
        shown = jobs.shoal("status", "job").stdout
        assert "\nlast checkpoint: 0" in shown
        assert " s ago\n" in shown
        assert jobs.record()["checkpoint"]["name"] in whole(url)
        assert jobs.shoal("stop", "job").returncode == 0


@pytest.mark.soak
def test_one_that_is_dead_at_the_end_does_not_cost_the_last_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    url = tmp_path / "checkpoints"
    enough = tmp_path / "enough"
    options = ["--sync", "asp", "--checkpoint", str(url)]
    with jobs.started(*options, SCRIPT, "64", "1000", "0.02", str(enough)) as process:
        wait_until(lambda: bool(keepers(url)))
        (first,) = keepers(url)
        os.kill(first, signal.SIGSTOP)  # so that it is asked for the last one
        enough.touch()
        wait_until(lambda: [worker["code"] for worker in jobs.record()["workers"]] == [0, 0])
        os.kill(first, signal.SIGKILL)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert len(whole(url)) == 1


@pytest.mark.soak
def test_a_save_that_fails_is_said_and_so_is_that_the_last_one_failed(jobs: Jobs, tmp_path: Path) -> None:
    url, aside = tmp_path / "checkpoints", tmp_path / "aside"
    options = ["--sync", "asp", "--checkpoint", str(url), "--every", "0.3s"]
    with jobs.started(*options, SCRIPT, "400", "1000", "0.02", str(tmp_path / "enough")) as process:
        jobs.until("job.json")
        wait_until(lambda: bool((jobs.record()["checkpoint"] or {}).get("name")))
        url.rename(aside)
        url.write_text("no directory")
        wait_until(lambda: said(jobs, "no checkpoint was made: "))
        shown = jobs.shoal("status", "job").stdout
        assert "last checkpoint: 0" in shown
        assert "; server 0: cannot write " in shown
        url.unlink()
        aside.rename(url)
        wait_until(lambda: said(jobs, "checkpoints are made again: "))
        url.rename(aside)
        url.write_text("no directory")
        (tmp_path / "enough").touch()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    *_, done, last = errors.splitlines()
    assert "job job is done: " in done
    assert "trained to the end, but no last checkpoint could be made: " in last
    assert jobs.record()["reason"] in last


def test_it_learns_that_the_model_lies_on_the_workers(tmp_path: Path) -> None:
    """Of a worker that left without its state a checkpoint is made, until that would be all of a model."""
    (tmp_path / "logs").mkdir()
    waiting: dict[int, Callable[[], None]] = {}
    with LocalCluster() as cluster:
        with cluster.connect() as client:
            rounds = Rounds(client, 0, 1)
            rounds.open(take="each", quorum=1, count=1, slack=-1)
            rounds.advance(0, weight=1.0)
            rounds.leave()
        url, hear = str(tmp_path / "checkpoints"), waiting.__setitem__
        saver = Saver(cluster, url, 0.1, tmp_path, False, watch_once=hear, say=lambda text: None)

        def until(condition: Callable[[], object]) -> None:
            end = time.monotonic() + DEADLINE_S
            while not condition():
                ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
                assert ready, saver.record
                for descriptor in ready:
                    waiting.pop(descriptor)()

        until(lambda: saver.record.name and not saver.record.problem)
        saver.needs(True)
        until(lambda: saver.record.problem)
        assert "the model lies on the workers, and none has added its state" in str(saver.record.problem)
        saver.needs(False)
        until(lambda: not saver.record.problem)
        saver.end()


def test_one_that_cannot_begin_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    cluster: Any = SimpleNamespace(address="no address", token_file=tmp_path / "token")
    waiting: dict[int, Callable[[], None]] = {}
    events: list[str] = []
    saver = Saver(
        cluster,
        str(tmp_path / "checkpoints"),
        1.0,
        tmp_path,
        False,
        watch_once=waiting.__setitem__,
        say=events.append,
    )
    end = time.monotonic() + DEADLINE_S
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
        assert ready, events
        for descriptor in ready:
            waiting.pop(descriptor)()
    assert [event.endswith("died (1) and is started again") for event in events] == [True] * 5 + [False]
    assert events[-1].endswith("died (1), again and again, and is given up: no more checkpoints are made")
    why = saver.end_with_a_last()
    assert why is not None
    assert why.endswith("died (1)")
