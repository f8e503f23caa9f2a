"""`make demo`: MovieLens-100k by plain torch, by Shoal on two workers, and by Shoal with kills in between.

The last run loses a server and a worker in the middle. Exits with 1 unless both of Shoal's held-out errors
are within 2 % of torch's and all are 10 % below that of the mean.
"""

import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shoal
from shoal.launch.records import find_job
from shoal.store.rounds import Rounds
from shoal.train.progress import progress_path, read_progress

HERE = Path(os.path.relpath(Path(__file__).parent))  # short, as it is shown
PLAIN, SHOAL = HERE / "movielens/plain.py", HERE / "movielens/with_shoal.py"
JOB = HERE.parent / "build/demo"
RUN = ["run", "--workers", "2", "--servers", "2"]
COPIES = ["--replicas", "1", "--max-restarts", "2"]
LOOK_S, WAIT_S = 0.02, 60.0
ON_THEIR_WAY = 5  # steps that may still count after a kill, since a lost server has no part in what is left
NAMES = "torch, 1 process", "Shoal, 2 workers, 2 servers", "Shoal, 2 processes killed"
console = Console(highlight=False)


def errors(text: str) -> list[float]:
    """The held-out errors that a script printed: that of the mean rating, then one for each epoch."""
    return [float(found) for found in re.findall(r"held-out RMSE (\S+)", text)]


def run_plain(options: list[str]) -> list[float]:
    """Run it, and pass on what it prints."""
    command = [sys.executable, "-u", str(PLAIN), *options]
    console.print(f"\n[bold]$ {shlex.join(['python', *command[2:]])}[/]")
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                said.append(line)
            code = process.wait()
        finally:
            process.kill()  # does nothing to one that has ended
    if code:
        sys.exit(code)
    return errors("".join(said))


def command_of(*arguments: str) -> list[str]:
    """Show the command, and how it is started here."""
    console.print(f"\n[bold]$ {shlex.join(['shoal', *arguments])}[/]", soft_wrap=True)
    return [sys.executable, "-m", "shoal.cli", arguments[0], "--directory", str(JOB), *arguments[1:]]


def run_shoal(options: list[str]) -> list[float]:
    """Run it with the terminal to itself, and read what worker 0 printed from its log."""
    code = subprocess.run(command_of(*RUN, str(SHOAL), *options), check=False).returncode
    if code:
        sys.exit(code)
    return errors((JOB / "logs/worker-0.log").read_text())


def run_and_kill(options: list[str]) -> list[float]:
    """The same with a copy of every row, and kills after a third and after two thirds of the steps."""
    last = read_progress(progress_path(JOB, 0))  # of the run before this one
    assert last is not None
    columns = TextColumn("step"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total}")
    command = command_of(*RUN, *COPIES, str(SHOAL), *options)
    began = time.monotonic()
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):

        def say(text: str, style: str = "") -> None:
            line = f"{time.monotonic() - began:5.1f} s  {text}"
            progress.console.print(line, style=style, markup=False, soft_wrap=True)

        show = threading.Thread(target=pass_on, args=(process, say))
        show.start()
        try:
            Killer(process, say, progress, last.clock).run()
            code = process.wait()
        finally:
            process.terminate()  # then it ends all that it started; nothing to one that has ended
            process.wait()
            show.join()
    if code:
        sys.exit(code)
    return errors((JOB / "logs/worker-0.log").read_text())


def pass_on(process: "subprocess.Popen[str]", say: Callable[..., None]) -> None:
    """What the job says, above the bar."""
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip(), "yellow" if "started again" in line or "takes its place" in line else "")


