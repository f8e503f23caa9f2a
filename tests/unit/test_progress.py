"""The progress files of workers, and the board that reads them."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import BadInput
from shoal.launch.board import Board
from shoal.train.ledger_report import PassReport, Usage
from shoal.train.progress import (
    DataUse,
    Progress,
    ProgressReport,
    progress_path,
    read_progress,
    write_data_before,
)
from shoal.train.share import Drawn


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "progress").mkdir()
    return tmp_path


def write(job: Path, rank: int, **fields: object) -> None:
    progress_path(job, rank).write_text(json.dumps({"rank": rank, **fields}))


def test_the_first_report_is_there_at_once(job: Path) -> None:
    report = ProgressReport(job, rank=2)
    read = read_progress(progress_path(job, 2))
    report.close()
    assert read == report.value or read.state == "joined"
    assert read.pid == os.getpid()


def test_the_last_report_is_written_at_the_end(job: Path) -> None:
    report = ProgressReport(job, rank=0)
    for step in range(100):
        report.update(step=step, clock=step, samples=32 * step, loss=np.float32(0.5), metrics={"auc": 0.75})
    report.close()
    report.close()
    read = read_progress(progress_path(job, 0))
    assert read == report.value
    assert (read.step, read.loss, read.metrics, read.state) == (99, 0.5, {"auc": 0.75}, "ended")
    assert [path.name for path in (job / "progress").iterdir()] == ["0.json"]


class Waiting:
    """A client, as far as anybody asks it for how long its servers have not answered."""

    def __init__(self) -> None:
        self.waits_s = [0.0, 0.4]

    def stats(self) -> dict[str, Any]:
        return {"waits_s": self.waits_s}


def test_servers_that_do_not_answer_are_told_while_the_script_waits_for_them(job: Path) -> None:
    client: Any = Waiting()
    report = ProgressReport(job, rank=0, client=client)
    report.update(step=3)
    path = progress_path(job, 0)
    until(lambda: read_progress(path).step == 3)
    before = path.stat().st_mtime_ns
    time.sleep(1.5)  # it is asked again
    assert path.stat().st_mtime_ns == before, "nothing has changed"
    client.waits_s = [0.2, 7.0]
    until(lambda: read_progress(path).waiting_for_servers == (1,))
    board = Board(job, 1)
    board.refresh()
    assert board.waits_for_servers() == {0: (1,)}
    assert "worker 0 waits for server 1" in board.line()
    client.waits_s = [0.0, 0.0]
    until(lambda: read_progress(path).waiting_for_servers == ())
    client.waits_s = [7.0, 7.0]
    until(lambda: read_progress(path).waiting_for_servers == (0, 1))
    report.close()
    assert (read_progress(path).waiting_for_servers, read_progress(path).state) == ((), "ended")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_was_said_last_before_waiting_is_written_by_itself(job: Path) -> None:
    report = ProgressReport(job, rank=0)
    report.update(step=1)
    report.update(step=2, state="waiting", waiting_for=(1, 3))
    end = time.monotonic() + 30
    while (read := read_progress(progress_path(job, 0))) is None or read.step != 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert read.waiting_for == (1, 3)
    report.close()


def test_without_a_job_nothing_is_written() -> None:
    report = ProgressReport(rank=0)
    report.update(step=1)
    report.close()
    assert (report.value.step, report.value.state) == (1, "ended")


@pytest.mark.parametrize("change", [{"rank": 1}, {"speed": 2}, {"metrics": {str(i): 0 for i in range(65)}}])
def test_what_cannot_be_reported_is_said(change: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        ProgressReport(rank=0).update(**change)


def test_a_forked_child_says_nothing(job: Path) -> None:
    report = ProgressReport(job, rank=0)
    child = os.fork()
    if child == 0:
        report.update(step=77)
        report.close()
        os._exit(0 if report.value.step == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    report.close()


def test_a_lost_directory_does_not_end_training(tmp_path: Path) -> None:
    report = ProgressReport(tmp_path / "gone", rank=0)
    report.update(step=1)
    report.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": "x"}', '{"step": 1}'])
def test_a_file_that_is_not_ours_counts_as_none(job: Path, text: str) -> None:
    progress_path(job, 0).write_text(text)
    assert read_progress(progress_path(job, 0)) is None


def test_speed_is_over_all_lives_of_a_rank(job: Path) -> None:
    first = ProgressReport(job, rank=0)
    first.update(samples=100)
    first.close()
    again = ProgressReport(job, rank=0)  # whose time is short, and whose samples are those of both
    again.close()
    assert again.value.began == first.value.joined < again.value.joined
    board = Board(job, 1)
    board.refresh()
    seconds = again.value.time - first.value.joined
    assert board.counters()["samples_per_s_mean"] == pytest.approx(100 / seconds)


def test_the_board_counts_over_workers(job: Path) -> None:
    board = Board(job, 3)
    assert not board.refresh()
    write(job, 0, step=4, clock=4, samples=100, loss=1.0, joined=10.0, time=12.0, state="training")
    write(
        job,
        1,
        step=6,
        clock=6,
        samples=300,
        loss=2.0,
        joined=11.0,
        time=14.0,
        waiting_for=[2],
        state="waiting",
    )
    assert board.refresh()
    assert not board.refresh()
    counters = board.counters()
    assert (counters["samples"], counters["steps"], counters["loss"]) == (400, 10, 1.5)
    assert counters["samples_per_s_mean"] == 100
    assert board.missing() == [2]
    assert board.waiting_for(2) == [1]
    assert board.line() == (
        "step 4-6, 0 samples/s, loss 1.5, not joined: worker 2, worker 1 waits for worker 2"
    )
    assert board.summary(4.0) == "4.0 s, 4-6 steps a worker, 400 samples, 100 samples/s, loss 1.5"


def test_the_board_shows_what_workers_report_by_name(job: Path) -> None:
    write(job, 0, loss=1.0, metrics={"loss": 1.0, "auc": 0.7})
    write(job, 1, loss=2.0, metrics={"loss": 2.0, "auc": 0.8})
    board = Board(job, 3)
    board.refresh()
    assert board.figures() == {"auc": pytest.approx(0.75)}
    assert "auc" in [column.header for column in board.table().columns]


def test_a_figure_that_is_no_number_hides_nothing(job: Path) -> None:
    report = ProgressReport(job, rank=0)
    report.update(step=3, metrics={"auc": float("nan"), "rmse": 0.5})
    report.close()
    said = read_progress(progress_path(job, 0))
    assert said is not None
    assert (said.step, said.metrics) == (3, {"rmse": 0.5})


def test_a_worker_measures_its_recent_speed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("shoal.train.progress.time.time", lambda: now[0])
    report = ProgressReport(rank=0)
    for second in range(1, 30):
        now[0] += 1
        report.update(samples=10 * second if second < 15 else 150 + 100 * (second - 15))
        report._measure_speed()
    assert report.value.samples_per_s == pytest.approx(100)


def test_a_single_look_knows_the_speed(job: Path) -> None:
    write(job, 0, samples=10, samples_per_s=100.0, joined=1.0, state="training")
    board = Board(job, 1)
    board.refresh()
    assert board.counters()["samples_per_s"] == 100
    board.views[0].ended = True
    assert board.counters()["samples_per_s"] == 0


def test_what_departed_workers_said_last_is_not_shown_and_what_they_trained_counts(job: Path) -> None:
    here = {"loss": 1.0, "metrics": {"auc": 0.5}, "joined": 1.0, "time": 2.0}
    write(job, 0, step=50, samples=700, ended=700, **here)
    write(job, 0, step=50, samples=700, ended=700, data={"passes": 1, "samples": 1000, "last": [0]}, **here)
    # 30 more of its samples than it had the time to say are in the ledger's 1,000.
    write(job, 1, step=20, samples=270, open={"0": 270}, loss=9.0, metrics={"auc": 0.1}, joined=1.0)
    write(job, 2, step=30, samples=50, ended=40, open={str(1 << 32): 10}, joined=1.0)  # of another loader
    board = Board.of_all(job)
    board.refresh()
    board.views[1].departed = board.views[1].ended = True
    assert board.samples == 1010
    counters = board.counters()
    assert (counters["loss"], counters["step_min"], board.figures()) == (1.0, 30, {"auc": 0.5})
    assert board.table().row_count == 2


def test_one_that_died_and_is_not_back_says_nothing(job: Path) -> None:
    write(job, 0, loss=1.0, joined=10.0)
    write(job, 1, loss=9.0, joined=10.0)
    board = Board(job, 2)
    board.refresh()
    board.views[1].since = 20.0
    assert board.counters()["loss"] == 1.0


def test_passes_of_an_earlier_job_are_not_counted_again(job: Path) -> None:
    write_data_before(job, DataUse(last=(2,), before={3: 0.25}))
    data = ProgressReport(job, rank=0).value.data
    assert data is not None
    assert data.has(2)
    after = data.and_a_pass(3, 8, {1: 8}, 100).and_a_pass(4, 8, {1: 7, 2: 1}, 100)
    assert (after.passes, after.samples, after.before) == (2, 75 + 112, {})
    assert ProgressReport(job, rank=1).value.data is None


class Passes:
    """A ledger that says of each pass how many of ten units were done."""

    def __init__(self, **done: int) -> None:
        self.done, self.last = {int(name[1:]): units for name, units in done.items()}, 0

    def find(self, epoch: int) -> PassReport | None:
        if (done := self.done.get(epoch)) is None:
            return None
        return PassReport(epoch=epoch, units=10, done=done, used={0: 10 - done, 1: done}, by_rank={})


def trained(job: Path, ledger: Passes, *loops: list[tuple[int, bool]]) -> int:
    """The samples of a job of which each worker trained so many of a pass, and left it or came to its end."""
    usages = []
    for rank, loop in enumerate(loops):
        report = ProgressReport(job, rank=rank)
        usage = Usage(ledger, report, tells=rank == 0)  # type: ignore[arg-type]
        for epoch, (samples, breaks) in enumerate(loop):
            usage.drew([Drawn(None, epoch, 0, samples, 100)])  # type: ignore[arg-type]
            report.update(samples=report.value.samples + samples, **usage.known)
            usage.breaks(epoch) if breaks else usage.ends(epoch, 100)
        usages.append(report)
    for report in usages:
        report.close()
    board = Board(job, len(loops))
    board.refresh()
    return board.samples


@pytest.mark.parametrize("who", [0, 1])
def test_what_one_trained_of_a_pass_that_it_left_and_others_ended_counts_once(job: Path, who: int) -> None:
    loops = [[(70, False), (50, False)], [(70, False), (50, False)]]
    loops[who][0] = (30, True)
    assert trained(job, Passes(p0=10, p1=10), *loops) == 200


def test_what_others_trained_counts_though_worker_0_leaves_the_last_pass(job: Path) -> None:
    assert trained(job, Passes(p0=10), [(30, True)], [(70, False)]) == 100


def test_passes_that_have_ended_count_once_also_in_a_later_life(job: Path) -> None:
    life = [(100, False), (100, False)]
    assert trained(job, Passes(p0=10, p1=10), life) == 200
    report = ProgressReport(job, rank=0)
    usage = Usage(Passes(p0=10, p1=10, p2=10), report, tells=True)  # type: ignore[arg-type]
    usage.drew([Drawn(None, 2, 0, 100, 100)])  # type: ignore[arg-type]
    report.update(samples=report.value.samples + 100, **usage.known)
    usage.ends(2, 100)
    report.close()
    board = Board(job, 1)
    board.refresh()
    assert board.samples == 300


def test_what_is_left_for_good_counts_though_others_end_it(job: Path) -> None:
    assert trained(job, Passes(p0=10), [(70, False)], [(30, True)]) == 100


def test_a_pass_that_all_left_counts_as_they_say(job: Path) -> None:
    loop = [(10, True), (50, False)]
    assert trained(job, Passes(p0=2, p1=10), loop, loop) == 120


def test_what_one_trained_that_is_gone_counts_though_others_end_a_later_pass(job: Path) -> None:
    assert trained(job, Passes(p0=4, p1=10), [(20, True), (100, False)], [(20, True)]) == 140


def test_jobs_that_leave_every_pass_count_as_they_say(job: Path) -> None:
    report = ProgressReport(job, rank=0)
    usage = Usage(Passes(), report, tells=True)  # type: ignore[arg-type]
    for epoch in range(100):
        usage.drew([Drawn(None, epoch, 0, 5, 100)])  # type: ignore[arg-type]
        usage.breaks(epoch)
    assert len(usage.known["open"]) <= 9
    report.close()


def test_a_job_that_finds_all_trained_says_so(job: Path) -> None:
    write(job, 0, data={"last": [4]})
    board = Board(job, 1)
    board.refresh()
    assert board.summary(2.0, "000002-ab") == "2.0 s, nothing left to train: checkpoint 000002-ab has it all"
    assert "0 steps a worker, 0 samples" in board.summary(2.0)
    assert "no step was made with Shoal" in Board(job, 2).summary(2.0)


def test_nobody_waits_in_a_circle(job: Path) -> None:
    for rank, others in enumerate([[1], [2], [0], [0, 1]]):  # what worker 0 said is the oldest
        write(job, rank, waiting_for=others, joined=1.0, time=10.0 + rank, state="waiting")
    board = Board(job, 4)
    board.refresh()
    assert board.waits() == {1: [2], 2: [0], 3: [0, 1]}
    assert board.waiting_for(1) == [3]


def test_the_table_has_a_row_for_each_worker(job: Path) -> None:
    write(job, 1, step=5, loss=0.123456, waiting_for=[0])
    board = Board(job, 2)
    board.refresh()
    assert board.table().row_count == 2
    assert Progress(rank=0).state == "joined"
