"""The parts of a job's supervisor that need no processes: lines, tracebacks, verdicts, records, options."""

import io
import os
from pathlib import Path

import msgspec
import pytest

from shoal.cli import run_command
from shoal.cli.job_scale import scale
from shoal.errors import BadInput
from shoal.launch import records
from shoal.launch.lines import LINE_BYTES_MAX, LineSplitter, StderrTail
from shoal.launch.options import JobOptions
from shoal.launch.records import find_job, make_job_directory
from shoal.launch.screen import LogFile
from shoal.launch.verdict import Verdict
from shoal.sync.words import WORDS, usage

SCRIPT = __file__


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_the_bytes_come(size: int) -> None:
    data = b"one\n\ntwo\r\n 1%\r 50%\r100%\nthree \xff\xfe\nrest"
    splitter, lines = LineSplitter(), []
    for at in range(0, len(data), size):
        lines += splitter.feed(data[at : at + size])
    assert [*lines, *splitter.end()] == [b"one", b"", b"two", b"100%", b"three \xff\xfe", b"rest"]
    assert splitter.end() == []


def test_a_line_without_an_end_is_passed_on_in_pieces() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(40) for line in splitter.feed(b"x" * 5000)] + splitter.end()
    assert b"".join(lines) == b"x" * 200_000
    assert max(map(len, lines)) == LINE_BYTES_MAX


def test_a_progress_bar_takes_no_memory() -> None:
    splitter = LineSplitter()
    for _ in range(10_000):
        assert splitter.feed(b"\r" + b"=" * 50) == []
    assert splitter.end() == [b"=" * 50]


def tail(text: str) -> list[str]:
    tail = StderrTail()
    tail.add([line.encode() for line in text.splitlines()])
    return tail.reason()


HEAD = "Traceback (most recent call last):"


def test_the_last_traceback_is_the_reason() -> None:
    assert tail(f"noise\n{HEAD}\n  a\nOld: 1\nnoise\n{HEAD}\n  b\nNew: 2\n") == [HEAD, "  b", "New: 2"]


