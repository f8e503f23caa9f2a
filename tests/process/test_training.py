"""Training by real processes: one job for each word, started as users do."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.train.models import TorchModel, dense_values, initial_rows, loader, steps

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training_script.py")
WORDS = [
    "bsp",
    "quorum:0.5",
    "ssp:1",
    "delay:1",
    "asp",
    "asp,scale=staleness",
    "softsync:2",
    "dcasgd:0.04",
    "downpour:2,2",
    "average:4",
    "bmuf:4",
    "easgd:3",
    "diloco:4",
    *(pytest.param(word, marks=pytest.mark.gloo) for word in ("allreduce", "gossip", "hogwild")),
]


@pytest.mark.parametrize("word", WORDS)
def test_a_job_of_two_workers_and_two_servers(word: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal.cli", "run", "--workers", "2", "--servers", "2", "--sync", word]
    command += ["--directory", str(tmp_path / "job"), str(SCRIPT), str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for one in found:
        assert one["final"] < 1.2, found
        assert one["steps"] > 0
        assert one["samples"] > 0
        assert one["done"] == one["units"]
        assert one["mean"] == pytest.approx(sum(f["final"] for f in found) / 2, rel=1e-5)
    assert all(one["once"] for one in found)
    # The workers see one model when a pass is over.
    assert found[0]["final"] == pytest.approx(found[1]["final"], rel=1e-5)
    if word in ("bsp", "allreduce"):
        for rank in range(2):
            values = torch.load(tmp_path / f"{rank}.pt")
            torch.testing.assert_close(values, in_one_process(), rtol=1e-4, atol=1e-6)


@cache
def in_one_process() -> dict[str, torch.Tensor]:
    """What the script makes of the same data with plain torch."""
    model = TorchModel(initial_rows())
    dense_values(model)
    list(steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(90, 12, True), 6))
    named = {name: value.detach() for name, value in model.named_parameters()}
    return {"rows" if name == "emb.weight" else name: value for name, value in named.items()}
