"""worker.save and worker.load, with workers as threads."""

from pathlib import Path

import pytest
import torch
from tests.train.crew import run_workers
from tests.train.models import ShoalModel, dense_values, loader, steps

from shoal.errors import BadInput
from shoal.train.worker import Worker


@pytest.mark.parametrize("word", ["bsp", "asp"])
def test_a_worker_comes_back_to_what_it_saved(tmp_path: Path, word: str) -> None:
    def values(model: ShoalModel) -> list[list[float]]:
        rows = model.emb(torch.arange(23)).detach()
        return [rows.flatten().tolist(), *(p.detach().flatten().tolist() for p in model.linear.parameters())]

    def script(worker: Worker) -> tuple[list[list[float]], ...]:
        model = ShoalModel()
        dense_values(model)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        model, optimizer, batches = worker.prepare(model, optimizer, loader(60, 12, True))
        list(steps(model, optimizer, batches, 1))
        worker.barrier()
        if worker.rank == 0:
            worker.save(str(tmp_path))
        worker.barrier()
        before = values(model)
        worker.barrier()
        list(steps(model, optimizer, batches, 1))
        worker.barrier()
        between = values(model)
        worker.load(str(tmp_path))
        return before, between, values(model)

    for before, between, after in run_workers(2, script, word):
        assert before == after
        assert between != before


def test_words_with_the_model_on_workers_say_what_to_save_instead() -> None:
    def script(worker: Worker) -> None:
        with pytest.raises(BadInput, match=r"dense parameters lie on the workers.*state_dict"):
            worker.save("file:///nowhere")

    run_workers(2, script, "average:2")