@pytest.mark.parametrize(
    "between",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_a_chain_is_one_traceback(between: str) -> None:
    chain = f"{HEAD}\n  a\nCause: 1\n\n{between}\n\n{HEAD}\n  b\nEffect: 2"
    assert tail(f"{HEAD}\n  z\nOther: 0\nnoise\n{chain}") == chain.splitlines()


def test_without_a_traceback_the_last_lines_are_the_reason() -> None:
    assert tail("\n".join(map(str, range(50)))) == [str(n) for n in range(40, 50)]
    assert tail("") == []


def test_the_first_cause_decides() -> None:
    verdict = Verdict()
    assert verdict.code == 0
    verdict.worker_ended(0, 0, joined=True)
    assert verdict.ending is None
    verdict.worker_ended(1, 3, joined=True)
    verdict.worker_ended(2, -15, joined=True)
    verdict.signalled(2)
    assert (verdict.code, verdict.ending.rank) == (3, 1)


def test_who_is_killed_behind_its_training_ends_nobody_else_and_decides_at_the_end() -> None:
    verdict = Verdict(restarts_max=3)
    assert verdict.worker_ended(1, -9, joined=True, left=True) is None
    verdict.worker_ended(0, 0, joined=True, left=True)
    verdict.decide()
    assert verdict.ending is None  # what is to be saved is saved
    verdict.trained()
    assert (verdict.code, verdict.ending.rank) == (137, 1)
    verdict = Verdict()
    verdict.worker_ended(1, -9, joined=True, left=True)
    verdict.worker_ended(0, 5, joined=True)
    verdict.trained()
    assert verdict.code == 5


def test_who_left_before_is_awaited_and_is_the_cause_if_it_fails() -> None:
    verdict = Verdict()
    verdict.worker_ended(0, 1, joined=True, left=True, behind=[1, 2])
    verdict.worker_ended(2, 1, joined=True, left=True, behind=[1])
    assert verdict.ending is None
    verdict.worker_ended(1, 7, joined=True, left=True)
    assert (verdict.code, verdict.ending.rank) == (7, 1)


def test_who_failed_is_the_cause_where_those_that_left_before_end_well() -> None:
    verdict = Verdict()
    verdict.worker_ended(0, 1, joined=True, left=True, behind=[1, 2])
    verdict.worker_ended(2, 5, joined=True, left=True, behind=[1])
    verdict.worker_ended(1, 0, joined=True, left=True)
    assert (verdict.code, verdict.ending.rank) == (5, 2)


def test_who_left_before_is_not_awaited_for_ever() -> None:
    verdict = Verdict()
    verdict.worker_ended(0, 3, joined=True, left=True, behind=[1], now=10.0)
    verdict.decide(now=29.0)
    assert verdict.ending is None
    verdict.decide(now=31.0)
    assert (verdict.code, verdict.ending.rank) == (3, 0)


@pytest.mark.parametrize(
    ("happens", "code", "sentence"),
    [
        (lambda v: v.worker_ended(1, -9, joined=True), 137, "worker 1 was killed by SIGKILL"),
        (lambda v: v.worker_ended(1, 255, joined=False), 255, "worker 1 failed with code 255"),
        (lambda v: v.worker_ended(0, 0, joined=False), 2, "worker 0 ended without calling shoal.join()"),
        (lambda v: v.signalled(2), 130, "stopped by Ctrl-C"),
        (lambda v: v.signalled(15), 143, "stopped by SIGTERM"),
        (
            lambda v: v.server_lost(1, 42),
            1,
            "server 1 (pid 42) has ended, and its rows are gone; with --replicas 1 a copy on another server "
            "would go on",
        ),
        (lambda v: v.timed_out(3), 124, "stopped: not done within --timeout 3 s"),
    ],
)
def test_each_cause_has_its_code(happens, code: int, sentence: str) -> None:
    verdict = Verdict()
    happens(verdict)
    assert (verdict.code, verdict.ending.sentence) == (code, sentence)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ()}, "which script?"),
        ({"command": (".",)}, "script . is not a file, but a directory"),
        ({"command": ("--lr", "1")}, "options of shoal run come before the script"),
        ({"command": ("-m", "no_such_module.x")}, "module no_such_module.x is not found"),
        ({"workers": 0}, "workers is 0; allowed: a whole number from 1"),
        ({"servers": 65}, "servers is 65; allowed: a whole number from 1 to 64, the number of shards"),
        ({"sync": "quorum:1.5"}, "share is 1.5; it must be a number above 0 and at most 1"),
        ({"batch": "whole"}, "batch is 'whole'; allowed: split"),
        ({"on": "moon"}, "on is 'moon'; allowed: local"),
        ({"seed": -1}, "seed is -1"),
        ({"timeout_s": 0.0}, "timeout is 0.0"),
        ({"join_timeout_s": float("nan")}, "join-timeout is nan"),
        ({"name": "a/b"}, "a job's name is 'a/b'"),
        ({"name": ".."}, "a job's name is '..'"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(options: dict, said: str, capsys) -> None:
    assert run_command.run(**{"command": (SCRIPT,), **options}) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error


def test_an_unknown_word_lists_the_words_a_line_each(capsys) -> None:
    assert run_command.run(command=(SCRIPT,), sync="bps") == 2
    first, *words = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "error: sync 'bps': there is no word 'bps'. Did you mean bsp? The words (docs/sync.md"
    )
    assert words == [f"  {usage(word)}" for word in WORDS]


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "shoal" / "jobs"


def ended(name: str, **changes: object) -> records.JobRecord:
    record = make_job_directory(JobOptions(command=(SCRIPT,), name=name))
    record = records.msgspec.structs.replace(record, state="ended", **changes)
    record.write()
    return record


def test_the_newest_job_is_the_default(root: Path) -> None:
    ended("a", started=5.0)
    ended("b", started=7.0)
    ended("c", started=6.0)
    assert find_job().name == "b"
    assert find_job("c").name == "c"
    assert find_job(str(root / "a")).name == "a"


def test_a_job_whose_supervisor_is_gone_is_lost(root: Path) -> None:
    record = make_job_directory(JobOptions(command=(SCRIPT,), name="a"))
    assert find_job("a").state == "starting"
    records.msgspec.structs.replace(record, pid_started=record.pid_started - 1).write()
    assert find_job("a").state == "lost"


