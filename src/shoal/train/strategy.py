"""What happens around `optimizer.step()`: one strategy for each home of the dense parameters.

The user's step is hooked, never replaced. `before` runs first and decides what the optimizer then sees: where
the optimizer runs at the servers it sees no gradients at all and does nothing; where it runs here it sees
those that it shall step with. `after` runs last, and then gradients are shown again.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.errors import BadInput
from shoal.nn.module import row_gradients
from shoal.store.many import PullItem, PushItem, pull_many, push_many
from shoal.store.tensor import Tensor
from shoal.sync import Round
from shoal.train.clip import scale_gradients
from shoal.train.parameters import Dense, FlatFloats, Stepped, TableUse, check_finite, flat, is_finite
from shoal.train.twins import check_twin, settings_of, twin_of

if TYPE_CHECKING:
    from shoal.sync.policy import Policy
    from shoal.train.batch_rows import BatchRows
    from shoal.train.share import Share
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.worker")
# In which all values are looked at. Scripts that change parameters by hand do it from the first step on.
_EARLY_STEPS = 3


class Strategy(ABC):
    """Common ground: the rows of tables always go to the servers, after every step."""

    # Whether clipping is of a round's mean gradient, which is known within the step.
    clips_rounds = False

    def __init__(self, worker: Worker, policy: Policy) -> None:
        self.worker = worker
        self.policy = policy
        self.stepped: list[Stepped] = []
        self.tensors: dict[int, Tensor] = {}  # by id of the parameter
        self.batch_rows: list[BatchRows] = []  # told of what is pushed
        self._marks: dict[int, tuple[int, int | None]] = {}  # of parameters, as Shoal left them

    @property
    def weighs_dense(self) -> bool:
        """Whether a worker's trust counts when dense parameters are exchanged, and not as a factor of their
        gradient.
        """
        return self.policy.meets

    # What a strategy is made of.

    @abstractmethod
    def attach(self, stepped: Sequence[Stepped]) -> None:
        """Take over new parameters; on return they hold the job's values."""

    @abstractmethod
    def before(self, one: Stepped) -> None:
        """The gradients are there, the optimizer has not stepped."""

    def after(self, one: Stepped) -> None:  # noqa: B027 - optional
        """The optimizer has stepped (or did nothing, where it runs at the servers)."""

    def drop(self, dense: Sequence[Dense]) -> None:  # noqa: B027 - optional
        """These parameters are given other values: what was to be sent of their old ones is void."""

    def end_pass(self) -> None:  # noqa: B027 - optional
        """All steps of the pass are made by this worker: hand in what is still here. That is a step of its
        own, by whose number a checkpoint tells what is of before and of after it.
        """

    def refresh(self) -> None:  # noqa: B027 - optional
        """The pass is over everywhere: bring the parameters up to date."""

    def rested(self) -> None:
        """This worker waited at the end of a pass while others made steps, and takes part again."""
        self.refresh()

    def rejoined(self) -> None:
        """This worker was evicted, and is back: go on with the servers' values."""
        self.drop(self.dense)
        for one in self.stepped:
            one.steps = 0
        self.forget_rows()
        self.refresh()

    # Whether the model lies on the workers alone: then a worker without a state takes another's; and whether
    # they change it together, so that all must be at the same step in a checkpoint.
    alone = together = False

    @property
    def between_steps(self) -> bool:
        """Whether what lies here is what goes with the worker's clock."""
        return True

    def state(self) -> list[Any]:
        """What lies on this worker alone, by optimizer: for one that takes its place, and for checkpoints."""
        return [one.state() for one in self.stepped]

    def take(self, states: Sequence[Any], since: int = 0) -> None:
        """Go on with such a state, for optimizers from number `since` on."""
        for one, state in zip(self.stepped[since:], states[since:], strict=False):
            one.take(state)

    # Pieces that several strategies use.

    @property
    def dense(self) -> list[Dense]:
        return [dense for one in self.stepped for dense in one.dense]

    def open_tensors(self, entries: Sequence[tuple[Dense, Any]]) -> None:
        """Register dense parameters with these server optimizers and take over the values that are there."""
        client, retune = self.worker.client, self.worker.sets_settings
        for dense, optimizer in entries:
            value = flat(dense.parameter).reshape(dense.parameter.shape)
            tensor = client.tensor(dense.name, value, optimizer=optimizer, retune=retune)
            self.tensors[id(dense.parameter)] = tensor._flat()

    def open_twins(self, stepped: Sequence[Stepped]) -> None:
        """Take over what these optimizers step: the servers do it from now on, in float32."""
        for one in stepped:
            check_twin(one.optimizer)
            for dense in one.dense:
                if dense.parameter.dtype != torch.float32:
                    raise BadInput(
                        f"parameter {dense.name} is {dense.parameter.dtype}; the servers hold float32. Keep "
                        f"it in float32 (autocast computes in less), or take a sync word whose parameters "
                        f"stay on the workers"
                    )
            self.open_tensors([(dense, twin_of(one.optimizer, dense.group)) for dense in one.dense])
        self.stepped.extend(stepped)

    def loaded(self, module: torch.nn.Module) -> None:
        """`load_state_dict` gave this module other values: worker 0's are everybody's from now on."""
        own = {id(parameter) for parameter in module.parameters(recurse=False)} & self.tensors.keys()
        dense = [entry for entry in self.dense if id(entry.parameter) in own]
        if not dense:
            return
        if self.worker.resumed.passes_over:  # it has what it had, written anew
            self.assign_once(lambda: None)
            self.mark(dense)
            return
        self.drop(dense)
        self.assign_once(lambda: self.assign(dense))
        self.pull_dense(dense)

    def assign_once(self, assign: Callable[[], None]) -> None:
        """All workers are here: worker 0 assigns, unless an earlier life of it has done so."""
        self.worker.barrier()  # steps that others still make are of before
        if self.worker.rank == 0 and not self.worker.resumed.passes_over and self.worker.comes_first():
            assign()
        self.worker.barrier()
        self.forget_rows()

    def forget_rows(self) -> None:
        """Rows have other values than by this worker's pushes: what was pulled ahead is out of date."""
        for rows in self.batch_rows:
            rows.forget()

    def assign(self, dense: Sequence[Dense]) -> None:
        """Make what these parameters hold here the servers' values."""
        for ticket in [self.tensors[id(d.parameter)].assign_async(flat(d.parameter)) for d in dense]:
            ticket.wait()

    def mark(self, dense: Sequence[Dense]) -> None:
        """Remember these parameters as they are: what differs later was changed by the script."""
        early = self.worker.steps_made < _EARLY_STEPS
        for entry in dense:
            self._marks[id(entry.parameter)] = (
                entry.parameter._version,
                _digest(entry.parameter) if early else None,
            )

    def _carry_changes(self) -> None:
        """What the script changed in place since the last step (a clamp of weights), and the next pull would
        undo, is the servers' too, where there is one worker. Of several each could have changed its own.
        """
        changed = []
        for dense in self.dense:
            version, digest = self._marks[id(dense.parameter)]
            if dense.parameter._version != version:
                changed.append(dense)
            elif digest is not None and digest != _digest(dense.parameter):
                raise BadInput(
                    f"parameter {dense.name} was changed through .data, which nobody sees; change it under "
                    f"torch.no_grad()"
                )
        if changed and self.worker.world_size > 1:
            raise BadInput(
                f"parameter {changed[0].name} was changed in place, outside of optimizer.step(). Under "
                f"{self.policy} it lies at the servers, and what a worker changes alone would be undone. "
                f"Change it before prepare, or by load_state_dict on all workers, or take a sync word whose "
                f"parameters lie on the workers, such as allreduce"
            )
        self.drop(changed)
        self.assign(changed)
        if changed:  # as they are now: what this worker wrote itself is no staleness
            self.pull_dense(changed)

    def pull_dense(self, among: Sequence[Dense] | None = None) -> None:
        """Write the servers' values into these parameters (or all), in place."""
        direct: list[tuple[Dense, FlatFloats]] = []
        pulls: list[PullItem] = []
        among = self.dense if among is None else among
        for dense in among:
            memory = _memory(dense.parameter)
            direct.append((dense, memory))
            pulls.append((self.tensors[id(dense.parameter)], None, memory))
        pull_many(self.worker.client, pulls)
        for dense, memory in direct:
            if not _aliases(dense.parameter):
                dense.parameter.data.copy_(torch.from_numpy(memory).view(dense.parameter.shape))
        self.mark(among)

    def begin(self, one: Stepped) -> Share:
        """What the step is made of. Gradients are then those of a mean loss, as autocast did not scale them;
        where they are not finite, of a batch without samples, or of a worker that is refused, there are none,
        and the worker abstains: a gradient of zeros would move what has momentum or decays.

        What it is trusted with is in the share's weight, for rounds; elsewhere it is a factor.
        """
        share = self.worker.take_share(one.optimizer)
        if self.worker.rank == 0:
            self._follow(one)
        factor, trust = _unscale(one.optimizer), self.worker.trust
        nan = factor is not None and self.worker.bears_nan and not is_finite(one)
        if nan or factor is None or not trust:
            self.worker.progress.step_counts_nothing(self.worker.steps_made - 1 if nan else None)
            one.hide_gradients()
            share.weight = 0.0
            return share
        share.weight *= trust
        if share.samples == share.weight == 0:  # a mean over nothing is no number
            one.hide_gradients()
        if self.policy.dense_home == "server":  # the store looks at what it is sent
            self._carry_changes()
        else:
            check_finite(one)
        if one.reduction == "sum" and share.samples:
            # As if the mean of this part were that of the whole batch, whose sum it then stands for.
            factor *= share.global_samples / share.samples
        dense, tables = (d.parameter for d in one.dense), (use.module for use in one.tables)
        scale_gradients(dense, (), factor if self.weighs_dense else factor * trust)
        scale_gradients((), tables, factor if self.policy.rows_policy.meets else factor * trust)
        return share

    def _follow(self, one: Stepped) -> None:
        """Other hyper-parameters than the servers have are theirs from this step on. Worker 0's are taken: of
        a round the step cannot be made before it is here.
        """
        before, one.settings = one.settings, settings_of(one.optimizer)
        if one.settings == before:
            return
        client = self.worker.client
        for index, (was, now) in enumerate(zip(before, one.settings, strict=True)):
            if was == now:
                continue
            for dense in one.dense if self.policy.dense_home == "server" else ():
                if dense.index == index:
                    client.tensor(dense.name, optimizer=twin_of(one.optimizer, dense.group))
            for use in one.tables:
                if use.index == index and use.module.optimizer is None:
                    twin = twin_of(one.optimizer, one.optimizer.param_groups[index])
                    client.table(use.module.table_name, optimizer=twin)

    def push_rows(self, one: Stepped, share: Share, more: Sequence[PushItem] = ()) -> None:
        """The rows' own policy: staged for a round, or applied at once."""
        rows = self.policy.rows_policy
        factor = rows.contribution_scale(share.samples, share.global_samples)
        # A round of one is its push, and where the store dies with the worker it need not wait for its end.
        alone = self.worker.has_own_store and isinstance(rows.proceed, Round) and share.weight > 0
        self.push([*more, *self.row_pushes(one.tables, factor)], rows, staged=rows.staged and not alone)

    def row_pushes(self, tables: Sequence[TableUse], factor: float = 1.0) -> list[PushItem]:
        """The accumulated gradients of tables, scaled."""
        pushes: list[PushItem] = []
        rates = {id(use.module): use.lr for use in tables if use.module.weight.requires_grad}
        for module, keys, grads in row_gradients(use.module for use in tables if id(use.module) in rates):
            lr = rates[id(module)]
            pushes.append((module.table, keys, grads if factor == 1.0 else grads * factor, lr))
        for rows in self.batch_rows:
            rows.pushed(pushes)
        return pushes

    def push(
        self, pushes: Sequence[PushItem], policy: Policy | None = None, *, staged: bool | None = None
    ) -> None:
        """Send one step's pushes as `policy` says and wait until they are applied (or staged) everywhere."""
        if staged is None:
            staged = policy is not None and policy.staged
        if pushes:
            push_many(
                self.worker.client,
                pushes,
                step=self.worker.step,
                stage_rank=self.worker.rank if staged else -1,
                by_staleness=policy is not None and policy.by_staleness,
            )


def _unscale(optimizer: torch.optim.Optimizer) -> float | None:
    """What gradients must be multiplied by, or None where they are not finite (GradScaler says so)."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is None and scale is None:
        return 1.0
    # It is done here, so that an optimizer that steps here does not do it again.
    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
    if found is not None and float(found) > 0:
        return None
    return 1.0 if scale is None else 1.0 / float(scale)


def _digest(parameter: torch.nn.Parameter) -> int:
    return int(flat(parameter).view(np.uint32).sum(dtype=np.uint64))


def _aliases(parameter: torch.nn.Parameter) -> bool:
    """Whether its memory can be written from outside torch."""
    data = parameter.data
    return data.device.type == "cpu" and data.dtype == torch.float32 and data.is_contiguous()


def _memory(parameter: torch.nn.Parameter) -> FlatFloats:
    """Memory for the values: the parameter's own where that is possible."""
    data = parameter.data
    return data.view(-1).numpy() if _aliases(parameter) else flat(torch.empty_like(data, dtype=torch.float32))
