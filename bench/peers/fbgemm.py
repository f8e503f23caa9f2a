"""FBGEMM's fused CPU table, which TorchRec uses: the optimizer runs inside backward. Bags of one id each."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bench.contender import LR, Keys, Rows, Spec, first_rows


@dataclass(frozen=True)
class Fbgemm:
    optimizer: str  # "adagrad" or "rowwise_adagrad"
    threads: int

    abilities = frozenset({"pull", "push"})
    environment: ClassVar[dict[str, str]] = {}

    @property
    def name(self) -> str:
        return f"fbgemm {self.optimizer} t{self.threads}"

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("fbgemm_gpu") else "fbgemm-gpu-cpu is not installed"

    @contextmanager
    def serve(self, spec: Spec) -> Iterator[None]:
        yield None

    def connect(self, address: None, spec: Spec, rank: int) -> "_Store":
        return _Store(spec, self.optimizer, self.threads)


class _Store:
    """A pull is the forward pass; the push that follows is the fused backward of that pull."""

    def __init__(self, spec: Spec, optimizer: str, threads: int) -> None:
        import torch
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {"adagrad": EmbOptimType.EXACT_ADAGRAD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        torch.set_num_threads(threads)
        self._torch = torch
        self._table = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(spec.rows, spec.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=kinds[optimizer],
            learning_rate=LR,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
        )
        self._table.split_embedding_weights()[0].copy_(
            torch.from_numpy(first_rows(np.arange(spec.rows), spec.dim))
        )
        self._offsets: dict[int, Any] = {}
        self._output: Any = None

    def pull(self, keys: Keys) -> Any:
        if keys.size not in self._offsets:
            self._offsets[keys.size] = self._torch.arange(keys.size + 1)
        self._output = self._table(self._torch.from_numpy(keys), self._offsets[keys.size])
        return self._output.detach()

    def push(self, keys: Keys, grads: Rows) -> None:
        self._output.backward(self._torch.from_numpy(grads))

    def exchange_dense(self, grad: Rows) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass
