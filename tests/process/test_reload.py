"""Servers that die with the only copy of their rows: those go back to the last checkpoint, and that is said.

Gradients of -1 under SGD(lr=1) make counters: a key's row is the number of pushes to it that took effect.
"""

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until

import shoal
from shoal import _core
from shoal.checkpoint.reload import reload
from shoal.store.control import Address, ControlClient

pytestmark = pytest.mark.process
ENDLESS = str(Path(__file__).with_name("endless_script.py"))
SAMPLES, BATCH = 256, 8  # of that script
KEYS = np.arange(64)
SHARD_OF = dict(zip(KEYS.tolist(), _core.protocol.key_shards(KEYS, 64).tolist(), strict=True))


class Pusher(threading.Thread):
    """Pushes one to one key after the other, each when the one before is acknowledged."""

    def __init__(self, client: shoal.Client) -> None:
        super().__init__()
        self.table = client.table("counters", dim=1, optimizer=shoal.optim.SGD(lr=1.0))
        self.acked: Counter[int] = Counter()
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.is_set():
            for key in KEYS.tolist():
                self.table.push([key], np.full((1, 1), -1.0, np.float32))
                self.acked[key] += 1

    def pushes_on(self) -> None:
        goal = self.acked.total() + 3 * len(KEYS)
        wait_until(lambda: self.acked.total() >= goal or not self.is_alive())
        assert self.is_alive()


def test_lost_shards_go_back_to_the_checkpoint_and_say_which_versions_went(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with (
        shoal.LocalCluster(servers=2) as cluster,
        cluster.connect(timeout=DEADLINE_S) as client,
        closing(ControlClient(Address.parse(cluster.address), cluster.token)) as control,
    ):
        pusher = Pusher(client)
        pusher.start()
        pusher.pushes_on()
        name = client.save(url)
        (tmp_path / "000009-a").mkdir()  # its saving was broken off
        pusher.pushes_on()
        os.kill(cluster.servers[1].pid, signal.SIGKILL)
        lost_shards = cluster.shards_of({1})
        assert cluster.add_server().index == 2
        found, [passed_over] = reload(control, url, [1], together=False)
        assert found.name == name
        assert "000009-a is not complete" in passed_over
        pusher.pushes_on()
        pusher.enough.set()
        pusher.join(DEADLINE_S)
        hit = {SHARD_OF[key] for key in KEYS.tolist()} & lost_shards
        wait_until(lambda: len(cluster.status().lost) == len(hit))
        lost = {one.shard: one.last - one.version for one in cluster.status().lost}
        assert lost.keys() == hit
        assert min(lost.values()) > 0
        missing: Counter[int] = Counter()
        for key, row in zip(KEYS.tolist(), pusher.table.pull(KEYS)[:, 0], strict=True):
            missing[SHARD_OF[key]] += pusher.acked[key] - int(row)
        assert {shard: n for shard, n in missing.items() if n} == lost
        assert [server.state for server in cluster.status().servers] == ["up", "evicted", "up"]
        # Rows of both kinds are in the next one.
        with shoal.connect("memory://") as copy:
            copy.load(f"{url}/{client.save(url)}")
            np.testing.assert_array_equal(copy.table("counters").pull(KEYS), pusher.table.pull(KEYS))


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def events(jobs: Jobs) -> str:
    return "\n".join(event["text"] for event in jobs.record()["events"])


def trains_on(out: Path) -> None:
    """Wait for two more passes."""
    last = max((int(path.name[5:]) for path in out.glob("pass-*")), default=0)
    wait_until((out / f"pass-{last + 2}").exists)


def job_that_loses(servers: Sequence[int], jobs: Jobs, out: Path, word: str) -> tuple[int, np.ndarray]:
    """The passes that it made and its rows; of two servers these are killed, each after two checkpoints."""
    url = out / "checkpoints"
    options = ["--servers", "2", "--sync", word, "--checkpoint", str(url), "--every", "0.3s"]

    def saved() -> int:
        return max((int(path.parent.name[:6]) for path in url.glob("*/manifest.json")), default=0)

    with jobs.started(*options, ENDLESS, str(out), "2") as process:
        for number, server in enumerate(servers, 1):
            trains_on(out)
            goal = saved() + 2
            wait_until(lambda goal=goal: saved() >= goal)
            os.kill(jobs.record()["servers"][server]["pid"], signal.SIGKILL)
            wait_until(
                lambda number=number: (
                    events(jobs).count(" back at checkpoint ") == number or process.poll() is not None
                )
            )
        trains_on(out)
        if 1 in servers:
            wait_until(lambda: "lost with a server" in events(jobs))
        (out / "stop").touch()
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
        assert "Lost(" not in "".join(output)
    assert max(map(len, events(jobs).splitlines())) < 300
    found = json.loads((out / "0.json").read_text())
    return found["passes"], np.array(found["rows"])


# Of the words with rounds one job that sees both; what each alone leaves is counted in soaks.
@pytest.mark.soak
def test_a_job_outlives_its_servers(jobs: Jobs, tmp_path: Path) -> None:
    passes, rows = job_that_loses((1, 0), jobs, tmp_path, "bsp")
    assert rows.max() <= (passes + 1) / BATCH
    text = events(jobs)
    alone = text.index("with the only copy of 32 shards; they go back to the last checkpoint, and server 2")
    together = text.index("all shards and workers go back to the last checkpoint, and server 3")
    assert 0 <= alone < together


@pytest.mark.soak
@pytest.mark.parametrize("word", ["bsp", "asp", "quorum:0.5", "average:2"])
def test_a_job_goes_on_when_a_server_without_a_copy_dies(jobs: Jobs, tmp_path: Path, word: str) -> None:
    passes, rows = job_that_loses((1,), jobs, tmp_path, word)
    shards = _core.protocol.key_shards(np.arange(SAMPLES), 64)
    if word != "quorum:0.5":  # where a sample weighs by who else was in its round
        assert (rows[shards < 32] == passes / BATCH).all()  # those of server 0 never were elsewhere
        assert (rows[shards >= 32] <= passes / BATCH).all()
    assert re.search(r"lost with a server: \d+ updates of \d+ shards \(3\d", events(jobs))
    assert "with the only copy of 32 shards; they go back to the last checkpoint" in events(jobs)


@pytest.mark.soak
@pytest.mark.parametrize("word", ["bsp", "asp"])
def test_a_job_goes_back_when_the_server_of_its_ledger_dies(jobs: Jobs, tmp_path: Path, word: str) -> None:
    passes, rows = job_that_loses((0,), jobs, tmp_path, word)
    # Exactly once with respect to the checkpoint, in its middle of a pass, too.
    assert rows.min() == rows.max() == passes / BATCH
    text = events(jobs)
    assert "all shards and workers go back to the last checkpoint" in text
    assert re.search(r"their clocks were at \d+, \d+", text)
    assert re.search(r"all shards are back at checkpoint .*clocks at \d+, \d+", text)


@pytest.mark.soak
def test_before_the_first_checkpoint_the_job_ends_and_says_so(jobs: Jobs, tmp_path: Path) -> None:
    options = ["--servers", "2", "--checkpoint", str(tmp_path / "none"), "--every", "1h"]
    with jobs.started(*options, ENDLESS, str(tmp_path)) as process:
        trains_on(tmp_path)
        os.kill(jobs.record()["servers"][1]["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "no checkpoint could be gone back to: there is no checkpoint at" in errors
    assert "has ended, and its rows are gone" in errors
