"""A job whose script says itself how its workers synchronise, by a policy that no word names."""

import json
from pathlib import Path

import pytest
from run_jobs import DEADLINE_S, Jobs, wait_until

from shoal.sync import Bounded, Each, Gradient, Policy, Staleness
from shoal.train.progress import progress_path

pytestmark = pytest.mark.process
OWN = Policy(Bounded(8), Each(), Staleness(), Gradient())
SCRIPT = """
import sys, time
from pathlib import Path
import torch
import shoal
from shoal.sync import Bounded, Each, Gradient, Policy, Staleness

worker = shoal.join(sync=Policy(Bounded(8), Each(), Staleness(), Gradient()))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
deadline = time.monotonic() + 120
for epoch in worker.epochs(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        while not Path(sys.argv[1]).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
"""


def test_it_is_shown_as_it_is_and_changes_its_size(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "state")
    jobs.environment["OMP_NUM_THREADS"] = "1"
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    news = f"the script's shoal.join says sync {OWN}; --sync bsp is not used"
    with jobs.started("--workers", "1", "--sync", "bsp", str(script), str(go)) as process:
        wait_until(lambda: jobs.path("job.json").exists() and jobs.record()["sync"] == str(OWN), process)
        shown = json.loads(jobs.shoal("status", "job", "--json").stdout)
        assert (shown["sync"], [event["text"] for event in shown["events"]]) == (str(OWN), [news])
        grown = jobs.shoal("scale", "job", "--workers", "2")
        assert (grown.returncode, grown.stdout) == (0, "job job goes on with 2 workers\n"), grown.stderr
        wait_until(progress_path(jobs.path("."), 1).exists, process)
        go.touch()
        output = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert f"[shoal] {news}\n" in output[1]
    assert "2 passes, every sample used once in each" in output[1]
    assert jobs.record()["sync"] == str(OWN)