class Killer:
    """Looks at the steps of a running job as one more client of it, and kills two of its processes."""

    def __init__(
        self, process: "subprocess.Popen[str]", say: Callable[..., None], progress: Progress, steps: int
    ) -> None:
        self._process, self._say, self._progress, self._steps = process, say, progress, steps
        self._bar = progress.add_task("", total=steps)

    def run(self) -> None:
        """Kill server 0, which also keeps clocks and ledger, and worker 1; a job that fails says why."""
        if not self._until(lambda: find_job(str(JOB)).state == "running"):
            return
        record = find_job(str(JOB))
        token = Path(record.token_file or "").read_text().strip()
        with shoal.connect(record.address, token=token, timeout=WAIT_S) as client:
            self._rounds = Rounds(client, 0, 2)
            with suppress(shoal.errors.ShoalError):  # when the job has ended
                if self._until(lambda: self._clock() > self._steps // 3):
                    at = self._kill("server 0, which has half of the rows", record.servers[0].pid)
                    self._until(self._all_beyond(self._clock() + ON_THEIR_WAY))
                    self._say(f"STEPS GO ON {time.monotonic() - at:.1f} s after the kill", "bold green")
                if self._until(lambda: self._clock() > 2 * self._steps // 3):
                    at = self._kill("worker 1", record.workers[1].pid)
                    self._until(lambda: find_job(str(JOB)).workers[1].pid != record.workers[1].pid)
                    self._until(lambda: self._state()["phases"][1] in ("working", "waiting"))
                    self._until(self._all_beyond(self._clock() + ON_THEIR_WAY))
                    self._say(f"WORKER 1 IS BACK {time.monotonic() - at:.1f} s after the kill", "bold green")
                self._until(lambda: self._clock() >= self._steps)

    def _kill(self, what: str, pid: int) -> float:
        os.kill(pid, signal.SIGKILL)
        self._say(f"KILL -9 of {what} (pid {pid})", "bold red")
        return time.monotonic()

    def _state(self) -> dict[str, Any]:
        state = self._rounds.state()
        self._progress.update(self._bar, completed=min(max(state["clocks"]), self._steps))
        return state

    def _clock(self) -> int:
        return max(self._state()["clocks"])

    def _all_beyond(self, clock: int) -> Callable[[], bool]:
        return lambda: min(self._state()["clocks"]) > clock

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for it, as long as the job runs; whether it came."""
        while self._process.poll() is None:
            with suppress(shoal.errors.BadInput):  # its record is not there yet
                if condition():
                    return True
            time.sleep(LOOK_S)
        return False


def show_difference() -> None:
    """The lines in which the two scripts differ, their headings left out."""
    console.print(f"[bold]$ diff {PLAIN} {SHOAL}[/]")
    before, after = (path.read_text().splitlines()[1:] for path in (PLAIN, SHOAL))
    for line in difflib.ndiff(before, after):
        if line[0] in "+-" and line[1:].strip():
            console.print(line, style="green" if line[0] == "+" else "red", markup=False)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    options = sys.argv[1:]
    show_difference()
    table = Table("", "held-out RMSE", "below the mean's", "seconds")
    found: list[float] = []
    for name, run in zip(NAMES, (run_plain, run_shoal, run_and_kill), strict=True):
        began = time.monotonic()
        (mean, *_, error) = run(options)
        if not found:
            table.add_row("mean rating", f"{mean:.4f}", "", "")
        found.append(error)
        seconds = time.monotonic() - began
        table.add_row(name, f"{error:.4f}", f"{1 - error / mean:.1%}", f"{seconds:.1f}")
    console.print("\n", table, sep="")
    by_torch, *by_shoal = found
    unharmed, killed = by_shoal
    apart = unharmed / by_torch - 1, killed / by_torch - 1, killed / unharmed - 1
    good = all(abs(one) <= 0.02 for one in apart) and max(found) <= 0.9 * mean
    verdict = "good" if good else "NOT GOOD: more than 2 %, or not 10 % below the mean's"
    said = (
        f"Shoal's error is {apart[0]:+.2%} from torch's; where processes were killed {apart[1]:+.2%}, "
        f"which is {apart[2]:+.2%} from Shoal's without kills: {verdict}"
    )
    console.print(said, soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
