"""An embedded store that shares torch's threads."""

import numpy as np
import pytest
import torch

import shoal
from shoal.nn import torch_threads


def pushed(share: bool) -> np.ndarray:
    client = shoal.connect("memory://")
    table = client.table("t", dim=8, optimizer=shoal.optim.Adagrad(lr=0.1), seed=3)
    if share:
        torch_threads.share_threads(client)
    rng = np.random.default_rng(0)
    for _ in range(3):
        keys = rng.integers(0, 20_000, 50_000)
        table.push(keys, rng.standard_normal((len(keys), 8)).astype(np.float32))
    rows = table.pull(np.arange(20_000))
    client.close()
    return rows


def test_values_are_the_same_bit_for_bit_with_torchs_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert np.array_equal(pushed(share=True), pushed(share=False))
    finally:
        torch.set_num_threads(before)


def test_a_refused_push_raises_on_the_caller_with_torchs_threads():
    client = shoal.connect("memory://")
    table = client.table("t", dim=8, optimizer=shoal.optim.SGD(lr=1.0))
    torch_threads.share_threads(client)
    grads = np.ones((50_000, 8), np.float32)
    grads[49_999, 7] = np.inf
    with pytest.raises(shoal.errors.BadInput, match="49999"):
        table.push(np.arange(50_000), grads)
    assert len(table) == 0


def test_a_runtime_that_is_not_loaded_is_not_borrowed_from():
    client = shoal.connect("memory://")
    assert client._session.core.borrow_openmp("/nowhere/libgomp.so.1") is False
