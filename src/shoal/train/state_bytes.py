"""Nested Python values with tensors in them as bytes, and back. Nothing of it is ever executed."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save

from shoal.checkpoint.states import TREE, from_plain


def to_bytes(value: Any) -> bytes:
    """`value` is made of dicts, lists, tuples, numbers, texts, None and tensors.

    >>> from_bytes(to_bytes({0: (torch.ones(2), None)}))
    {0: (tensor([1., 1.]), None)}
    """
    return bytes(save(copied(value)))


def copied(value: Any) -> dict[str, torch.Tensor]:
    """The tensors of that file, as they are now: what becomes of `value` later does not change them."""
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_plain(value, tensors)).encode()
    tensors[TREE] = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    return tensors


def from_bytes(data: bytes) -> Any:
    """What `to_bytes` was given; tensors are in CPU memory."""
    tensors = load(data)
    return from_plain(json.loads(tensors[TREE].numpy().tobytes()), tensors)


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON: lists begin with what they are, so that all else is itself."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return ["tensor", name]
    if isinstance(value, dict):
        return ["dict", *([key, _plain(one, tensors)] for key, one in value.items())]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_plain(one, tensors) for one in value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent to another worker: {value!r}")
