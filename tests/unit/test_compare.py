"""What `shoal compare` makes of histories: figures of a run, what seeds show, table and plots."""

import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from shoal.compare.options import CompareOptions, Target
from shoal.compare.plot import draw, write_png
from shoal.compare.run import Point, Run, read_run
from shoal.compare.spread import Spread, differ, spread
from shoal.compare.table import figures, summary, table
from shoal.errors import BadInput
from shoal.train.history import Moment, history_path, open_history, read_history, write_moment

TARGET = Target("loss", "<=", 0.5)


def options(**changes: object) -> CompareOptions:
    base = {"command": (__file__, "--seed", "{seed}"), "sync": "bsp,asp", "directory": Path("out")}
    return CompareOptions(**{**base, **changes})


def a_run(word: str, seed: int, *values: float, seconds: float = 1.0) -> Run:
    series = {"loss": [Point(seconds * (i + 1), 10.0 * (i + 1), value) for i, value in enumerate(values)]}
    return Run(
        word=word, seed=seed, code=0, seconds=seconds * len(values), samples_per_s=100.0, series=series
    )


def written(*rows: object) -> str:
    console = Console(width=160, highlight=False)
    with console.capture() as shown:
        console.print(*rows)
    return shown.get()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("loss=0.3", Target("loss", "<=", 0.3)),
        ("val_loss = 1e-2", Target("val_loss", "<=", 0.01)),
        ("loss<=-1", Target("loss", "<=", -1.0)),
        ("accuracy>=0.9", Target("accuracy", ">=", 0.9)),
    ],
)
def test_targets(text: str, wanted: Target) -> None:
    assert Target.parse(text) == wanted


@pytest.mark.parametrize(
    "text", ["loss", "loss=", "=0.3", "loss<0.3", "loss=low", "loss=nan", "loss<=inf", ""]
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="it is written"):
        Target.parse(text)


def test_equal_does_not_say_which_way_is_better() -> None:
    with pytest.raises(BadInput, match=r"accuracy>=0\.9 or accuracy<=0\.9"):
        Target.parse("accuracy=0.9")


def test_the_list_keeps_the_commas_of_words() -> None:
    wanted = ["bsp", "downpour:2,2", "asp,scale=1", "average:10,state=reset", "allreduce,rows=ssp:3"]
    assert options(sync=",".join(wanted)).words == wanted


def test_each_job_has_its_word_its_seed_and_a_directory() -> None:
    job = options(straggler="1:5x").job("asp,scale=1", 2)
    assert (job.sync, job.seed, job.command[1:]) == ("asp,scale=1", 2, ("--seed", "2"))
    assert job.directory == Path("out/asp,scale=1-2").resolve()
    assert (job.name, job.history, job.straggler) == ("out-asp,scale=1-2", True, "1:5x")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sync": "bsp,aps"}, "Did you mean asp"),
        ({"sync": ""}, "there is no word"),
        ({"sync": "bsp,asp,bsp"}, "bsp is there twice"),
        ({"seeds": 0}, "seeds"),
        ({"straggler": "2:5x"}, "ranks are 0 to 1"),
        ({"command": ("missing.py",)}, "script missing.py is not found"),
        ({"workers": 0}, "workers"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_runs(changes: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        options(**changes)


def test_an_earlier_comparison_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "results.json").touch()
    with pytest.raises(BadInput, match="holds an earlier comparison"):
        options(directory=tmp_path)


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = open_history(tmp_path, 1)
    moments = [Moment(time=5.0, steps=3, metrics={"loss": 0.5}), Moment(time=6.0, waited_s=0.25)]
    for moment in moments:
        write_moment(history, moment)
    history.close()
    with history_path(tmp_path, 1).open("ab") as file:
        file.write(b'{"time": 7.0, "ste')  # its writer was killed
    assert read_history(history_path(tmp_path, 1)) == moments
    assert read_history(history_path(tmp_path, 0)) == []


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    histories = [
        [
            Moment(time=100.0),
            Moment(time=102.0, steps=10, samples=40, metrics={"loss": 1.0}),
            Moment(time=104.0, steps=20, samples=80, waited_s=2.0, pushes=10, stale=5, metrics={"loss": 0.4}),
            Moment(time=109.0, steps=20, samples=80, waited_s=2.0, bytes_sent=7, pushes=30, stale=45),
        ],
        [
            Moment(time=100.5),
            Moment(time=103.0, steps=6, samples=20, dropped=1, metrics={"loss": 0.8}),
            Moment(time=105.0, steps=10, samples=40, dropped=2, bytes_sent=5, metrics={"loss": 0.2}),
        ],
    ]
    for rank, moments in enumerate(histories):
        history = open_history(tmp_path, rank)
        for moment in moments:
            write_moment(history, moment)
        history.close()
    run = read_run(tmp_path, 2, word="asp", seed=1, code=0, failure=None)
    # What follows the last step and the last waiting, 104 to 109 here, is no training.
    assert (run.seconds, run.steps, run.samples_per_s, run.idle) == (5.0, 15.0, 24.0, 0.2)
    assert (run.staleness, run.dropped, run.bytes_sent) == (1.5, 2, 12)
    # Each worker's last report, averaged over those that have reported; steps of both by then.
    wanted = [(2.0, 5.0, 1.0), (3.0, 8.0, 0.9), (4.0, 13.0, 0.6), (5.0, 15.0, 0.3)]
    found = [(p.seconds, p.steps, p.value) for p in run.series["loss"]]
    assert found == [pytest.approx(point) for point in wanted]
    assert run.reached(TARGET) == run.series["loss"][3]
    assert run.final("loss") == pytest.approx(0.3)
    assert run.final("auc") is None


def test_a_job_without_a_history_has_no_figures(tmp_path: Path) -> None:
    run = read_run(tmp_path, 2, word="asp", seed=0, code=1, failure="worker 0 failed")
    assert (run.series, run.staleness, run.idle, run.samples_per_s) == ({}, None, None, None)


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        ([1, 2, 3], [4, 5, 6], True),
        ([4, 5, 6], [1, 2, 3], True),
        ([1, 2, 3], [3, 4, 5], False),
        ([1, 2, 9], [4, 5, 6], False),
        ([1, 1, 1], [1, 1, 1], False),
        ([1, 2, 3], [math.inf] * 3, True),
        ([math.inf] * 3, [math.inf] * 3, False),
        ([1], [5], False),
        ([1, 2, None], [4, 5, 6], True),
        ([1, None, None], [4, 5, 6], False),
    ],
)
def test_a_difference_is_shown_where_intervals_do_not_touch(one: list, other: list, shown: bool) -> None:
    left, right = spread(one), spread(other)
    assert left is not None
    assert right is not None
    assert differ(left, right) is shown


