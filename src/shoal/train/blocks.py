"""Steps made here, models exchanged at the servers now and then: average, bmuf, diloco, easgd, downpour.

Several optimizers are several models: each is exchanged after so many steps of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal import optim
from shoal.errors import BadInput
from shoal.store.many import PushItem
from shoal.train.parameters import Dense, FlatFloats, Stepped, check_finite, flat
from shoal.train.share import Share
from shoal.train.strategy import Strategy

if TYPE_CHECKING:
    from shoal.sync import Policy
    from shoal.train.worker import Worker

# What float32 holds without loss.
_EXACT_AT_SERVERS = (torch.float32, torch.float16, torch.bfloat16)


class _LocalSteps(Strategy):
    """The user's optimizer runs here; rows are pushed with every step, as the policy's `rows` says (asp)."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._payload: Any = policy.payload
        self._share = Share()

    def before(self, one: Stepped) -> None:
        self._share = self.begin(one)
        self.push_rows(one, self._share)

    def finish(self) -> None:
        """The step is over, which the rows' clock may count."""
        self.worker.advance(weight=self.policy.commit_weight(self._share.weight))

    def hand_in(self) -> None:
        """What was left at the end of a pass is sent: a step that has no batch."""
        self.worker.advance(weight=0.0)
        self.worker.between_steps()

    def refresh(self) -> None:
        self.pull_dense()


class _OuterSteps(_LocalSteps):
    """The servers hold a model of their own and step it by how far the workers' have come."""

    def attach(self, stepped: Sequence[Stepped]) -> None:
        outer: optim.Optimizer = self._payload.outer(self.worker.world_size)
        for dense in (dense for one in stepped for dense in one.dense):
            if dense.parameter.dtype not in _EXACT_AT_SERVERS:
                raise BadInput(
                    f"parameter {dense.name} is {dense.parameter.dtype}; under {self.policy} the servers "
                    f"hold the model, in float32, and would round it. Make the model float32, or take "
                    f"allreduce or gossip, which exchange parameters as they are"
                )
        for one in stepped:
            self.open_tensors([(dense, outer) for dense in one.dense])
        self.stepped.extend(stepped)
        self.pull_dense([dense for one in stepped for dense in one.dense])

    @abstractmethod
    def exchange(self, stepped: Sequence[Stepped]) -> None:
        """Bring what these optimizers step together with what the servers hold."""

    def end_pass(self) -> None:
        if pending := [one for one in self.stepped if one.steps]:
            self.exchange(pending)

    def exchanged(self, stepped: Sequence[Stepped]) -> None:
        """Models were exchanged: with `state=reset` their optimizers begin anew."""
        for one in stepped:
            one.steps = 0
            if self.policy.state == "reset":
                _reset(one.optimizer)


