"""What `python -m bench` makes of its figures: verdicts, shares of a limit, the exit code."""

from dataclasses import dataclass

import bench.__main__ as bench
import pytest
from bench.plan import Plan
from bench.report import Book, Line, table_rows
from bench.workloads import checkpoint


@dataclass
class Idle:
    """A workload whose figure is known before."""

    figure: float

    def run(self, book: Book, plan: Plan) -> None:
        book.add("IDLE cpu", "shoal", self.figure)

    def lines(self) -> list[Line]:
        return [Line(metric="IDLE cpu", subjects=("shoal",), unit="%", lower_is_better=True, bar=1.0)]


@pytest.mark.parametrize(("figure", "code"), [(0.9, 0), (1.1, 1)])
def test_it_exits_with_1_if_a_bar_was_missed(
    figure: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_FAMILIES", [Idle(figure)])
    monkeypatch.setattr("sys.argv", ["bench", "--only", "IDLE"])
    assert bench.main() == code
    assert capsys.readouterr().out.splitlines()[-1] == f"PASS {1 - code}  MISS {code}"


def test_a_save_is_shown_as_a_share_of_what_the_disk_takes() -> None:
    book = Book()
    for metric, value in [(checkpoint.SPEED, 100e6), (checkpoint.DISK, 400e6)]:
        book.add(metric, "shoal auto", value)
    shares = {row[0]: row[8] for row in table_rows(book, checkpoint.lines())}
    assert shares[checkpoint.SPEED] == "25%"


def test_what_must_hold_always_is_judged_by_the_worst_repetition() -> None:
    book = Book()
    for seconds in (0.01, 0.3, 0.01):
        book.add(checkpoint.STALL, "shoal auto", seconds)
    (row,) = [row for row in table_rows(book, checkpoint.lines()) if row[0] == checkpoint.STALL]
    assert (row[6], row[9]) == ("<= 100 ms, at worst 300", "MISS")