def test_a_median_is_a_value_that_was_seen() -> None:
    assert spread([2.0, math.inf]) == Spread(math.inf, 2.0, math.inf, 2)
    assert spread([None, math.nan]) is None


def test_the_table_says_what_is_shown_and_what_was_not_reached() -> None:
    runs = [a_run("bsp", seed, 0.8, 0.4, seconds=1 + seed / 10) for seed in range(3)]
    runs += [a_run("asp", seed, 0.7, 0.3, seconds=0.5) for seed in range(3)]
    runs += [a_run("ssp:3", seed, 0.9, 0.39 + seed / 100, seconds=1.0) for seed in range(3)]
    runs += [a_run("hogwild", seed, 0.9, 0.8, seconds=1.0) for seed in range(3)]
    columns = figures(runs, "loss", TARGET)
    said = summary(runs, columns)
    differences = {word: row["seconds to loss <= 0.5"]["difference"] for word, row in said.items()}
    assert differences == {"bsp": None, "asp": "x 0.455", "ssp:3": "not shown", "hogwild": "differs"}
    assert said["bsp"]["seconds to loss <= 0.5"]["median"] == pytest.approx(2.2)
    assert said["ssp:3"]["final loss"]["difference"] == "not shown"
    assert said["hogwild"]["final loss"]["difference"] == "+0.4"
    shown = written(table(runs, columns))
    assert "not reached" in shown
    # Nothing is known of these, so they have no column.
    assert "staleness" not in shown
    assert "dropped" not in shown


def test_a_failed_run_is_counted_at_its_word() -> None:
    runs = [a_run("bsp", 0, 0.5), a_run("bsp", 1, 0.6), a_run("asp", 0, 0.5)]
    runs.append(Run(word="asp", seed=1, code=1, failure="worker 0 failed with code 1"))
    assert "1 failed" in written(table(runs, figures(runs, "loss", None)))


def test_a_failed_run_is_in_no_figure() -> None:
    runs = [a_run("bsp", 0, 0.5), a_run("bsp", 1, 0.6)]
    runs += [a_run("asp", seed, 0.4, seconds=2.0) for seed in range(2)]
    columns = figures(runs, "loss", TARGET)
    failed = [
        msgspec.structs.replace(a_run(word, 2, 9.0, 8.0, seconds=0.1), code=1, failure="worker 0 failed")
        for word in ("bsp", "asp", "ssp:3")
    ]
    said = summary([*runs, *failed], columns)
    assert said == {**summary(runs, columns), "ssp:3": {}}
    assert "1 failed" in written(table([*runs, *failed], columns))


def test_the_plot_in_the_terminal_goes_where_the_values_go() -> None:
    runs = [a_run("bsp", 0, 1.0, 0.5, 0.0), a_run("asp", 0, 1.0, 1.0, math.nan, 1.0)]
    lines = written(draw(runs, "loss", TARGET, width=60, height=8)).splitlines()
    assert lines[0].lstrip().startswith("1│")
    assert lines[7].lstrip().startswith("0│")
    assert "4 seconds" in lines[9]
    assert "bsp" in lines[10]
    # asp stays at the top, bsp goes from there to the bottom.
    top, bottom = (line.partition("│")[2] for line in (lines[0], lines[7]))
    assert top.rstrip()[-1] != "⠀"
    assert any(dot != "⠀" for dot in bottom[30:45])
    assert not any(dot != "⠀" for dot in bottom[:20])


def test_one_point_can_be_drawn() -> None:
    assert "bsp" in written(draw([a_run("bsp", 0, 0.5)], "loss", None, width=40))


def test_what_is_nowhere_finite_cannot_be_drawn() -> None:
    assert "no loss to draw" in written(draw([a_run("bsp", 0, math.nan)], "loss", None, width=40))


def test_the_picture(tmp_path: Path) -> None:
    runs = [a_run(word, seed, 1.0, 0.5, 0.2) for word in ("bsp", "asp") for seed in range(3)]
    write_png(tmp_path / "compare.png", runs, "loss", TARGET)
    data = (tmp_path / "compare.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert 5_000 < len(data) < 60_000


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(BadInput, match=r"pip install 'shoal\[plot\]'"):
        write_png(tmp_path / "compare.png", [a_run("bsp", 0, 1.0)], "loss", None)
