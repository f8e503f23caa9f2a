"""`shoal scale --servers` on jobs that train: shards move, and every push counts exactly once."""

import json
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until

pytestmark = pytest.mark.process
ENDLESS = str(Path(__file__).with_name("endless_script.py"))
SAMPLES, BATCH = 256, 8  # of that script


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def shards(jobs: Jobs) -> list[int]:
    """What the servers that are up have, by index; those that were let go must have none."""
    found = json.loads(jobs.shoal("status", "job", "--json").stdout)
    servers = [process for process in found["processes"] if process["role"] == "server"]
    assert all(server["shards"] == 0 for server in servers if server["state"] == "evicted")
    return [server["shards"] for server in servers if server["state"] == "up"]


def events(jobs: Jobs) -> list[str]:
    return [event["text"] for event in jobs.record()["events"]]


def trains_on(out: Path) -> None:
    """Wait for two more passes."""
    last = max((int(path.name[5:]) for path in out.glob("pass-*")), default=0)
    wait_until((out / f"pass-{last + 2}").exists)


@pytest.mark.parametrize("word", ["bsp", pytest.param("asp", marks=pytest.mark.soak)])
def test_servers_come_and_go_under_a_job(jobs: Jobs, tmp_path: Path, word: str) -> None:
    with jobs.started("--workers", "2", "--sync", word, ENDLESS, str(tmp_path)) as process:
        trains_on(tmp_path)
        for servers in (3, 2):
            done = jobs.shoal("scale", "job", "--servers", str(servers))
            assert done.stdout.startswith(f"job job goes on with {servers} servers"), done.stderr
            wait_until(lambda n=servers: len(now := shards(jobs)) == n and max(now) - min(now) <= 1)
            trains_on(tmp_path)
        wait_until(lambda: any(text.startswith("server 2 ") for text in events(jobs)))
        (tmp_path / "stop").touch()
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    passes = found[0]["passes"]
    expected = {"rows": [passes / BATCH] * SAMPLES, "batches": passes * SAMPLES / BATCH, "passes": passes}
    assert found == [expected] * 2
    *scaled, left = events(jobs)
    assert scaled == ["scaled from 1 to 3 servers", "scaled from 3 to 2 servers"]
    assert left.startswith("server 2 ")
    assert left.endswith(" has left; its rows are on the others")
