"""Clients, tables and tensors as people use them, on an embedded store."""

import copy
import os
import pickle
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import shoal
from shoal.errors import BadInput, Closed, Mismatch, UnknownTable, WrongProcess

SGD = shoal.optim.SGD(lr=1.0)


@pytest.fixture
def client() -> Iterator[shoal.Client]:
    with shoal.connect("memory://") as client:
        yield client


@pytest.fixture
def table(client: shoal.Client) -> shoal.Table:
    return client.table("items", dim=2, optimizer=SGD)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_pull_gives_a_row_per_key_in_its_shape(table: shoal.Table) -> None:
    assert table.pull([[1, 2, 3], [4, 5, 6]]).shape == (2, 3, 2)
    assert table.pull(7).shape == (2,)
    assert table.pull([]).shape == table.pull(np.array([])).shape == (0, 2)
    table.push(np.array([]), ones(0, 2))


def test_a_pull_stores_nothing(table: shoal.Table) -> None:
    table.pull([1, 2, 3])
    assert len(table) == 0
    assert table  # a handle is true, however empty its table


def test_duplicates_are_summed(table: shoal.Table) -> None:
    table.push([7, 7, 9], ones(3, 2))
    assert table.pull([7, 8, 9]).tolist() == [[-2, -2], [0, 0], [-1, -1]]
    assert len(table) == 2


def test_keys_of_every_kind_name_the_same_rows(table: shoal.Table) -> None:
    table.push(np.array([-1], np.int64), ones(1, 2))
    for keys in (np.array([-1], np.int32), np.array([2**64 - 1], np.uint64), torch.tensor([-1])):
        assert table.pull(keys).tolist() == [[-1, -1]]


def test_torch_in_is_torch_out(table: shoal.Table) -> None:
    keys = torch.tensor([[1, 2]])
    table.push(keys, torch.ones(1, 2, 2, requires_grad=True))
    rows = table.pull(keys)
    assert isinstance(rows, torch.Tensor)
    assert rows.dtype == torch.float32
    assert rows.tolist() == [[[-1, -1], [-1, -1]]]


def test_out_is_filled_and_returned(table: shoal.Table) -> None:
    table.assign([1, 2], [[1, 2], [3, 4]])
    for out in (np.zeros((2, 2), np.float32), torch.zeros(2, 2)):
        assert table.pull([1, 2], out=out) is out
        assert out.tolist() == [[1, 2], [3, 4]]


def test_a_ticket_gives_its_result_again(table: shoal.Table) -> None:
    ticket = table.pull_async([1])
    assert ticket.wait(timeout=5) is ticket.wait()
    assert ticket.done()
    assert "items" in repr(ticket)
    assert table.push_async([1], ones(1, 2)).wait() is None


def test_lr_of_a_push_replaces_the_tables(table: shoal.Table) -> None:
    table.push([1], ones(1, 2), lr=0.5)
    table.push([1], ones(1, 2), lr=torch.tensor(0.25), step=3)
    table.push([1], ones(1, 2), 0.25)
    assert table.pull([1]).tolist() == [[-1, -1]]


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), "fast", True])
def test_a_bad_lr_is_refused_and_changes_nothing(table: shoal.Table, lr: float) -> None:
    with pytest.raises(BadInput, match="table 'items': lr is"):
        table.push([1], ones(1, 2), lr=lr)
    assert len(table) == 0


@pytest.mark.parametrize("step", [-1, 1.5, True])
def test_a_bad_step_is_refused(table: shoal.Table, step: int) -> None:
    with pytest.raises(BadInput, match="step is"):
        table.push([1], ones(1, 2), step=step)


@pytest.mark.parametrize(
    "grads", [ones(2, 2), ones(1, 3), ones(1), np.ones((1, 2)), np.array([[1, np.nan]], np.float32)]
)
def test_bad_gradients_are_refused_and_change_nothing(table: shoal.Table, grads: np.ndarray) -> None:
    with pytest.raises(BadInput, match="table 'items'"):
        table.push([1], grads)
    assert len(table) == 0


