"""The README's training script, as printed: alone, and on two workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    text = README.read_text().split("## Train a model", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    path = tmp_path / "train.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", [[], ["-m", "shoal.cli", "run", "--workers", "2", "--servers", "2"]])
def test_it_trains(script: Path, tmp_path: Path, command: list[str]) -> None:
    where = ["--directory", str(tmp_path / "job")] if command else []
    environment = {**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, *where, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if command:
        assert "3,000 samples" in done.stdout + done.stderr  # three passes over a thousand, once each
