"""torch alone in one process: `nn.Embedding(sparse=True)`, forward, backward, Adagrad."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bench.contender import LR, Keys, Rows, Spec, first_rows


@dataclass(frozen=True)
class TorchEmbedding:
    threads: int

    abilities = frozenset({"pull", "push"})
    environment: ClassVar[dict[str, str]] = {}

    @property
    def name(self) -> str:
        return f"torch embedding t{self.threads}"

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("torch") else "torch is not installed"

    @contextmanager
    def serve(self, spec: Spec) -> Iterator[None]:
        yield None

    def connect(self, address: None, spec: Spec, rank: int) -> "_Store":
        return _Store(spec, self.threads)


class _Store:
    """A pull is the forward pass; the push that follows is backward and step of that pull."""

    def __init__(self, spec: Spec, threads: int) -> None:
        import torch

        warnings.filterwarnings("ignore", message="Sparse invariant checks", category=UserWarning)
        torch.set_num_threads(threads)
        self._torch = torch
        rows = torch.from_numpy(first_rows(np.arange(spec.rows), spec.dim))
        self._embedding = torch.nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)
        self._optimizer = torch.optim.Adagrad(self._embedding.parameters(), lr=LR)
        self._output: Any = None

    def pull(self, keys: Keys) -> Any:
        self._output = self._embedding(self._torch.from_numpy(keys))
        return self._output.detach()

    def push(self, keys: Keys, grads: Rows) -> None:
        self._optimizer.zero_grad()
        self._output.backward(self._torch.from_numpy(grads))
        self._optimizer.step()

    def exchange_dense(self, grad: Rows) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass
