"""What happens around `optimizer.step()`: one strategy for each home of the dense parameters.

The user's step is hooked, never replaced. `before` runs first and decides what the optimizer then sees: where
the optimizer runs at the servers it sees no gradients at all and does nothing; where it runs here it sees
those
that it shall step with. `after` runs last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.store.many import PullItem, PushItem, pull_many, push_many
from shoal.store.tensor import Tensor
from shoal.train.parameters import Dense, FlatFloats, Stepped, TableUse, flat

if TYPE_CHECKING:
    from shoal.sync.policy import Policy
    from shoal.train.batch_rows import BatchRows
    from shoal.train.worker import Worker

__all__ = ["Strategy"]


class Strategy(ABC):
    """Common ground: the rows of tables always go to the servers, after every step."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        self.worker = worker
        self.policy = policy
        self.stepped: list[Stepped] = []
        self.tensors: dict[int, Tensor] = {}  # by id of the parameter
        self.batch_rows: list[BatchRows] = []  # told of what is pushed

    # What a strategy is made of.

    @abstractmethod
    def attach(self, stepped: Sequence[Stepped]) -> None:
        """Take over new parameters; on return they hold the job's values."""

    @abstractmethod
    def before(self, one: Stepped) -> None:
        """The gradients are there, the optimizer has not stepped."""

    def after(self, one: Stepped) -> None:  # noqa: B027 - optional
        """The optimizer has stepped (or did nothing, where it runs at the servers)."""

    def end_pass(self) -> None:  # noqa: B027 - optional
        """All steps of the pass are made by this worker: hand in what is still here."""

    def refresh(self) -> None:  # noqa: B027 - optional
        """The pass is over everywhere: bring the parameters up to date."""

    # Pieces that several strategies use.

    @property
    def dense(self) -> list[Dense]:
        return [dense for one in self.stepped for dense in one.dense]

    def open_tensors(self, entries: Sequence[tuple[Dense, Any]]) -> None:
        """Register dense parameters with these server optimizers and take over the values that are there."""
        for dense, optimizer in entries:
            tensor = self.worker.client.tensor(dense.name, flat(dense.parameter), optimizer=optimizer)
            self.tensors[id(dense.parameter)] = tensor

    def pull_dense(self) -> None:
        """Write the servers' values into the parameters, in place."""
        direct: list[tuple[Dense, FlatFloats]] = []
        pulls: list[PullItem] = []
        for dense in self.dense:
            memory = _memory(dense.parameter)
            direct.append((dense, memory))
            pulls.append((self.tensors[id(dense.parameter)], None, memory))
        pull_many(self.worker.client, pulls)
        for dense, memory in direct:
            if not _aliases(dense.parameter):
                dense.parameter.data.copy_(torch.from_numpy(memory).view(dense.parameter.shape))

    def row_pushes(self, tables: Sequence[TableUse], factor: float = 1.0) -> list[PushItem]:
        """The accumulated gradients of tables, scaled."""
        pushes: list[PushItem] = []
        for use in tables:
            found = use.module.gradients()
            if found is None or not use.module.weight.requires_grad:
                continue
            keys, grads = found
            pushes.append((use.module.table, keys, grads if factor == 1.0 else grads * factor, use.lr))
        for rows in self.batch_rows:
            rows.pushed(pushes)
        return pushes

    def push(
        self, pushes: Sequence[PushItem], *, step: int, staged: bool = False, by_staleness: bool = False
    ) -> None:
        """Send one step's pushes and wait until they are applied (or staged) everywhere."""
        if pushes:
            push_many(
                self.worker.client,
                pushes,
                step=step,
                stage_rank=self.worker.rank if staged else -1,
                by_staleness=by_staleness,
            )


def _aliases(parameter: torch.nn.Parameter) -> bool:
    """Whether its memory can be written from outside torch."""
    data = parameter.data
    return data.device.type == "cpu" and data.dtype == torch.float32 and data.is_contiguous()


def _memory(parameter: torch.nn.Parameter) -> FlatFloats:
    """Memory for the values: the parameter's own where that is possible."""
    data = parameter.data
    return data.view(-1).numpy() if _aliases(parameter) else flat(torch.empty_like(data, dtype=torch.float32))
