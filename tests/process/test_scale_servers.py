"""`shoal scale --servers` on jobs that train: shards move, and every push counts exactly once."""

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until

pytestmark = pytest.mark.process
ENDLESS = str(Path(__file__).with_name("endless_script.py"))
SAMPLES, BATCH = 256, 8  # of that script
LEFT = re.compile(r"server 2 .* has left; its rows are on the others")


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def shards(jobs: Jobs) -> list[int]:
    """What the servers that are up have, by index; those that were let go must have none."""
    found = json.loads(jobs.shoal("status", "job", "--json").stdout)
    servers = [process for process in found["processes"] if process["role"] == "server"]
    assert all(server["shards"] == 0 for server in servers if server["state"] != "up")
    assert "evicted" not in [server["state"] for server in servers]
    return [server["shards"] for server in servers if server["state"] == "up"]


def events(jobs: Jobs) -> list[str]:
    return [event["text"] for event in jobs.record()["events"]]


def trains_on(out: Path) -> None:
    """Wait for two more passes."""
    last = max((int(path.name[5:]) for path in out.glob("pass-*")), default=0)
    wait_until((out / f"pass-{last + 2}").exists)


@pytest.mark.parametrize(
    ("word", "first", "replicas", "then"),
    [
        ("asp", 1, 0, [2]),
        pytest.param("bsp", 2, 1, [3, 2], marks=pytest.mark.soak),
        pytest.param("bsp", 1, 0, [3, 2], marks=pytest.mark.soak),
        pytest.param("asp", 1, 0, [3, 2], marks=pytest.mark.soak),
        pytest.param("asp", 2, 1, [3, 2], marks=pytest.mark.soak),
    ],
)
def test_servers_come_and_go_under_a_job(
    jobs: Jobs, tmp_path: Path, word: str, first: int, replicas: int, then: list[int]
) -> None:
    sizes = ["--workers", "2", "--servers", str(first), "--replicas", str(replicas)]
    with jobs.started(*sizes, "--sync", word, ENDLESS, str(tmp_path)) as process:
        trains_on(tmp_path)
        for servers in then:
            done = jobs.shoal("scale", "job", "--servers", str(servers))
            assert done.stdout.startswith(f"job job goes on with {servers} servers"), done.stderr
            wait_until(lambda n=servers: len(now := shards(jobs)) == n and max(now) - min(now) <= 1)
            trains_on(tmp_path)
        wait_until(lambda: max(then) == then[-1] or any(map(LEFT.fullmatch, events(jobs))))
        (tmp_path / "stop").touch()
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    passes = found[0]["passes"]
    expected = {"rows": [passes / BATCH] * SAMPLES, "batches": passes * SAMPLES / BATCH, "passes": passes}
    assert found == [expected] * 2
    said = [text for text in events(jobs) if not LEFT.fullmatch(text)]
    assert said == [f"scaled from {old} to {new} servers" for old, new in pairwise([first, *then])]


@pytest.mark.soak
def test_a_death_is_seen_while_a_server_joins(jobs: Jobs, tmp_path: Path) -> None:
    with jobs.started("--workers", "2", "--sync", "asp", ENDLESS, str(tmp_path)) as process:
        trains_on(tmp_path)
        record = jobs.record()
        known = set(jobs.pids())
        record_path = jobs.path("scale.json")
        record_path.write_text('{"servers": 2}')

        def new_servers() -> list[int]:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            fresh = [int(pid) for pid in children if int(pid) not in known]
            return [p for p in fresh if "server_process" in Path(f"/proc/{p}/cmdline").read_text()]

        wait_until(new_servers)
        (joining,) = new_servers()
        os.kill(joining, signal.SIGSTOP)
        os.kill(record["workers"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: jobs.record()["workers"][1]["restarts"] == 1)
        trains_on(tmp_path)
        assert jobs.record()["sizes"]["servers"] == 1
        os.kill(joining, signal.SIGCONT)
        wait_until(lambda: jobs.record()["sizes"]["servers"] == 2)
        (tmp_path / "stop").touch()
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
