"""Shoal: a parameter server for PyTorch. Python decides, C++ moves bytes and updates rows.

>>> import numpy as np, shoal
>>> client = shoal.connect("memory://")
>>> items = client.table("items", dim=8, optimizer=shoal.optim.Adagrad(lr=0.05))
>>> items.push([3, 1, 4], np.ones((3, 8), np.float32))
>>> items.pull([3, 1, 4]).shape
(3, 8)
"""

import importlib as _importlib
import typing as _typing

from shoal import errors, init, optim
from shoal.config import ClientOptions
from shoal.errors import (
    BadInput,
    Closed,
    Fenced,
    Mismatch,
    Refused,
    ShoalError,
    Timeout,
    Unavailable,
    UnknownTable,
)
from shoal.fleet.local import LocalCluster
from shoal.placement import Range
from shoal.store.client import Client
from shoal.store.connect import connect
from shoal.store.table import Table
from shoal.store.tensor import Tensor
from shoal.store.ticket import Ticket

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Client",
    "ClientOptions",
    "Closed",
    "Fenced",
    "LocalCluster",
    "Mismatch",
    "Range",
    "Refused",
    "ShoalError",
    "Table",
    "Tensor",
    "Ticket",
    "Timeout",
    "Unavailable",
    "UnknownTable",
    "__version__",
    "connect",
    "errors",
    "init",
    "join",
    "nn",
    "optim",
    "sync",
]

if _typing.TYPE_CHECKING:
    from shoal import nn, sync
    from shoal.train.join import join


def __getattr__(name: str) -> _typing.Any:
    """`shoal.nn`, `shoal.join` and `shoal.sync`, at their first use: the first two import torch."""
    if name in ("nn", "sync"):
        return _importlib.import_module(f"shoal.{name}")
    if name == "join":
        return _importlib.import_module("shoal.train.join").join
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
