"""What the workers of tests/process/test_run.py do: `run_scripts.py CASE ARGS...`. Needs no torch."""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import shoal
from shoal.train.environment import read_worker_environment
from shoal.train.progress import ProgressReport, progress_path, read_progress

FOREVER_S = 120.0


def join() -> ProgressReport:
    """What `shoal.join()` does as far as a supervisor sees it."""
    worker = read_worker_environment()
    return ProgressReport(worker.job, rank=worker.rank)


def tell(name: str, text: str = "") -> None:
    """Leave a file for the test to see, whole at once."""
    path = Path(os.environ["SHOAL_JOB"]) / name
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def stay(rank: int) -> None:
    tell(f"ready-{rank}", str(os.getpid()))
    time.sleep(FOREVER_S)


def train(steps: str) -> ProgressReport:
    """Steps against the servers, with progress."""
    report = join()
    with shoal.connect() as client:
        table = client.table("rows", dim=2, optimizer=shoal.optim.SGD(lr=1.0))
        for step in range(int(steps)):
            table.push([step], [[1.0, 1.0]])
            report.update(step=step + 1, clock=step + 1, samples=32 * (step + 1), loss=0.5, state="training")
    print("rank", report.value.rank, "is done")
    return report


def train_then_stay() -> None:
    report = train("5")
    report.update(loss=0.25, state="waiting", waiting_for=(1,))
    stay(report.value.rank)


def sit() -> None:
    stay(join().value.rank)


def sit_ignoring_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sit()


def sit_with_children() -> None:
    """Children of three kinds: plain, in a process group of its own, and holding the pipes."""
    rank = join().value.rank
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
    pids = [subprocess.Popen(sleeper, process_group=group).pid for group in (None, 0)]
    tell(f"children-{rank}", " ".join(map(str, pids)))
    stay(rank)


def leave_a_child_behind() -> None:
    report = join()
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    tell(f"children-{report.value.rank}", str(child.pid))
    print("the last line, without an end", end="")


def fail(rank: str, code: str) -> None:
    """That rank exits with that code; the others stay."""
    report = join()
    if report.value.rank == int(rank):
        print("going", file=sys.stderr)
        sys.exit(int(code))
    time.sleep(FOREVER_S)


def fail_behind(code: str) -> None:
    """Rank 1 exits with that code, and ends when the supervisor knows that rank 0 failed because of it."""
    job, rank = Path(os.environ["SHOAL_JOB"]), int(os.environ["SHOAL_RANK"])
    if rank == 1:
        record = job / "job.json"
        atexit.register(until, lambda: json.loads(record.read_text())["workers"][0]["code"] is not None)
    join()
    if rank == 1:
        print("going", file=sys.stderr)
        sys.exit(int(code))
    until(lambda: (progress := read_progress(progress_path(job, 1))) and progress.state == "ended")
    raise ValueError("the other has left")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + FOREVER_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def throw(rank: str) -> None:
    report = join()
    if report.value.rank == int(rank):
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("the thing itself") from error
    time.sleep(FOREVER_S)


def die(rank: str, number: str) -> None:
    report = join()
    if report.value.rank == int(rank):
        os.kill(os.getpid(), int(number))
    time.sleep(FOREVER_S)


def exit_at_once(code: str) -> None:
    """Without a chance to leave the job."""
    join()
    os._exit(int(code))


def say(lines: str) -> None:
    """Many lines in pieces, to both outputs, some without an end for a while."""
    join()
    for number in range(int(lines)):
        sys.stdout.write(f"out {number} ")
        sys.stderr.write(f"err {number} ")
        sys.stdout.write("x" * 100 + "\n")
        sys.stderr.write("y" * 100 + "\n")
    sys.stdout.write("no end")


def never_join() -> None:
    print("what is shoal.join()?")


def wait_for_rank_1() -> None:
    """Rank 0 joins and waits; rank 1 never joins."""
    if os.environ["SHOAL_RANK"] == "0":
        join().update(state="waiting", waiting_for=(1,))
    time.sleep(FOREVER_S)


def show_environment(*_: str) -> None:
    join()
    names = [name for name in os.environ if name.startswith(("SHOAL_", "MASTER_", "LOCAL_"))]
    for name in sorted([*names, "RANK", "WORLD_SIZE"]):
        print(f"{name}={os.environ[name]}")
    print(sys.argv[2:])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
