"""Jobs that save while they train, are killed, and go on: what was trained and what was saved are one."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.process.run_jobs import Jobs, all_end, wait_until

import shoal
from shoal.checkpoint import manifest as manifest_
from shoal.checkpoint.client import save as save_
from shoal.checkpoint.place import Place

pytestmark = pytest.mark.process
SCRIPT = str(Path(__file__).with_name("counting_script.py"))
SAMPLES, EPOCHS = 400, 2


def whole(directory: Path) -> list[str]:
    return sorted(path.parent.name for path in directory.glob("*/manifest.json"))


def clocks(directory: Path) -> list[int]:
    return list(manifest_.latest(Place(str(directory))).clocks)


@pytest.mark.parametrize(
    ("sync", "workers"),
    [
        pytest.param("bsp", 2, marks=pytest.mark.soak),
        pytest.param("bsp", 3, marks=pytest.mark.soak),
        pytest.param("asp", 2, marks=pytest.mark.soak),
        pytest.param("asp", 3, marks=pytest.mark.soak),
    ],
)
def test_a_killed_job_goes_on_where_its_last_checkpoint_was(tmp_path: Path, sync: str, workers: int) -> None:
    jobs = Jobs(tmp_path)
    url = tmp_path / "ckpt"
    options = ["--sync", sync, "--servers", "2", "--checkpoint", str(url), "--every", "0.5s"]
    with jobs.started(*options, SCRIPT, str(SAMPLES), str(EPOCHS), "0.02") as process:
        wait_until(lambda: len(whole(url)) >= 2 and sum(clocks(url)) > 0)
        pids = jobs.pids()
        assert process.poll() is None
        os.kill(pids[0], signal.SIGKILL)
        process.wait()
    all_end(pids)
    before = clocks(url)
    assert sum(before) > 0
    again = jobs.shoal(
        *["run", "--name", "again", *options, "--workers", str(workers)],
        *[SCRIPT, str(SAMPLES), str(EPOCHS), "0"],
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on from checkpoint" in again.stdout + again.stderr
    with shoal.connect("memory://") as client:
        client.load(str(url))
        counts = client.table("counts").pull(np.arange(SAMPLES))[:, 0]
    # Of another number of workers a batch that some had finished is done again.
    again_at_most = 0 if workers == 2 else 1
    assert (counts.min(), counts.max() <= EPOCHS + again_at_most) == (EPOCHS, True)
    if workers == 2:  # the last line tells of this job alone
        steps = max(before) if sync == "bsp" else sum(before)
        left = EPOCHS * SAMPLES - steps * (8 if sync == "bsp" else 4)
        passes = 2 if left >= SAMPLES else 1
        assert f" {left} samples, " in again.stderr
        assert f"; {passes} pass{'es' * (passes > 1)}, every sample used once" in again.stderr


def test_a_url_that_cannot_be_written_is_found_before_anything_starts(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    (tmp_path / "file").write_text("")
    done = jobs.run("--checkpoint", str(tmp_path / "file" / "x"), SCRIPT, "8", "1", "0")
    assert (done.returncode, jobs.root.exists()) == (2, False)
    assert "no checkpoint can be written: cannot write" in done.stderr
    done = jobs.run("--checkpoint", str(tmp_path / "x"), "--every", "5", SCRIPT, "8", "1", "0")
    assert done.returncode == 2
    assert "every is '5'" in done.stderr


def test_a_signal_ends_a_job_whose_last_checkpoint_is_never_done(tmp_path: Path) -> None:
    jobs, url = Jobs(tmp_path), str(tmp_path / "ckpt")
    with jobs.started("--workers", "1", "--checkpoint", url, "--every", "1h", SCRIPT, "8", "1", "0") as job:
        wait_until(lambda: bool(keepers(url)))
        [keeper] = keepers(url)
        os.kill(keeper, signal.SIGSTOP)  # as if its place never answered
        try:
            wait_until(lambda: jobs.path("job.json").exists() and jobs.record()["state"] == "running")
            wait_until(lambda: [worker["code"] for worker in jobs.record()["workers"]] == [0])
            job.send_signal(signal.SIGINT)
            assert job.wait(30) == 130
            assert keepers(url) == []
        finally:
            for pid in keepers(url):
                os.kill(pid, signal.SIGKILL)


def keepers(url: str) -> list[int]:
    """Processes that make checkpoints there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if {b"shoal.checkpoint.keep", url.encode()} <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def test_the_commands_that_look_at_checkpoints(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    url = tmp_path / "ckpt"
    with shoal.connect("memory://") as client:
        items = client.table("items", dim=2, optimizer=shoal.optim.Adagrad(lr=0.1))
        items.push([5, 3], np.ones((2, 2), np.float32))
        client.table("shoal.notices", dim=2, optimizer=shoal.optim.SGD(lr=1.0)).push(
            [1], np.ones((1, 2), np.float32)
        )
        client.tensor("w", np.ones((2, 3), np.float32), optimizer=shoal.optim.SGD(lr=0.1))
        first = client.save(str(url))
        items.push([4], np.ones((1, 2), np.float32))
        second = save_(client, str(url), 10.0, first)
        values = items.pull([3, 4, 5])
    (url / "000009-00000000").mkdir()
    listed = jobs.shoal("ckpt", "ls", str(url)).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["name", first, second, "000009-00000000"]
    assert "no manifest.json" in listed
    shown = jobs.shoal("ckpt", "show", str(url)).stdout
    assert f"based on {first}" in shown
    assert f"in 1 part: what changed since {first}\n" in shown
    assert "Adagrad(lr=0.1)" in shown
    assert "shoal." not in shown  # by which workers talk
    missing = jobs.shoal("ckpt", "ls", str(tmp_path / "nowhere"))
    assert (missing.returncode, missing.stderr) == (
        1,
        f"error: there is no checkpoint at {tmp_path}/nowhere\n",
    )
    assert jobs.shoal("ckpt", "verify", str(url)).returncode == 0
    for verb in ("show", "verify"):
        none = jobs.shoal("ckpt", verb, f"{url}/000099-x")
        there = f"there is {first}, {second}, 000009-00000000"
        assert (none.returncode, none.stderr) == (
            1,
            f"error: there is no checkpoint {url}/000099-x; {there}\n",
        )
    for bad, why in [(tmp_path / "nowhere" / "x", "No such file or directory"), (url, "it is a directory")]:
        failed = jobs.shoal("ckpt", "export", str(url), str(bad))
        assert (failed.returncode, failed.stderr) == (1, f"error: cannot write {bad}: {why}\n")
    out = tmp_path / "model.safetensors"
    assert jobs.shoal("ckpt", "export", str(url), str(out)).returncode == 0
    assert list(tmp_path.glob(".model*")) == []
    from safetensors.numpy import load_file

    tensors = load_file(out)
    assert tensors["items.keys"].tolist() == [3, 4, 5]
    assert set(tensors) == {"items.keys", "items.values", "w"}
    np.testing.assert_array_equal(tensors["items.values"], values)
    assert tensors["w"].tolist() == [[1.0] * 3] * 2
    path = url / first / "part-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    broken = jobs.shoal("ckpt", "verify", str(url))
    assert broken.returncode == 1
    assert "part-0-0.safetensors is damaged" in broken.stderr


def test_no_older_one_stands_for_a_newest_that_is_damaged(tmp_path: Path) -> None:
    jobs, url, out = Jobs(tmp_path), tmp_path / "ckpt", tmp_path / "model.safetensors"
    with shoal.connect("memory://") as client:
        client.tensor("w", np.ones((2, 3), np.float32), optimizer=shoal.optim.SGD(lr=0.1))
        first, second = (client.save(str(url)) for _ in range(2))
    (url / "000009-00000000").mkdir()  # its saving was broken off
    exported = jobs.shoal("ckpt", "export", str(url), str(out))
    assert exported.stdout.startswith(f"{second}, made "), exported.stderr
    out.unlink()
    path = url / second / "manifest.json"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    for verb in (["verify", str(url)], ["show", str(url)], ["export", str(url), str(out)]):
        done = jobs.shoal("ckpt", *verb)
        assert (done.returncode, done.stdout, done.stderr) == (
            1,
            "",
            f"error: checkpoint {url}/{second} is damaged: manifest.json does not fit its checksum; "
            f"an older one may be whole, name it: {url}/{first}\n",
        )
    assert not out.exists()
    assert jobs.shoal("ckpt", "export", f"{url}/{first}", str(out)).returncode == 0


def test_a_job_says_which_checkpoint_it_passed_over_and_why(tmp_path: Path) -> None:
    jobs, url = Jobs(tmp_path), tmp_path / "ckpt"
    with shoal.connect("memory://") as client:
        first, second = (client.save(str(url)) for _ in range(2))
    (url / second / "part-0-0.safetensors").write_bytes(b"damaged")
    done = jobs.run("--workers", "1", "--checkpoint", str(url), "--every", "1h", SCRIPT, "8", "1", "0")
    assert done.returncode == 0, done.stderr
    said = f"checkpoint {second} was passed over: "
    [event] = [one["text"] for one in jobs.record()["events"] if one["text"].startswith(said)]
    assert "part-0-0.safetensors is damaged" in event
    assert event in jobs.path("logs/job.log").read_text()
    assert event in jobs.shoal("status", "job").stdout
    assert f"going on from checkpoint {first} of {url}" in done.stderr
