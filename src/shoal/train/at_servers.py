"""Dense parameters and optimizer at the servers: bsp, quorum, ssp, asp, softsync, dcasgd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.errors import BadInput
from shoal.store.many import PushItem
from shoal.store.tensor import Tensor
from shoal.sync import Round
from shoal.train.parameters import Dense, Stepped, flat
from shoal.train.strategy import Strategy
from shoal.train.twins import check_twin, twin_of

__all__ = ["AtServers"]


class AtServers(Strategy):
    """Every step: gradients up, wait for the policy's word, parameters down. The optimizer here rests."""

    def attach(self, stepped: Sequence[Stepped]) -> None:
        for one in stepped:
            check_twin(one.optimizer)
            for dense in one.dense:
                _check_dtype(dense)
            self.open_tensors([(dense, twin_of(one.optimizer, dense.group)) for dense in one.dense])
            # Lets GradScaler call step also where a gradient is not finite, and tell us instead of skipping
            # it.
            one.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self.stepped.extend(stepped)
        self.pull_dense()

    def before(self, one: Stepped) -> None:
        worker, policy = self.worker, self.policy
        share = worker.take_share()
        factor = policy.contribution_scale(share.samples, share.global_samples)
        unscale = _amp(one.optimizer)
        pushes: list[PushItem] = []
        if unscale is not None:
            factor *= unscale
            pushes = self._dense_pushes(one, factor) + self.row_pushes(one.tables, factor)
        if policy.compensation:
            pushes = self._push_compensated(pushes)
        # A round of one is its push, and where the store dies with the worker it need not wait for its end.
        at_once = worker.has_own_store and isinstance(policy.proceed, Round) and share.samples > 0
        staged = policy.staged and not at_once
        self.push(pushes, step=worker.step, staged=staged, by_staleness=policy.by_staleness)
        worker.advance(weight=share.samples if unscale is not None else 0.0, lr=_round_lr(one))
        self.pull_dense()
        _hide_gradients(one)

    def after(self, one: Stepped) -> None:
        _show_gradients(one)

    def refresh(self) -> None:
        self.pull_dense()

    def _push_compensated(self, pushes: Sequence[PushItem]) -> list[PushItem]:
        """DC-ASGD: dense gradients go with the values that they were computed at; gives the rest."""
        pulled = {id(self.tensors[id(dense.parameter)]): flat(dense.parameter) for dense in self.dense}
        rest: list[PushItem] = []
        tickets = []
        for push in pushes:
            tensor, _, grad, lr = push
            if not isinstance(tensor, Tensor):
                rest.append(push)
                continue
            strength = self.policy.compensation
            tickets.append(tensor._push(grad, lr, self.worker.step, None, pulled[id(tensor)], strength))
        for ticket in tickets:
            ticket.wait()
        return rest

    def _dense_pushes(self, one: Stepped, factor: float) -> list[PushItem]:
        pushes: list[PushItem] = []
        for dense in one.dense:
            grad = dense.parameter.grad
            if grad is None:
                continue
            values = flat(grad.to_dense() if grad.is_sparse else grad)
            scaled = values if factor == 1.0 else values * factor
            pushes.append((self.tensors[id(dense.parameter)], None, scaled, dense.lr))
        return pushes


def _check_dtype(dense: Dense) -> None:
    if dense.parameter.dtype != torch.float32:
        raise BadInput(
            f"parameter {dense.name} is {dense.parameter.dtype}; the servers hold float32. Keep it in "
            f"float32 (autocast "
            f"computes in less), or take a sync word whose parameters stay on the workers"
        )


def _round_lr(one: Stepped) -> float:
    """The lr of the whole round, which is its lowest rank's, where there is but one; NaN: each push's own."""
    own = any(use.lr is None for use in one.tables)
    rates = {float(group["lr"]) for group in one.optimizer.param_groups}
    return rates.pop() if len(rates) == 1 and not own else math.nan


def _amp(optimizer: torch.optim.Optimizer) -> float | None:
    """What gradients must be multiplied by, or None where they are not finite (GradScaler says so)."""
    found = getattr(optimizer, "found_inf", None)
    if found is not None and float(found) > 0:
        return None
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def _hide_gradients(one: Stepped) -> None:
    """Let the optimizer see nothing to step; `_show_gradients` puts back what users may want to look at."""
    hidden = []
    for group in one.optimizer.param_groups:
        for parameter in group["params"]:
            hidden.append((parameter, parameter.grad))
            parameter.grad = None
    one.hidden = hidden


def _show_gradients(one: Stepped) -> None:
    for parameter, grad in one.hidden:
        if parameter.grad is None:
            parameter.grad = grad
    one.hidden = []
