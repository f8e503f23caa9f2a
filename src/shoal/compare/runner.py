"""Runs the jobs of a comparison one after the other, by the supervisor of `shoal run`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shoal.compare.options import CompareOptions
from shoal.compare.run import Run, read_run
from shoal.errors import BadInput
from shoal.launch.records import find_job
from shoal.launch.supervisor import run_job
from shoal.launch.verdict import CODE_TIMEOUT

_SIGNALLED = (128 + 1, 128 + 2, 128 + 15)


class Stopped(Exception):  # noqa: N818 - no error: somebody wanted it
    """A signal ended a job, and with it the comparison."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_all(options: CompareOptions) -> Iterator[Run]:
    """Each run as it ends. Seeds are the outer loop: what slows the machine for a while hits all words.

    A mistake that the first run shows is raised: nothing would be learnt from the others.
    """
    first = True
    for seed in range(options.seeds):
        for word in options.words:
            run = _run(options, word, seed)
            if first:
                _check_first(options, run)
            first = False
            yield run


def _run(options: CompareOptions, word: str, seed: int) -> Run:
    job = options.job(word, seed)
    assert job.directory is not None
    with Path(os.devnull).open("w") as nowhere:
        code = run_job(job, shown=nowhere)
    record = find_job(str(job.directory))
    if code in _SIGNALLED and (record.reason or "").startswith("stopped by"):
        raise Stopped(code)
    failure = (
        None if code in (0, CODE_TIMEOUT) else _last_words(job.directory, record.reason or f"code {code}")
    )
    if failure is None and record.sync != word:
        failure = f"its shoal.join says sync {record.sync}, so no word can be tried: leave out sync="
    return read_run(job.directory, options.workers, word=word, seed=seed, code=code, failure=failure)


def _last_words(directory: Path, reason: str) -> str:
    """The reason, and what the worker said; the log ends with both."""
    log = (directory / "logs" / "job.log").read_text(errors="replace")
    _, found, said = log.rpartition(f"\n{reason}:\n")
    return f"{reason}:\n{said.rstrip()}" if found else reason


def _check_first(options: CompareOptions, run: Run) -> None:
    script = options.command[1] if options.command[0] == "-m" else options.command[0]
    if run.failure is not None:
        raise BadInput(
            f"{script} failed in its first run (sync {run.word}), so nothing is compared. {run.failure}"
        )
    if not run.series:
        raise BadInput(
            f"{script} reported nothing in its first run (sync {run.word}): call worker.report(loss=...), "
            "best with figures of held-out data"
        )
    if options.target is not None and options.target.metric not in run.series:
        raise BadInput(
            f"target {options.target}: {script} does not report {options.target.metric!r}; it reports: "
            f"{', '.join(sorted(run.series))}"
        )
