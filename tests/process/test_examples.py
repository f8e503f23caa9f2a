"""The examples in a small setting: each trains alone and by `shoal run`, and differs little from plain.py."""

import difflib
import importlib.util
import os
import random
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("digits", "movielens", "ctr")
RUN = ["-m", "shoal.cli", "run", "--workers", "2", "--servers", "2"]
LINES_MAX = 100
CHANGED_MAX = 5
SMALL = {
    "digits": ["--limit", "1500", "--epochs", "2", "--batch-size", "30"],
    "movielens": ["--limit", "20000", "--epochs", "2", "--batch-size", "200"],
    "ctr": ["--limit", "15000", "--epochs", "1", "--batch-size", "100"],
}


def run(*commands: list[str], cwd: Path, timeout: float = 100) -> list[str]:
    """What each printed, run side by side; all must end well and without a warning."""
    mine = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "XDG_STATE_HOME": str(cwd)}
    environment = {**os.environ, **mine}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen([sys.executable, *command], env=environment, cwd=cwd, **pipes)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        texts = [process.communicate(timeout=timeout)[0] for process in processes]
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
    return texts


def figures(what: str, text: str) -> list[float]:
    return [float(found.rstrip("%")) for found in re.findall(rf"{what} ([0-9.]+%?)", text)]


def check_digits(text: str) -> None:
    assert figures("accuracy", text)[-1] > 80, text  # guessing is right in 10 %


def check_movielens(text: str) -> None:
    mean, *_, last = figures("held-out RMSE", text)
    assert last < 0.93 * mean, text


def check_ctr(text: str) -> None:
    assert "SYNTHETIC" in text
    ceiling, *_, last = figures("AUC", text)
    assert 0.5 + 0.6 * (ceiling - 0.5) < last < ceiling, text  # chance is 0.5


CHECKS = {"digits": check_digits, "movielens": check_movielens, "ctr": check_ctr}


# On two workers all of them are trained below, and what is plain runs.
@pytest.mark.parametrize("name", ["ctr", *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES[:2])])
def test_it_trains_alone_as_plain_torch_does(name: str, tmp_path: Path) -> None:
    scripts = [[str(EXAMPLES / name / script), *SMALL[name]] for script in ("plain.py", "with_shoal.py")]
    for text in run(*scripts, cwd=tmp_path):
        CHECKS[name](text)


@pytest.mark.parametrize(("name", "shows"), [("digits", "accuracy"), ("movielens", "held-out RMSE")])
def test_plain_torch_runs(name: str, shows: str, tmp_path: Path) -> None:
    (text,) = run([str(EXAMPLES / name / "plain.py"), "--limit", "2000", "--epochs", "1"], cwd=tmp_path)
    assert figures(f"epoch 1: .*{shows}", text), text


@pytest.mark.parametrize(("name", "word"), [("digits", "average:5"), ("movielens", "bsp"), ("ctr", "asp")])
def test_it_trains_on_two_workers(name: str, word: str, tmp_path: Path) -> None:
    job = ["--sync", word, "--directory", str(tmp_path / "job")]
    command = [*RUN, *job, str(EXAMPLES / name / "with_shoal.py"), *SMALL[name]]
    (text,) = run(command, cwd=tmp_path)
    logs = [(tmp_path / "job/logs" / f"worker-{rank}.log").read_text() for rank in range(2)]
    for log in logs:
        CHECKS[name](log)
    epochs = [[line for line in log.splitlines() if line.startswith("epoch")] for log in logs]
    assert epochs[0] == epochs[1]  # an evaluation sees one model on every worker
    reported = {"digits": "accuracy", "movielens": "rmse", "ctr": "auc"}[name]
    assert re.search(rf"is done: .*samples/s.*, {reported} 0\.\d+", text), text


@pytest.mark.soak
def test_the_demo_kills_a_server_and_a_worker_and_its_verdict_is_good(tmp_path: Path) -> None:
    options = ["--limit", "45000", "--epochs", "3", "--batch-size", "256"]
    (text,) = run([str(EXAMPLES / "demo.py"), *options], cwd=tmp_path, timeout=900)
    assert "KILL -9 of server 0" in text
    assert "KILL -9 of worker 1" in text
    assert re.search(r"\S+% from Shoal's without kills: good", text), text


def criteo_file(path: Path, lines: int) -> None:
    """As Criteo's: tabs, integers that may be empty or negative, categories of eight hex digits or none."""
    draw = random.Random(7)
    with path.open("w") as file:
        for _ in range(lines):
            click = int(draw.random() < 0.3)
            counts = [draw.choice(["", "-1", str(draw.randrange(1000))]) for _ in range(13)]
            # The first category tells what was clicked, nine times in ten.
            telling = "68fd1e64" if (click == 1) == (draw.random() < 0.9) else "05db9164"
            others = [draw.choice(["", f"{draw.randrange(1 << 32):08x}"]) for _ in range(25)]
            file.write("\t".join([str(click), *counts, telling, *others]) + "\n")


def test_clicks_are_read_from_a_file_of_criteos_format(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    criteo_file(path, 2000)
    options = ["--file", str(path), "--epochs", "2", "--batch-size", "50"]
    (text,) = run([str(EXAMPLES / "ctr" / "with_shoal.py"), *options], cwd=tmp_path)
    assert "2,000 lines" in text
    assert "SYNTHETIC" not in text
    assert figures("AUC", text)[-1] > 0.75, text


def test_a_line_of_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("1,2,3\n")
    spec = importlib.util.spec_from_file_location("ctr_data", EXAMPLES / "ctr" / "data.py")
    assert spec is not None
    assert spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    with pytest.raises(SystemExit, match="line 1: 1 fields; Criteo has 40"):
        data.load(path, 100)


def code(path: Path) -> list[str]:
    """The lines without comments and blank ones. Docstrings count."""
    lines = (re.sub(r"\s*# .*", "", line).rstrip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_differs_little_from_plain_torch(name: str) -> None:
    plain, shoal = EXAMPLES / name / "plain.py", EXAMPLES / name / "with_shoal.py"
    for path in (plain, shoal):
        assert len(path.read_text().splitlines()) <= LINES_MAX
    changes = list(difflib.unified_diff(code(plain), code(shoal), n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
    assert 0 < max(added, removed) <= CHANGED_MAX, "\n".join(changes)
    assert "shoal" not in "\n".join(code(plain))