def test_an_ended_job_makes_room_for_one_of_its_name(root: Path) -> None:
    ended("a")
    (root / "a" / "logs" / "old").touch()
    ended("a")
    assert not (root / "a" / "logs" / "old").exists()


def test_old_jobs_are_forgotten(root: Path, monkeypatch) -> None:
    monkeypatch.setattr(records, "_JOBS_MAX", 3)
    for number in range(6):
        ended(f"job-{number}", started=float(number))
    assert sorted(path.name for path in root.iterdir()) == ["job-2", "job-3", "job-4", "job-5"]


def test_two_jobs_may_run_in_directories_of_the_same_name(root: Path, tmp_path: Path) -> None:
    places = [tmp_path / "mine" / "job", tmp_path / "yours" / "job"]
    records = [make_job_directory(JobOptions(command=(SCRIPT,), directory=place)) for place in places]
    assert [find_job(record.name).path for record in records] == places
    with pytest.raises(BadInput, match="is running"):  # but a name that was asked for is not changed
        make_job_directory(JobOptions(command=(SCRIPT,), directory=tmp_path / "other", name="job"))


def test_a_chosen_directory_keeps_what_is_not_ours(root: Path, tmp_path: Path) -> None:
    options = JobOptions(command=(SCRIPT,), directory=tmp_path / "mine")
    record = make_job_directory(options)
    assert record.name == "mine"
    (tmp_path / "mine" / "results.csv").touch()
    with pytest.raises(BadInput, match="is running"):
        make_job_directory(options)
    records.msgspec.structs.replace(record, state="ended").write()
    make_job_directory(options)
    assert (tmp_path / "mine" / "results.csv").exists()
    assert (root / "mine").resolve() == tmp_path / "mine"


def test_directories_of_one_last_name_are_two_jobs(root: Path, tmp_path: Path) -> None:
    first, second = (tmp_path / place / "job" for place in ("a", "b"))
    running = make_job_directory(JobOptions(command=(SCRIPT,), directory=first))
    other = make_job_directory(JobOptions(command=(SCRIPT,), directory=second))
    assert running.name == "job"
    assert find_job(other.name).directory == str(second)
    with pytest.raises(BadInput, match="is running"):
        make_job_directory(JobOptions(command=(SCRIPT,), name="job"))


def test_a_job_needs_a_place_to_write(monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    with pytest.raises(BadInput, match="cannot make the directory of the job"):
        make_job_directory(JobOptions(command=(SCRIPT,), name="a"))


def test_a_log_has_a_maximum(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", bytes_max=10)
    for _ in range(3):
        log.write(b"12345678\n")
    log.close()
    lines = io.BytesIO((tmp_path / "log").read_bytes()).readlines()
    assert lines == [b"12345678\n", b"[shoal] this log has reached its maximum; what follows is not in it\n"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "how many"),
        ({"servers": 0}, "servers is 0; allowed: a whole number from 1 to 64, the number of shards"),
        ({"servers": 65}, "servers is 65; allowed: a whole number from 1 to 64, the number of shards"),
        (
            {"servers": 1},
            "servers is 1; allowed: a whole number from 2 to 64, the number of shards; 1 replica",
        ),
        ({"workers": 0, "servers": 2}, "workers is 0; allowed: a whole number from 1 to 4096"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], message: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    options = JobOptions(command=(SCRIPT,), name="job", servers=2, replicas=1, sync="gossip")
    record = make_job_directory(options)
    with pytest.raises(BadInput, match="job job is starting; only a running one"):
        scale("job", workers=None, servers=2)
    msgspec.structs.replace(record, state="running", sizes={"workers": 2, "servers": 2}).write()
    with pytest.raises(BadInput, match=message):
        scale("job", **{"workers": None, "servers": None, **sizes})
    assert record.asked_sizes() == {}


def test_a_failure_that_awaits_another_end_counts_when_nobody_is_left() -> None:
    verdict = Verdict()
    verdict.worker_ended(1, 3, joined=True, left=True, behind=[2], now=0.0)
    assert verdict.ending is None
    verdict.decide()
    assert (verdict.code, verdict.sentence) == (3, "worker 1 failed with code 3")
