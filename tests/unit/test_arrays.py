"""What the store takes as keys and rows, and what it says of the rest."""

import hashlib

import numpy as np
import pytest
import torch

from shoal.errors import BadInput
from shoal.store.arrays import as_floats, as_keys, as_out, is_torch, to_torch

WHERE = "table 'x'"


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64])
def test_whole_numbers_become_int64(dtype: type) -> None:
    keys = as_keys(np.array([1, 2, 3], dtype), WHERE)
    assert keys.dtype == np.int64
    assert keys.tolist() == [1, 2, 3]


def test_int64_is_not_copied() -> None:
    keys = np.arange(4)
    assert as_keys(keys, WHERE) is keys


def test_uint64_keeps_its_bits() -> None:
    assert as_keys(np.array([2**64 - 1], np.uint64), WHERE).tolist() == [-1]
    assert as_keys([2**64 - 1], WHERE).tolist() == [-1]
    assert as_keys(np.array([5, 2**64 - 1, 7], np.uint64)[1:2], WHERE).tolist() == [-1]


def test_negative_int32_is_widened() -> None:
    assert as_keys(np.array([-7], np.int32), WHERE).tolist() == [-7]


@pytest.mark.parametrize("keys", [[1, 2], (1, 2), range(1, 3), np.array([9, 1, 9, 2])[1::2]])
def test_lists_ranges_and_views_are_fine(keys: object) -> None:
    array = as_keys(keys, WHERE)
    assert array.tolist() == [1, 2]
    assert array.flags.c_contiguous


def test_shapes_are_kept() -> None:
    assert as_keys(5, WHERE).shape == ()
    assert as_keys([[1, 2, 3], [4, 5, 6]], WHERE).shape == (2, 3)
    assert as_keys([], WHERE).shape == (0,)
    assert as_keys(np.arange(6).reshape(2, 3).T, WHERE).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    "keys",
    [
        np.array([1.0]),
        np.array([True]),
        np.array([1], np.int16),
        np.array([1], ">i8"),
        [1.5],
        [True],
        [1, False],
        ["a"],
        [[1], [2, 3]],
        [2**70],
        None,
        "abc",
        {1, 2},
        True,
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([1], dtype=torch.int16),
    ],
)
def test_other_keys_are_refused_with_the_table_named(keys: object) -> None:
    with pytest.raises(BadInput, match="table 'x': keys"):
        as_keys(keys, WHERE)


@pytest.mark.parametrize("keys", [[], (), range(0), np.array([]), np.float64([]), torch.tensor([])])
def test_nothing_is_no_keys_whatever_its_dtype(keys: object) -> None:
    array = as_keys(keys, WHERE)
    assert (array.dtype, array.shape) == (np.int64, (0,))
    assert as_keys(np.zeros((0, 3)), WHERE).shape == (0, 3)


def test_an_empty_mask_is_no_keys_array() -> None:
    with pytest.raises(BadInput, match="keys are bool"):
        as_keys(np.array([], bool), WHERE)


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ([2**65], 2**65),
        ([[2**65, 1]], 2**65),
        (2**65, 2**65),
        ([3, -(2**63) - 1], -(2**63) - 1),
        ([2**63, -1], 2**63),
        (np.array([2**65]), 2**65),
    ],
)
def test_a_key_of_more_than_64_bits_is_shown_with_the_range(keys: object, shown: int) -> None:
    with pytest.raises(BadInput, match=rf"keys hold {shown}; allowed: -2\*\*63 to 2\*\*63 - 1"):
        as_keys(keys, WHERE)


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (["ann"], "<U3"),
        (np.array([b"ann"]), r"\|S3"),
        (np.array(["ann"], object), "object"),
        ("ann", "a str"),
    ],
)
def test_strings_are_to_be_hashed(keys: object, shown: str) -> None:
    with pytest.raises(BadInput, match=rf"keys are {shown}; allowed: .*hashed.*blake2b"):
        as_keys(keys, WHERE)


def test_the_hash_that_is_advised_gives_keys() -> None:
    text = "ann"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    assert as_keys([key], WHERE).dtype == np.int64


def test_torch_keys_share_memory() -> None:
    keys = torch.tensor([3, 1, 4])
    assert as_keys(keys, WHERE).ctypes.data == keys.data_ptr()
    assert as_keys(torch.arange(6).view(2, 3).T, WHERE).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert is_torch(keys)
    assert not is_torch(np.arange(3))


def test_a_tensor_elsewhere_is_refused_and_told_the_way() -> None:
    with pytest.raises(BadInput, match=r"on meta; allowed: cpu\. Move them: keys\.cpu\(\)"):
        as_keys(torch.empty(3, dtype=torch.int64, device="meta"), WHERE)
    with pytest.raises(BadInput, match=r"grad is on meta; allowed: cpu\. Move it: grad\.cpu\(\)"):
        as_floats(torch.empty(3, device="meta"), (3,), "grad", WHERE)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        as_floats(torch.eye(2).to_sparse(), (2, 2), "grads", WHERE)


def test_float32_is_not_copied_and_grad_is_no_hindrance() -> None:
    rows = np.ones((2, 3), np.float32)
    assert as_floats(rows, (2, 3), "grads", WHERE) is rows
    tensor = torch.ones(2, 3, requires_grad=True)
    assert as_floats(tensor, (2, 3), "grads", WHERE).ctypes.data == tensor.data_ptr()


def test_views_of_rows_are_copied() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert as_floats(rows, (4, 3), "grads", WHERE).flags.c_contiguous


def test_lists_of_numbers_become_float32() -> None:
    assert as_floats([[1, 2.5]], (1, 2), "grads", WHERE).tolist() == [[1.0, 2.5]]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64, np.bool_])
def test_other_dtypes_are_refused_and_told_the_way(dtype: type) -> None:
    name = np.dtype(dtype).name
    advice = r"Convert them: grads.astype\(np.float32\), or grads.float\(\) in torch"
    with pytest.raises(BadInput, match=f"grads are {name}; allowed: float32. {advice}"):
        as_floats(np.zeros((1, 2), dtype), (1, 2), "grads", WHERE)
    with pytest.raises(BadInput, match=f"grad is {name}; allowed: float32. Convert it: grad.astype"):
        as_floats(np.zeros((1, 2), dtype), (1, 2), "grad", WHERE)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (6,), (2,)])
def test_a_wrong_shape_is_shown_with_the_right_one(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=r"grads have shape .* expected \(2, 3\)"):
        as_floats(np.zeros(shape, np.float32), (2, 3), "grads", WHERE)
    with pytest.raises(BadInput, match=r"value has shape .* expected \(2, 3\)"):
        as_floats(np.zeros(shape, np.float32), (2, 3), "value", WHERE)


def test_out_is_the_callers_memory() -> None:
    array, tensor = np.zeros((2, 3), np.float32), torch.zeros(2, 3)
    as_out(array, (2, 3), WHERE)[:] = 1
    as_out(tensor, (2, 3), WHERE)[:] = 2
    assert array.sum() == 6
    assert tensor.sum() == 12


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 3)),
        np.zeros((3, 2), np.float32),
        np.zeros((3, 2), np.float32).T,
        np.broadcast_to(np.float32(0), (2, 3)),
        [[0.0] * 3] * 2,
    ],
)
def test_out_that_cannot_be_filled_is_refused(out: object) -> None:
    with pytest.raises(BadInput, match="out"):
        as_out(out, (2, 3), WHERE)


def test_results_go_back_as_tensors_on_the_same_memory() -> None:
    array = np.zeros(3, np.float32)
    to_torch(array)[0] = 5
    assert array[0] == 5