def test_a_gradient_that_is_not_finite_names_its_key(table: shoal.Table) -> None:
    grads = ones(3, 2)
    grads[1, 1] = np.inf
    with pytest.raises(BadInput, match="4242"):
        table.push([1, 4242, 3], grads)


def test_assign_takes_the_last_of_equal_keys(table: shoal.Table) -> None:
    table.assign([5, 5], [[1, 1], [2, 2]])
    assert table.pull(5).tolist() == [2, 2]


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_scan_gives_every_row_once(table: shoal.Table, batch_rows: int) -> None:
    keys = np.arange(-50, 50)
    table.assign(keys, np.stack([keys, keys], 1).astype(np.float32))
    batches = list(table.scan(batch_rows))
    assert all(0 < len(keys) <= batch_rows for keys, _ in batches)
    found = {
        int(key): value.tolist() for some, values in batches for key, value in zip(some, values, strict=True)
    }
    assert found == {int(key): [key, key] for key in keys}


def test_scan_of_nothing_and_of_nonsense(table: shoal.Table) -> None:
    assert list(table.scan()) == []
    with pytest.raises(BadInput, match="batch_rows"):
        table.scan(0)


def test_stats_count_rows(table: shoal.Table) -> None:
    table.push([1, 2], ones(2, 2))
    assert {"rows", "value_bytes", "state_bytes", "memory_bytes", "pushes", "pulls"} <= table.stats().keys()
    assert table.stats()["rows"] == 2


def test_reprs_show_what_is_known_here(client: shoal.Client, table: shoal.Table) -> None:
    assert repr(table) == "<Table 'items': dim=2, wire=fp32, SGD(lr=1.0)>"
    assert repr(client) == "<Client of memory://: open, tables=1>"
    client.close()
    assert repr(table) == "<Table 'items': closed, dim=2, wire=fp32, SGD(lr=1.0)>"
    assert "Closed" in repr(client)


def test_opening_by_name_alone_takes_what_exists(client: shoal.Client) -> None:
    made = client.table(
        "t", dim=3, optimizer=SGD, init=shoal.init.Constant(2), seed=9, placement=shoal.Range(0, 9)
    )
    found = client.table("t")
    assert (found.name, found.dim, found.optimizer, found.init) == ("t", 3, SGD, shoal.init.Constant(2))
    assert (found.seed, found.placement, found.wire) == (9, shoal.Range(0, 9), "fp32")
    assert found.pull([4]).tolist() == made.pull([4]).tolist() == [[2, 2, 2]]


def test_an_unknown_table_lists_those_that_exist(client: shoal.Client, table: shoal.Table) -> None:
    with pytest.raises(UnknownTable, match=r"no table 'itmes'; tables: 'items'\."):
        client.table("itmes")
    with pytest.raises(UnknownTable, match=r"no tensor 'w'; tensors: none yet"):
        client.tensor("w")


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"dim": 3}, "dim is 2, asked for 3"),
        ({"optimizer": shoal.optim.Adam()}, r"optimizer is SGD\(lr=1.0.*asked for Adam"),
        ({"optimizer": shoal.optim.SGD(lr=1.0, momentum=0.9)}, "asked for SGD.*momentum=0.9"),
        ({"init": shoal.init.Uniform(0.1)}, r"init is Zeros\(\), asked for Uniform"),
        ({"seed": 4}, "seed is 0, asked for 4"),
        ({"placement": shoal.Range(0, 4)}, "placement is by hash, asked for Range"),
    ],
)
def test_a_mismatch_shows_both(client: shoal.Client, table: shoal.Table, changed: dict, shown: str) -> None:
    with pytest.raises(Mismatch, match=shown):
        client.table("items", **changed)


