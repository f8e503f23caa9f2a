"""`shoal scale` on jobs that train: workers come and go, and every sample of every pass is used."""

import json
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, SCRIPT, Jobs, wait_until

from shoal.train.progress import progress_path

pytestmark = pytest.mark.process
COUNTING = str(Path(__file__).with_name("dying_script.py"))
SAMPLES, BATCH, PASSES = 64, 8, 4  # of that script
MORE = [
    "asp",
    "quorum:0.5",
    "ssp:1",
    "softsync:2",
    "dcasgd:0.04",
    "downpour:2,2",
    "average:2",
    "bmuf:2",
    "easgd:2",
]
MORE += ["diloco:2", "hogwild"]
AMONG_THEMSELVES = ("allreduce", "gossip")
IN_THE_PASS = ("bsp", "allreduce")
WORDS = ["bsp", *(pytest.param(word, marks=pytest.mark.soak) for word in MORE)]
WORDS += [pytest.param(word, marks=[pytest.mark.soak, pytest.mark.gloo]) for word in AMONG_THEMSELVES]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    return jobs


def joined(jobs: Jobs, workers: int) -> bool:
    """Whether these are waited for in rounds; what else joining takes they may wait for themselves."""
    return all(progress_path(jobs.path("."), rank).exists() for rank in range(workers))


@pytest.mark.parametrize("word", WORDS)
def test_a_job_grows_and_shrinks(jobs: Jobs, tmp_path: Path, word: str) -> None:
    command = ["--workers", "2", "--servers", "2", "--sync", word, COUNTING, str(tmp_path), "epochs"]
    with jobs.started(*command, "hold:0", "hold:2") as process:
        wait_until((tmp_path / "hold-0").exists, process)
        grown = jobs.shoal("scale", "job", "--workers", "4")
        assert (grown.returncode, grown.stdout) == (0, "job job goes on with 4 workers\n"), grown.stderr
        wait_until(lambda: joined(jobs, 4), process)
        (tmp_path / "go-0").touch()
        wait_until((tmp_path / "hold-2").exists, process)
        assert jobs.shoal("scale", "job", "--workers", "1").returncode == 0
        wait_until(lambda: len(jobs.record()["workers"]) == 1, process)
        (tmp_path / "go-2").touch()
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
    found = json.loads((tmp_path / "0.json").read_text())
    grows = word in IN_THE_PASS
    assert found["sizes"] == [4 if grows else 2, 4, 4, 1]
    units = [sum(used.values()) for used in found["used"]]
    assert units[1:] == [SAMPLES // BATCH * n for n in (4, 4, 1)]
    assert units[0] in (range(17, 32) if grows else [16])  # of 8 batches
    assert all("0" not in used for used in found["used"])
    # Two gradients make an update under softsync:2, also of the one worker that is left in the end.
    assert min(found["rows"]) >= (PASSES - (word == "softsync:2") / 2) / BATCH
    if word == "bsp":
        assert sum(found["rows"]) == found["rounds"]
        assert all(found["rows"][at] == found["rows"][at + 1] for at in range(0, SAMPLES, 2))
    if word == "allreduce":
        assert found["dense"] == pytest.approx(found["rows"], rel=1e-4)
        assert sum(found["rows"]) == pytest.approx(found["rounds"], rel=1e-4)
    assert f" {SAMPLES * PASSES} samples, " in output[1]  # those of the workers that went, too
    texts = [event["text"] for event in jobs.record()["events"] if event["text"].startswith("scaled")]
    assert texts == ["scaled from 2 to 4 workers", "scaled from 4 to 1 worker"]


@pytest.mark.parametrize(
    "word", ["bsp", pytest.param("allreduce", marks=[pytest.mark.soak, pytest.mark.gloo])]
)
def test_new_workers_train_in_the_pass_that_runs(jobs: Jobs, tmp_path: Path, word: str) -> None:
    command = ["--workers", "2", "--servers", "2", "--replicas", "1", "--sync", word, COUNTING, str(tmp_path)]
    with jobs.started(*command, "epochs", "hold:0") as process:
        wait_until((tmp_path / "hold-0").exists, process)
        assert jobs.shoal("scale", "job", "--workers", "4").returncode == 0
        wait_until(lambda: joined(jobs, 4), process)
        (tmp_path / "go-0").touch()
        output = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    made = [steps for one in found for epoch, steps in one["passes"] if epoch == 0]
    assert made[:2] == [SAMPLES // BATCH] * 2
    assert made[2] == made[3] > 0
    if word == "bsp":  # they are waited for as soon as they have joined; a first step alone shows too little
        assert made[2] == SAMPLES // BATCH - 2
    assert [one["sizes"] for one in found] == [[4] * PASSES] * 4
    units = [2 * made[0] + 2 * made[2]] + [4 * made[0]] * (PASSES - 1)
    assert [one["used"] for one in found] == [[{"1": count} for count in units]] * 4
    whole = [PASSES / BATCH] * SAMPLES
    assert found[0]["rows"] == pytest.approx(whole, rel=1e-5)
    assert found[0]["rounds"] == pytest.approx(PASSES * SAMPLES / BATCH, rel=1e-5)
    assert all(one["dense"] == pytest.approx(whole, rel=1e-5) for one in found)


LATE = """
import os, sys, time
from pathlib import Path
import torch
import shoal

go = Path(sys.argv[1])
deadline = time.monotonic() + 120
while os.environ["RANK"] != "0" and not go.exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
worker = shoal.join()
Path(f"{go}-{worker.rank}").touch()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
for epoch in worker.epochs(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("sizes", ["4 3", pytest.param("3", marks=pytest.mark.soak)])
def test_a_job_changes_its_size_while_workers_start(sizes: str, jobs: Jobs, tmp_path: Path) -> None:
    script, go = tmp_path / "late.py", tmp_path / "go"
    script.write_text(LATE)
    with jobs.started("--workers", "2", str(script), str(go)) as process:
        wait_until((tmp_path / "go-0").exists, process)
        for size in sizes.split():
            assert jobs.shoal("scale", "job", "--workers", size).returncode == 0
            wait_until(lambda size=size: f"to {size} workers" in jobs.shoal("status", "job").stdout, process)
        go.touch()  # each joins now, and was told of as many as there were when it was started
        output = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert "2 passes, every sample used once in each" in output[1]


SLOW_TO_GO = """
import os, signal, sys, time
from pathlib import Path
import torch
import shoal

out, asked = Path(sys.argv[1]), []
worker = shoal.join()
if worker.rank == 1:
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 1))
model, optimizer, loader = worker.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
for epoch in worker.epochs(1000):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        (out / f"{worker.rank}-{os.getpid()}").touch()
        if asked and (out / "go").exists():
            os.kill(os.getpid(), signal.SIGKILL)  # as is done to those that do not go
    if worker.mean(float((out / "end").exists())):
        break
