"""Jobs of `shoal run` for tests: started with a state directory of their own, waited for, and looked at."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SHOAL = [sys.executable, "-m", "shoal.cli"]
SCRIPT = str(Path(__file__).with_name("run_scripts.py"))
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
DEADLINE_S = 120.0


class Jobs:
    """Runs the command with a state directory of its own."""

    def __init__(self, state: Path) -> None:
        self.root = state / "shoal" / "jobs"
        self.environment = {**CLEAN, "XDG_STATE_HOME": str(state), "COLUMNS": "200"}

    def shoal(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SHOAL, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            **options,
        )

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return self.shoal("run", "--name", "job", *arguments, **options)

    @contextmanager
    def started(self, *arguments: str, command: Sequence[str] = SHOAL) -> Iterator[subprocess.Popen[str]]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        whole = [*command, "run", "--name", "job", *arguments]
        with subprocess.Popen(whole, env=self.environment, **pipes) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    process.kill()

    def path(self, name: str) -> Path:
        return self.root / "job" / name

    def until(self, *names: str) -> list[str]:
        """What is in these files of the job, when all are there."""
        wait_until(lambda: all(self.path(name).exists() for name in names))
        return [self.path(name).read_text() for name in names]

    def record(self) -> dict:
        return json.loads(self.path("job.json").read_text())

    def pids(self) -> list[int]:
        record = self.record()
        members = [*record["workers"], *record["servers"]]
        return [record["pid"], record["coordinator"], *(member["pid"] for member in members)]


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str] | None = None) -> None:
    """With the `shoal run` that must be there until then: what it said is shown if it is not, or in vain."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if job is not None and (job.poll() is not None or time.monotonic() > deadline):
            job.terminate()
            raise AssertionError(f"in vain; the job said: {job.communicate()}")
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_end(pids: list[int]) -> None:
    wait_until(lambda: not any(map(alive, pids)))
