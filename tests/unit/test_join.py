"""`shoal.join`: who a process becomes, by its arguments and its environment."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from time import monotonic

import pytest
import torch

import shoal
from shoal.errors import BadInput, Unavailable
from shoal.sync import Bounded, Each, Gradient, Policy, Staleness

ALONE = """
import os, stat
import shoal

def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found += [name] if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode) else []
        except FileNotFoundError:  # that of the listing itself
            pass
    return found

before = sockets()
worker = shoal.join()
assert shoal.join() is worker and shoal.join("shoal://127.0.0.1:1") is worker
assert (worker.rank, worker.world_size) == (0, 1)
items = worker.client.table("items", dim=2, optimizer=shoal.optim.SGD(lr=1.0))
items.push([1], [[1.0, 1.0]])
worker.barrier()
assert sockets() == before, sockets()
worker.close()
assert shoal.join() is not worker
"""


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    """No test leaves a worker to the next."""
    yield
    from shoal.train.join import _joined

    for worker in _joined.values():
        worker.close()
    _joined.clear()


def test_alone_it_opens_no_sockets_and_a_second_call_gives_the_same_worker() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ADDRESS": "shoal://127.0.0.1:1", "RANK": "1", "WORLD_SIZE": "2", "SYNC": "asp", "BATCH": "each"}
    for name, value in said.items():
        monkeypatch.setenv(f"SHOAL_{name}", value)
    monkeypatch.setenv("SHOAL_SEED", "5")
    worker = shoal.join("memory://", rank=0, world_size=1, sync="ssp:3", batch="split")
    assert (worker.client.address, worker.rank, worker.world_size) == ("memory://", 0, 1)
    assert (str(worker.policy), worker.batch, worker.seed) == ("ssp:3", "split", 5)


def test_alone_it_trains_by_a_policy_of_the_users_own() -> None:
    own = Policy(Bounded(8), Each(), Staleness(), Gradient())
    worker = shoal.join(sync=own)
    assert (worker.policy, str(worker.policy)) == (own, repr(own))
    assert repr(worker) == f"<Worker 0 of 1: sync={own!r}, step=0>"
    models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    worker.prepare(models[0], optimizers[0])
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
    # A gradient that nothing came between has a staleness of 1: it is plain SGD.
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


@pytest.mark.parametrize("answers", [False, True])
def test_an_address_that_does_not_answer_is_named_in_time(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setenv("SHOAL_TIMEOUT_S", "1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:  # and never says a word
            server.listen()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        since = monotonic()
        with pytest.raises((Unavailable, shoal.errors.Timeout), match=where):
            shoal.join(f"shoal://{where}", token="0" * 64)
    assert monotonic() - since < 10


def test_several_workers_without_an_address_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"there are 2 workers and no address: .* `shoal run`"):
        shoal.join(rank=0, world_size=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match=r"there are 2 workers and no address: .* `shoal run`"):
        shoal.join()
    assert shoal.join("memory://").world_size == 2


def test_what_is_given_is_not_looked_for_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SYNC", "nope")
    monkeypatch.setenv("SHOAL_BATCH", "nope")
    with pytest.raises(BadInput, match="there is no word 'nope'"):
        shoal.join()
    worker = shoal.join(sync="asp", batch="each")
    assert (str(worker.policy), worker.batch) == ("asp", "each")


def test_a_second_join_that_asks_for_another_word_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    worker = shoal.join(sync="ssp:3", batch="each")
    assert shoal.join() is shoal.join(sync=" ssp:3") is worker
    assert not caplog.records
    assert shoal.join(sync="asp") is worker
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "join(sync=asp) gives the worker that has joined already, under ssp"
    ]
