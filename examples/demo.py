"""`make demo`: MovieLens-100k by plain torch in one process, then the same script with Shoal on two workers.

Exits with 1 unless Shoal's held-out error is within 2 % of torch's and both are 10 % below that of the mean.
"""

import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(os.path.relpath(Path(__file__).parent))  # short, as it is shown
PLAIN, SHOAL = HERE / "movielens/plain.py", HERE / "movielens/with_shoal.py"
JOB = HERE.parent / "build/demo"
RUN = ["run", "--workers", "2", "--servers", "2"]
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


def run_shoal(options: list[str]) -> list[float]:
    """Run it with the terminal to itself, and read what worker 0 printed from its log."""
    command = [*RUN, str(SHOAL), *options]
    console.print(f"\n[bold]$ {shlex.join(['shoal', *command])}[/]")
    whole = [sys.executable, "-m", "shoal.cli", command[0], "--directory", str(JOB), *command[1:]]
    code = subprocess.run(whole, check=False).returncode
    if code:
        sys.exit(code)
    return errors((JOB / "logs/worker-0.log").read_text())


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
    times = [time.monotonic()]
    (mean, *_, by_torch) = run_plain(options)
    times.append(time.monotonic())
    (_, *_, by_shoal) = run_shoal(options)
    times.append(time.monotonic())
    table = Table("", "held-out RMSE", "below the mean's", "seconds")
    table.add_row("mean rating", f"{mean:.4f}", "", "")
    names = "torch, 1 process", "Shoal, 2 workers, 2 servers"
    for number, (name, error) in enumerate(zip(names, (by_torch, by_shoal), strict=True)):
        seconds = times[number + 1] - times[number]
        table.add_row(name, f"{error:.4f}", f"{1 - error / mean:.1%}", f"{seconds:.1f}")
    console.print("\n", table, sep="")
    good = abs(by_shoal / by_torch - 1) <= 0.02 and max(by_torch, by_shoal) <= 0.9 * mean
    verdict = "good" if good else "NOT GOOD: more than 2 %, or not 10 % below the mean's"
    console.print(f"Shoal's error is {by_shoal / by_torch - 1:+.2%} from torch's: {verdict}", soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
