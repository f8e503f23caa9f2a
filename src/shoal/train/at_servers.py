"""Dense parameters and optimizer at the servers: bsp, quorum, ssp, asp, softsync, dcasgd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shoal.store.many import PushItem
from shoal.store.tensor import Tensor
from shoal.train.parameters import Stepped, check_finite, flat
from shoal.train.strategy import Strategy


class AtServers(Strategy):
    """Every step: gradients up, wait for the policy's word, parameters down. The optimizer here rests."""

    told_of_state = False  # that a state_dict of an optimizer lacks it

    def attach(self, stepped: Sequence[Stepped]) -> None:
        self.open_twins(stepped)
        self.pull_dense()

    @property
    def clips_rounds(self) -> bool:  # type: ignore[override]
        return self.policy.meets

    def before(self, one: Stepped) -> None:
        worker, policy = self.worker, self.policy
        share = self.begin(one)
        pushes = self._dense_pushes(one, policy.contribution_scale(share.samples, share.global_samples))
        if policy.compensation:
            check_finite(one)  # each is a request of its own: all of them, or none
            self._push_compensated(pushes)
            pushes = []
        if policy.rows_policy is policy:  # one request for all
            self.push_rows(one, share, pushes)
        else:
            self.push(pushes, policy)
            self.push_rows(one, share)
        weight = policy.commit_weight(share.weight)
        done = worker.advance(weight=weight, lr=_round_lr(one), clip=one.clip.max_norm)
        one.clip.done(math.nan if done.dropped else done.norm)
        self.pull_dense()
        one.hide_gradients()

    def refresh(self) -> None:
        self.pull_dense()

    def state(self) -> list[Any]:
        return []

    def _push_compensated(self, pushes: Sequence[PushItem]) -> None:
        """DC-ASGD: dense gradients go with the values that they were computed at."""
        pulled = {id(self.tensors[id(dense.parameter)]): flat(dense.parameter) for dense in self.dense}
        tickets = []
        for tensor, _, grad, lr in pushes:
            assert isinstance(tensor, Tensor)
            strength = self.policy.compensation
            tickets.append(tensor._push(grad, lr, self.worker.step, None, pulled[id(tensor)], strength))
        for ticket in tickets:
            ticket.wait()

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


def _round_lr(one: Stepped) -> float:
    """The lr of the whole round, which is its lowest rank's, where there is but one; NaN: each push's own."""
    own = any(use.lr is None for use in one.tables)
    rates = {float(group["lr"]) for group in one.optimizer.param_groups}
    return rates.pop() if len(rates) == 1 and not own else math.nan
