"""The progress bar of the examples: samples done, samples per second, and a smoothed loss."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[int, float], None]  # samples done since the last report, their mean loss


def timed(console: Console, title: str, samples: int, run: Callable[[Report], float]) -> tuple[float, float]:
    """What `run` returned, and the seconds between its first report and its last."""
    text = "{task.fields[rate]:>8,.0f} samples/s  loss {task.fields[loss]:.3f} "
    columns = (
        TextColumn(f"{title:<28}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn(text),
        TimeElapsedColumn(),
    )
    times: list[float] = []
    done = 0
    smooth = 0.0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=samples, rate=0.0, loss=0.0)

        def report(count: int, loss: float) -> None:
            nonlocal done, smooth
            smooth = 0.98 * smooth + 0.02 * loss if times else loss
            done += count if times else 0  # the clock starts when the first batch is done
            times.append(time.perf_counter())
            rate = done / max(times[-1] - times[0], 1e-9)
            progress.update(task, advance=count, rate=rate, loss=smooth)

        result = run(report)
    return result, times[-1] - times[0]