"""


@pytest.mark.soak
def test_who_is_let_go_and_wanted_again_before_it_is_gone_is_started_again(
    jobs: Jobs, tmp_path: Path
) -> None:
    """It ends because it was told to: that is no death, and costs no restart."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_TO_GO)

    def lives() -> int:
        return len(list(tmp_path.glob("1-*")))

    with jobs.started("--workers", "2", "--max-restarts", "0", str(script), str(tmp_path)) as process:
        wait_until(lambda: lives() == 1, process)
        for size in ("1", "2"):
            assert jobs.shoal("scale", "job", "--workers", size).returncode == 0
            texts = f"to {size} worker"
            wait_until(
                lambda texts=texts: any(texts in event["text"] for event in jobs.record()["events"]), process
            )
        (tmp_path / "go").touch()
        wait_until(lambda: lives() == 2, process)
        (tmp_path / "end").touch()
        output = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output


def test_what_cannot_be_scaled_is_refused(jobs: Jobs) -> None:
    assert "no job has run here" in jobs.shoal("scale", "--workers", "2").stderr
    with jobs.started("--workers", "1", SCRIPT, "sit"):
        jobs.until("ready-0")
        assert (
            jobs.shoal("scale", "--workers", "0").stderr
            == "error: workers is 0; allowed: a whole number from 1 to 4096\n"
        )
    assert jobs.run("--workers", "1", SCRIPT, "train", "1").returncode == 0
    assert "job job is ended; only a running one" in jobs.shoal("scale", "--workers", "2").stderr
