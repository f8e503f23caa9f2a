"""The click model by what people can pick today: torch RPC, torch DDP, torch and FBGEMM in one process.

Each is a function that trains in a worker's process and gives the ends of its steps. All of them do a step's
work in as few calls as their system allows.
"""

import importlib.util
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from bench.click.model import BATCH, DIM, FIELDS, IDS, LR, Clicks, Stamps, Tower, first_rows, loss_of
from bench.loops import Gate
from bench.peers.torch_rpc import train_exchange


def missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


def dense_elements() -> int:
    return sum(parameter.numel() for parameter in Tower().parameters())


def by_rpc(store: Any, gate: Gate, rank: int, steps: int) -> list[float]:
    """Rows and dense parameters at a torch RPC server: a call for the rows, one for all gradients."""
    tower, data, stamps = Tower(), Clicks(steps, seed=rank), Stamps()
    parameters = list(tower.parameters())
    if rank == 0:  # the server's tensor begins as zeros
        store.exchange_dense((torch.nn.utils.parameters_to_vector(parameters).detach() / -LR).numpy())
    gate()
    for ids, inputs, clicked in data:
        keys = ids.reshape(-1)
        rows = store.pull(keys.numpy()).requires_grad_()
        loss = loss_of(tower(rows, inputs), clicked)
        *of_dense, of_rows = torch.autograd.grad(loss, [*parameters, rows])
        flat = torch.cat([grad.reshape(-1) for grad in of_dense])
        torch.nn.utils.vector_to_parameters(train_exchange(keys, of_rows, flat), parameters)
        stamps.step()
    return stamps.ends


class OneTable(torch.nn.Module):
    """The model with its rows in a module of its own: torch's or FBGEMM's."""

    def __init__(self, rows: torch.nn.Module, offsets: torch.Tensor) -> None:
        super().__init__()
        self.rows, self.tower = rows, Tower()
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, ids: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.tower(self.rows(ids.reshape(-1), self.offsets), inputs)
        return logits


def _torch_bags() -> torch.nn.EmbeddingBag:
    warnings.filterwarnings("ignore", message="Sparse invariant checks", category=UserWarning)
    return torch.nn.EmbeddingBag.from_pretrained(first_rows(), freeze=False, sparse=True, mode="sum")


def _train(model: torch.nn.Module, optimizers: Iterable[Any], data: Clicks) -> list[float]:
    stamps = Stamps()
    for ids, inputs, clicked in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model(ids, inputs), clicked).backward()
        for optimizer in optimizers:
            optimizer.step()
        stamps.step()
    return stamps.ends


def by_ddp(port: int, gate: Gate, rank: int, steps: int) -> list[float]:
    """Every worker has all rows; DDP exchanges sparse gradients over gloo. `batch each`, as Shoal's."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        model = OneTable(_torch_bags(), torch.arange(BATCH * FIELDS))
        rows, dense = model.rows.parameters(), model.tower.parameters()
        optimizers = [torch.optim.Adagrad(rows, lr=LR), torch.optim.SGD(dense, lr=LR)]
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        data = Clicks(steps, seed=rank)
        gate()
        return _train(parallel, optimizers, data)
    finally:
        dist.destroy_process_group()


def by_torch(_: None, gate: Gate, threads: int, steps: int) -> list[float]:
    """`nn.EmbeddingBag(sparse=True)` and Adagrad in one process."""
    torch.set_num_threads(threads)
    model = OneTable(_torch_bags(), torch.arange(BATCH * FIELDS))
    optimizers = [
        torch.optim.Adagrad(model.rows.parameters(), lr=LR),
        torch.optim.SGD(model.tower.parameters(), lr=LR),
    ]
    data = Clicks(steps)
    gate()
    return _train(model, optimizers, data)


def by_fbgemm(_: None, gate: Gate, threads: int, steps: int, optimizer: str) -> list[float]:
    """FBGEMM's fused CPU table in one process: its optimizer runs within backward."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {"Adagrad": EmbOptimType.EXACT_ADAGRAD, "RowwiseAdagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    torch.set_num_threads(threads)
    table = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(IDS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=kinds[optimizer],
        learning_rate=LR,
        eps=1e-10,
        pooling_mode=PoolingMode.SUM,
    )
    table.split_embedding_weights()[0].copy_(first_rows())
    model = OneTable(table, torch.arange(BATCH * FIELDS + 1))
    data = Clicks(steps)
    gate()
    return _train(model, [torch.optim.SGD(model.tower.parameters(), lr=LR)], data)


def tower_alone(_: None, gate: Gate, threads: int, steps: int) -> list[float]:
    """The model without its rows: what no system can be faster than."""
    torch.set_num_threads(threads)
    tower, rows = Tower(), torch.zeros(BATCH * FIELDS, DIM, requires_grad=True)
    optimizer, data, stamps = torch.optim.SGD(tower.parameters(), lr=LR), Clicks(steps), Stamps()
    gate()
    for _ids, inputs, clicked in data:
        optimizer.zero_grad()
        rows.grad = None
        loss_of(tower(rows, inputs), clicked).backward()
        optimizer.step()
        stamps.step()
    return stamps.ends
