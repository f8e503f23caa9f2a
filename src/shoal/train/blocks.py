"""Steps made here, models exchanged at the servers now and then: average, bmuf, diloco, easgd, downpour."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal import optim
from shoal.store.many import PushItem
from shoal.train.parameters import Dense, FlatFloats, Stepped, flat
from shoal.train.strategy import Strategy
from shoal.train.twins import check_twin, twin_of

if TYPE_CHECKING:
    from shoal.sync import Policy
    from shoal.train.worker import Worker

__all__ = ["Blocks", "Downpour", "Elastic"]


class _LocalSteps(Strategy):
    """The user's optimizer runs here; rows are pushed with every step, as the policy's `rows` says (asp)."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._payload: Any = policy.payload

    def before(self, one: Stepped) -> None:
        self.push_rows(one, self.begin(one))


class _OuterSteps(_LocalSteps):
    """The servers hold a model of their own and step it by how far the workers' have come."""

    @abstractmethod
    def outer_optimizer(self) -> optim.Optimizer:
        """What the servers step with when a model comes in."""

    def attach(self, stepped: Sequence[Stepped]) -> None:
        outer = self.outer_optimizer()
        for one in stepped:
            self.open_tensors([(dense, outer) for dense in one.dense])
        self.stepped.extend(stepped)
        self.pull_dense()

    def differences(self, base: dict[int, FlatFloats]) -> list[PushItem]:
        """How far the parameters have come from `base`, as a gradient: base - now."""
        return [
            (self.tensors[id(dense.parameter)], None, base[id(dense.parameter)] - flat(dense.parameter), None)
            for dense in self.dense
        ]

    def values(self) -> dict[int, FlatFloats]:
        return {id(dense.parameter): flat(dense.parameter).copy() for dense in self.dense}

    def forget_state(self) -> None:
        """Models were exchanged: with `state=reset` the optimizers begin anew."""
        if self.policy.state == "reset":
            for one in self.stepped:
                _reset(one.optimizer)


class Blocks(_OuterSteps):
    """A block of H steps on each worker, then one outer step at the servers with the mean difference."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._base: dict[int, FlatFloats] = {}
        self._steps = 0
        self._states: dict[str, Any] = {}

    def outer_optimizer(self) -> optim.Optimizer:
        outer: optim.Optimizer = self._payload.outer(self.worker.world_size)
        return outer

    def attach(self, stepped: Sequence[Stepped]) -> None:
        super().attach(stepped)
        self._base = self.values()

    def after(self, one: Stepped) -> None:
        if one is not self.stepped[-1]:
            return
        self._steps += 1
        if self._steps >= self._payload.period:
            self._exchange()

    def end_pass(self) -> None:
        if self._steps:
            self._exchange()

    def refresh(self) -> None:
        self.pull_dense()
        self._base = self.values()

    def _exchange(self) -> None:
        worker = self.worker
        self._steps = 0
        states = _state_tensors(self.stepped) if self.policy.state == "average" else {}
        pushes = self.differences(self._base) + self._state_pushes(states)
        self.push(pushes, staged=True)
        worker.advance(weight=1.0)
        self.pull_dense()
        self._base = self.values()
        self.forget_state()
        for name, state in states.items():
            state.copy_(torch.from_numpy(self._states[name].pull()).view(state.shape))

    def _state_pushes(self, states: dict[str, torch.Tensor]) -> list[PushItem]:
        """Optimizer state travels as parameters do: the server's value minus ours, averaged."""
        pushes: list[PushItem] = []
        for name, state in states.items():
            if name not in self._states:
                zeros = np.zeros(state.numel(), np.float32)
                self._states[name] = self.worker.client.tensor(name, zeros, optimizer=optim.SGD(lr=1.0))
            tensor = self._states[name]
            pushes.append((tensor, None, tensor.pull() - flat(state), None))
        return pushes


def _reset(optimizer: torch.optim.Optimizer) -> None:
    """As when it was made. Optimizers make their state when it is needed, but for Adagrad."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].zero_()
            optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])


def _state_tensors(stepped: Sequence[Stepped]) -> dict[str, torch.Tensor]:
    """The optimizers' state that has the shape of its parameter, by name; step counters stay as they are."""
    found: dict[str, torch.Tensor] = {}
    for one in stepped:
        for dense in one.dense:
            for key, value in one.optimizer.state.get(dense.parameter, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == dense.parameter.shape
                    and value.is_floating_point()
                ):
                    found[f"{dense.name}/{key}"] = value
    return found


class Elastic(_OuterSteps):
    """EASGD: every H steps worker and centre pull each other by alpha times their difference."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._steps = 0
        self._weight = 0.0  # of the step that runs

    def outer_optimizer(self) -> optim.Optimizer:
        return optim.SGD(lr=1.0)

    def before(self, one: Stepped) -> None:
        # The force is that of before the local step.
        if one is self.stepped[0] and self._steps >= self._payload.period:
            self._pull_together()
        share = self.begin(one)
        self._weight = self.policy.commit_weight(share.weight)
        self.push_rows(one, share)

    def after(self, one: Stepped) -> None:
        if one is self.stepped[-1]:
            self._steps += 1
            self.worker.advance(weight=self._weight)

    def end_pass(self) -> None:
        if self._steps:
            self._pull_together()

    def refresh(self) -> None:
        self.pull_dense()

    def _pull_together(self) -> None:
        self._steps = 0
        alpha = self.policy.alpha(self.worker.world_size)
        pushes: list[PushItem] = []
        moves: list[tuple[Dense, FlatFloats]] = []
        for dense in self.dense:
            tensor = self.tensors[id(dense.parameter)]
            force = alpha * (flat(dense.parameter) - tensor.pull())
            pushes.append((tensor, None, -force, None))
            moves.append((dense, force))
        self.push(pushes)
        for dense, force in moves:
            dense.parameter.data -= torch.from_numpy(force).view(dense.parameter.shape)
        self.forget_state()


class Downpour(_LocalSteps):
    """Local steps with the user's optimizer; the sum of gradients goes up every p steps, parameters come down
    every f. The servers run the twin of the same optimizer.
    """

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._steps = 0
        self._sums: dict[int, FlatFloats] = {}

    def attach(self, stepped: Sequence[Stepped]) -> None:
        for one in stepped:
            check_twin(one.optimizer)
            self.open_tensors([(dense, twin_of(one.optimizer, dense.group)) for dense in one.dense])
        self.stepped.extend(stepped)
        self.pull_dense()

    def before(self, one: Stepped) -> None:
        share = self.begin(one)
        factor = self.policy.contribution_scale(share.samples, share.global_samples)
        for dense in one.dense:
            if dense.parameter.grad is not None:
                held = self._sums.get(id(dense.parameter), np.float32(0))
                self._sums[id(dense.parameter)] = held + factor * flat(dense.parameter.grad.to_dense())
        self.push_rows(one, share)

    def after(self, one: Stepped) -> None:
        if one is not self.stepped[-1]:
            return
        self._steps += 1
        if self._steps % self._payload.push_every == 0:
            self._push_sums()
        self.worker.advance(weight=1.0)
        if self._steps % self._payload.fetch_every == 0:
            self.pull_dense()

    def end_pass(self) -> None:
        self._push_sums()

    def refresh(self) -> None:
        self.pull_dense()

    def _push_sums(self) -> None:
        pushes: list[PushItem] = [
            (self.tensors[id(dense.parameter)], None, self._sums[id(dense.parameter)], dense.lr)
            for dense in self.dense
            if id(dense.parameter) in self._sums
        ]
        self._sums.clear()
        self.push(pushes, self.policy)