class Blocks(_OuterSteps):
    """A block of H steps on each worker, then one outer step at the servers with the mean difference."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._base: dict[int, FlatFloats] = {}  # by id of the parameter: what the block began with
        self._states: dict[str, Any] = {}

    def after(self, one: Stepped) -> None:
        one.steps += 1
        if one.steps >= self._payload.period:
            self.exchange([one])

    def pull_dense(self, among: Sequence[Dense] | None = None) -> None:
        super().pull_dense(among)
        for entry in self.dense if among is None else among:
            self._base[id(entry.parameter)] = flat(entry.parameter).copy()

    @property
    def between_steps(self) -> bool:
        return not any(one.steps for one in self.stepped)  # a clock counts blocks

    def state(self) -> list[Any]:
        return [{**one.state(), "values": {}} for one in self.stepped]  # those lie at the servers

    def take(self, states: Sequence[Any], since: int = 0) -> None:
        here = [one.state()["values"] for one in self.stepped]
        states = [{**state, "values": values} for state, values in zip(states, here, strict=False)]
        super().take(states, since)

    def exchange(self, stepped: Sequence[Stepped]) -> None:
        dense = [entry for one in stepped for entry in one.dense]
        states = _state_tensors(stepped) if self.policy.state == "average" else {}
        # How far the parameters have come, as a gradient: base - now.
        pushes: list[PushItem] = [
            (self.tensors[at], None, self._base[at] - flat(entry.parameter), None)
            for entry in dense
            for at in [id(entry.parameter)]
        ]
        pushes += self._state_pushes(states)
        self.worker.heed()  # a block may take long, and counts as little as its end
        if self.worker.trust:
            self.push(pushes, staged=True)
        self.worker.advance(weight=self.worker.trust)
        self.pull_dense(dense)
        self.exchanged(stepped)
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
        for state in [optimizer.state[one] for one in group["params"] if one in optimizer.state]:
            state["step"].zero_()
            state["sum"].fill_(group["initial_accumulator_value"])


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
                    found[f"shoal.state.{dense.name}/{key}"] = value
    return found


class Elastic(_OuterSteps):
    """EASGD: every H steps worker and centre pull each other by alpha times their difference. One that is
    trusted less pulls the centre by as much less, and is pulled as ever.
    """

    @property
    def weighs_dense(self) -> bool:
        return True

    def before(self, one: Stepped) -> None:
        self._share = self.begin(one)  # first: of a step that is refused nothing is sent
        # The force is that of before the local step.
        if one.steps >= self._payload.period:
            self.exchange([one])
        self.push_rows(one, self._share)

    def after(self, one: Stepped) -> None:
        one.steps += 1
        self.finish()

    def end_pass(self) -> None:
        if any(one.steps for one in self.stepped):
            super().end_pass()
            self.hand_in()

    def exchange(self, stepped: Sequence[Stepped]) -> None:
        alpha, trust = self.policy.alpha(self.worker.world_size), self.worker.trust
        pushes: list[PushItem] = []
        moves: list[tuple[Dense, FlatFloats]] = []
        for dense in (dense for one in stepped for dense in one.dense):
            tensor = self.tensors[id(dense.parameter)]
            force = alpha * (flat(dense.parameter) - tensor.pull())
            if trust:
                pushes.append((tensor, None, -force * trust, None))
            moves.append((dense, force))
        self.push(pushes)
        for dense, force in moves:
            dense.parameter.data -= torch.from_numpy(force).view(dense.parameter.shape)
        self.exchanged(stepped)


class Downpour(_LocalSteps):
    """Local steps with the user's optimizer; the sum of gradients goes up every p steps, parameters come down
    every f. The servers run the twin of the same optimizer.
    """

    def __init__(self, worker: Worker, policy: Policy) -> None:
        super().__init__(worker, policy)
        self._sums: dict[int, FlatFloats] = {}

    def attach(self, stepped: Sequence[Stepped]) -> None:
        self.open_twins(stepped)
        self.pull_dense([dense for one in stepped for dense in one.dense])

    def drop(self, dense: Sequence[Dense]) -> None:
        for entry in dense:
            self._sums.pop(id(entry.parameter), None)

    def before(self, one: Stepped) -> None:
        share = self._share = self.begin(one)
        check_finite(one)  # what the servers would refuse with the sum is of many steps by then
        factor = self.policy.contribution_scale(share.samples, share.global_samples)
        for dense in one.dense:
            if dense.parameter.grad is not None:
                held = self._sums.get(id(dense.parameter), np.float32(0))
                self._sums[id(dense.parameter)] = held + factor * flat(dense.parameter.grad.to_dense())
        self.push_rows(one, share)

    def after(self, one: Stepped) -> None:
        one.steps += 1
        if one.steps % self._payload.push_every == 0:
            self._push_sums(one.dense)
        self.finish()
        self.mark(one.dense)
        if one.steps % self._payload.fetch_every == 0:
            self.pull_dense(one.dense)

    def end_pass(self) -> None:
        if self._sums:
            self._push_sums(self.dense)
            self.hand_in()

    def state(self) -> list[Any]:
        sums = {dense.name: self._sums.get(id(dense.parameter)) for dense in self.dense}
        held = {name: torch.from_numpy(values) for name, values in sums.items() if values is not None}
        return [{**one.state(), "sums": held} for one in self.stepped]

    def take(self, states: Sequence[Any], since: int = 0) -> None:
        super().take(states, since)
        for one, state in zip(self.stepped[since:], states[since:], strict=False):
            self.mark(one.dense)
            for dense in one.dense:
                if dense.name in state["sums"]:
                    self._sums[id(dense.parameter)] = flat(state["sums"][dense.name])

    def _push_sums(self, among: Sequence[Dense]) -> None:
        if not self.worker.trust:  # what it summed up before it was refused is of the same worker
            self.drop(among)
        pushes: list[PushItem] = [
            (self.tensors[id(dense.parameter)], None, self._sums.pop(id(dense.parameter)), dense.lr)
            for dense in among
            if id(dense.parameter) in self._sums
        ]
        self.push(pushes, self.policy)
