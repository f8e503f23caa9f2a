"""Who a worker is by its environment: what `shoal run` writes is what a worker reads."""

from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.launch.options import JobOptions
from shoal.launch.worker_environment import JobAddress, worker_environment
from shoal.train.environment import WorkerEnvironment, read_worker_environment

ADDRESS = "shoal://127.0.0.1:7700"
WHERE = JobAddress(address=ADDRESS, token_file=Path("t"), directory=Path("/jobs/x"), master_port=29500)


def options(**changes: object) -> JobOptions:
    return JobOptions(command=(__file__,), **{"workers": 4, **changes})


def test_a_script_alone_is_one_worker() -> None:
    assert read_worker_environment({}) == WorkerEnvironment()
    assert read_worker_environment({"SHOAL_RANK": "", "RANK": ""}).alone


def test_what_is_written_is_read() -> None:
    written = worker_environment(options(sync="asp", batch="each", seed=9), WHERE, 3, {})
    assert read_worker_environment(written) == WorkerEnvironment(
        rank=3, world_size=4, address=ADDRESS, sync="asp", batch="each", seed=9, job=Path("/jobs/x")
    )


def test_torchrun_with_an_address() -> None:
    read = read_worker_environment({"RANK": "1", "WORLD_SIZE": "2", "SHOAL_ADDRESS": ADDRESS})
    assert (read.rank, read.world_size, read.address, read.sync) == (1, 2, ADDRESS, None)


def test_ours_goes_before_torchruns() -> None:
    environ = {"SHOAL_RANK": "1", "SHOAL_WORLD_SIZE": "2", "RANK": "5", "WORLD_SIZE": "8"}
    assert read_worker_environment({**environ, "SHOAL_ADDRESS": ADDRESS}).rank == 1


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"SHOAL_WORLD_SIZE": "2"}, "SHOAL_WORLD_SIZE is set and SHOAL_RANK is not"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK is 2; allowed: a whole number from 0 to 1, since WORLD_SIZE",
        ),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; allowed: a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"SHOAL_SYNC": "psb"}, "there is no word 'psb'"),
        ({"SHOAL_BATCH": "whole"}, "batch is 'whole'"),
        ({"SHOAL_SEED": "-1"}, "SHOAL_SEED is -1"),
    ],
)
def test_what_cannot_be_is_said(environ: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_worker_environment(environ)
    assert said in str(caught.value)


def test_a_worker_keeps_its_users_variables_but_not_another_clusters_token() -> None:
    base = {"HOME": "/h", "SHOAL_TOKEN": "x", "SHOAL_RANK": "8", "OMP_NUM_THREADS": "3"}
    written = worker_environment(options(), WHERE, 0, base)
    assert written["HOME"] == "/h"
    assert written["OMP_NUM_THREADS"] == "3"
    assert written["SHOAL_RANK"] == "0"
    assert "SHOAL_TOKEN" not in written


def test_workers_share_the_cores() -> None:
    assert worker_environment(options(workers=4096), WHERE, 0, {})["OMP_NUM_THREADS"] == "1"