def test_hyper_parameters_are_updated_by_opening_again(client: shoal.Client, table: shoal.Table) -> None:
    again = client.table("items", optimizer=shoal.optim.SGD(lr=0.5))
    again.push([1], ones(1, 2))
    assert again.optimizer.lr == 0.5
    assert table.pull([1]).tolist() == [[-0.5, -0.5]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": SGD}, "dim="),
        ({"dim": 2}, "optimizer="),
        ({"dim": 0, "optimizer": SGD}, "dim is 0; allowed: 1 to 4096"),
        ({"dim": 5000, "optimizer": SGD}, "dim is 5000"),
        ({"dim": 2.0, "optimizer": SGD}, "dim is 2.0"),
        ({"dim": True, "optimizer": SGD}, "dim is True"),
        ({"dim": 2, "optimizer": "sgd"}, "optimizer is 'sgd'"),
        ({"dim": 2, "optimizer": SGD, "init": 0.1}, "init is 0.1"),
        ({"dim": 2, "optimizer": SGD, "seed": -1}, "seed is -1"),
        ({"dim": 2, "optimizer": SGD, "wire": "fp8"}, "wire is 'fp8'; allowed: fp32, fp16, bf16, int8"),
        ({"dim": 2, "optimizer": SGD, "placement": (0, 5)}, "placement is"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused(client: shoal.Client, arguments: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        client.table("new", **arguments)
    with pytest.raises(UnknownTable):
        client.table("new")


@pytest.mark.parametrize("name", ["", "x" * 513, "a\nb", None, 5, b"x"])
def test_a_bad_name_is_refused_alike_everywhere(client: shoal.Client, name: str) -> None:
    said = "name is .*; allowed: printable text of 1 to 512 bytes"
    with pytest.raises(BadInput, match=said):
        client.table(name, dim=2, optimizer=SGD)
    with pytest.raises(BadInput, match=said):
        client.tensor(name, ones(2), optimizer=SGD)
    if name is not None:
        with pytest.raises(BadInput, match=said):
            shoal.connect("memory://", name=name)


def test_the_longest_name_is_taken(client: shoal.Client) -> None:
    assert client.table("x" * 512, dim=2, optimizer=SGD).pull([1]).shape == (1, 2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (300, 300)])
def test_a_tensor_keeps_its_shape(client: shoal.Client, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tensor = client.tensor("w", value, optimizer=SGD)
    tensor.push(np.ones(shape, np.float32))
    assert tensor.shape == shape
    assert np.array_equal(tensor.pull(), value - 1)


def test_a_tensor_opened_with_torch_gives_torch(client: shoal.Client) -> None:
    w = client.tensor("w", torch.nn.Parameter(torch.ones(2, 3)), optimizer=SGD)
    assert isinstance(w.pull(), torch.Tensor)
    assert isinstance(client.tensor("w").pull(), np.ndarray)
    out = torch.zeros(2, 3)
    assert client.tensor("w").pull(out=out) is out
    assert out.sum() == 6


def test_the_first_value_stays(client: shoal.Client) -> None:
    client.tensor("w", ones(3), optimizer=SGD)
    assert client.tensor("w", 5 * ones(3)).pull().tolist() == [1, 1, 1]


def test_a_tensor_can_be_assigned(client: shoal.Client) -> None:
    w = client.tensor("w", ones(2, 2), optimizer=SGD)
    w.assign(np.full((2, 2), 4, np.float32))
    w.push_async(ones(2, 2), lr=0.5, step=1).wait()
    assert w.pull_async().wait(5).tolist() == [[3.5, 3.5], [3.5, 3.5]]
    assert "shape=(2, 2)" in repr(w)


@pytest.mark.parametrize("value", [np.ones(3), ones(0), torch.ones(2, dtype=torch.float16), "x"])
def test_a_value_that_is_no_float32_tensor_is_refused(client: shoal.Client, value: object) -> None:
    with pytest.raises(BadInput, match="tensor 'w'"):
        client.tensor("w", value, optimizer=SGD)


def test_tensors_and_tables_share_their_names(client: shoal.Client, table: shoal.Table) -> None:
    with pytest.raises(Mismatch, match="table 'items' exists, and was asked for as a tensor"):
        client.tensor("items", ones(2), optimizer=SGD)
    client.tensor("w", ones(2), optimizer=SGD)
    with pytest.raises(Mismatch, match=r"shape is \(2,\), asked for \(3,\)"):
        client.tensor("w", ones(3))
    with pytest.raises(BadInput, match="grad has shape"):
        client.tensor("w").push(ones(3))


def test_two_embedded_stores_do_not_know_each_other(client: shoal.Client, table: shoal.Table) -> None:
    with shoal.connect("memory://") as other, pytest.raises(UnknownTable):
        other.table("items")


def test_a_closed_client_says_so(client: shoal.Client, table: shoal.Table) -> None:
    client.close()
    client.close()
    assert client.closed
    for call in (lambda: table.pull([1]), lambda: client.table("items"), lambda: len(table), client.stats):
        with pytest.raises(Closed, match=r"closed; call shoal\.connect"):
            call()


def test_a_forked_child_is_refused_with_the_reason(client: shoal.Client, table: shoal.Table) -> None:
    tickets = [table.pull_async([1]), table.pull_async([1])]
    tickets[0].wait()
    calls = [lambda: table.pull([1]), client.stats, *(t.wait for t in tickets), *(t.done for t in tickets)]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for call in calls:
                with pytest.raises(WrongProcess) as caught:
                    call()
                os.write(write, f"{caught.value}\n".encode())
        finally:
            os._exit(0)  # whatever it met, the child must not go on with the tests
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read().splitlines()
    assert len(said) == len(calls)
    assert all("forked" in line for line in said)
    assert table.pull([1]).shape == (1, 2)
    assert tickets[1].wait().shape == (1, 2)


def test_a_ticket_shows_nothing_of_its_inside(table: shoal.Table) -> None:
    assert {name for name in dir(table.pull_async([1])) if not name.startswith("_")} == {"done", "wait"}


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_nothing_can_be_pickled_or_copied(client: shoal.Client, table: shoal.Table, duplicate) -> None:
    tensor = client.tensor("w", ones(2), optimizer=SGD)
    for thing in (client, table, tensor, table.pull_async([1])):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            duplicate(thing)


def test_many_threads_share_a_client(client: shoal.Client) -> None:
    def work() -> None:
        mine = client.table("counter", dim=1, optimizer=SGD)
        client.tensor("w", ones(4), optimizer=SGD)
        for _ in range(50):
            mine.push([1, 2], -ones(2, 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert client.table("counter").pull([1, 2]).tolist() == [[200], [200]]


@pytest.mark.parametrize(
    "address",
    ["", "memory", "http://x:1", "localhost:80", None, 7, "shoal://", "shoal://host", "shoal://h:0"],
)
def test_a_bad_address_lists_what_is_allowed(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.delenv("SHOAL_ADDRESS", raising=False)
    with pytest.raises(BadInput, match=r"address is .*; allowed: .*shoal://host:port"):
        shoal.connect(address, token="t")


def test_the_environment_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ADDRESS", "memory://")
    with shoal.connect() as client:
        assert client.address == "memory://"


def test_connecting_without_a_token_names_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    monkeypatch.delenv("SHOAL_TOKEN_FILE", raising=False)
    with pytest.raises(BadInput, match=r"no token .* SHOAL_TOKEN"):
        shoal.connect("shoal://127.0.0.1:9")


@pytest.mark.parametrize(
    "options",
    [
        {"lane": "pigeon"},
        {"timeout": 0},
        {"name": ""},
        {"timeout": float("nan")},
        {"options": {}},
        {"options": {"timeout_s": 5}},
    ],
)
def test_bad_options_are_refused_by_name(options: dict) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(options))} is .*; (allowed|it must be)"):
        shoal.connect("memory://", **options)


def test_a_timeout_per_call_must_be_one(table: shoal.Table) -> None:
    with pytest.raises(BadInput, match="timeout is -1"):
        table.pull([1], timeout=-1)
    assert table.pull([1], timeout=5).shape == (1, 2)
