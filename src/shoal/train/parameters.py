"""What a model and its optimizers are made of: dense parameters, tables, and who steps them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.errors import BadInput, Mismatch
from shoal.nn.module import TableModule, table_modules
from shoal.train.clip import RoundClip

LINES_MAX = 12  # of what differs between two models
FlatFloats = npt.NDArray[np.float32]


@dataclass
class Dense:
    """One dense parameter and the group that steps it."""

    name: str
    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    index: int

    @property
    def group(self) -> dict[str, Any]:
        """Looked up: `load_state_dict` replaces it."""
        return self.optimizer.param_groups[self.index]

    @property
    def lr(self) -> float:
        return float(self.group["lr"])


@dataclass
class TableUse:
    """One `shoal.nn` module and the group that holds its handle."""

    name: str
    module: TableModule
    optimizer: torch.optim.Optimizer
    index: int

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.index]

    @property
    def lr(self) -> float | None:
        """What the next push takes: the group's, unless the table keeps its own."""
        return None if self.module.optimizer is not None else float(self.group["lr"])


@dataclass
class Stepped:
    """What one optimizer steps."""

    optimizer: torch.optim.Optimizer
    dense: list[Dense] = field(default_factory=list)
    tables: list[TableUse] = field(default_factory=list)
    along: list[torch.nn.Parameter] = field(default_factory=list)  # handles that its groups had not
    clip: RoundClip = field(default_factory=RoundClip)
    settings: list[list[Any]] = field(default_factory=list)  # of the groups, as the servers have them
    reduction: str = "mean"  # what the loss is of its samples' losses: "mean" or "sum"
    steps: int = 0  # made here since the model was exchanged; of downpour in all
    handled: bool = False  # while the optimizer's state is read or set here, and not by the script
    _hidden: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = field(default_factory=list)

    @property
    def named(self) -> dict[str, torch.nn.Parameter]:
        """Its parameters and the handles of its tables."""
        handles = {f"{use.name}.weight": use.module.weight for use in self.tables}
        return {dense.name: dense.parameter for dense in self.dense} | handles

    def state(self) -> dict[str, Any]:
        """Values and the optimizer's state; its settings are every worker's own."""
        return {
            "values": {dense.name: dense.parameter.data for dense in self.dense},
            "kind": type(self.optimizer).__name__,
            "optimizer": self.optimizer_state()["state"],
            "steps": self.steps,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Become what `state` gave on another worker, or in a checkpoint."""
        self.take_values(state)
        if state["kind"] != type(self.optimizer).__name__:
            raise Mismatch(
                f"the state is of {state['kind']}, and here {type(self.optimizer).__name__} steps; build the "
                f"optimizer that the checkpoint was made with"
            )
        own, self.handled = self.optimizer_state(), True
        try:
            self.optimizer.load_state_dict({**own, "state": state["optimizer"]})
        finally:
            self.handled = False
        self.steps = state["steps"]

    def optimizer_state(self) -> dict[str, Any]:
        """Its state_dict, which nobody is warned of."""
        self.handled = True
        try:
            return self.optimizer.state_dict()
        finally:
            self.handled = False

    def take_values(self, state: dict[str, Any]) -> None:
        """Of the parameters alone."""
        there = {name: tuple(values.shape) for name, values in state["values"].items()}
        here = {dense.name: tuple(dense.parameter.shape) for dense in self.dense}
        if there != here:
            differing = sorted({name for name, _ in there.items() ^ here.items()})
            lines = [f"  {name}: {there.get(name)} there, {here.get(name)} here" for name in differing]
            raise Mismatch("\n".join(["the state is of another model:", *lines[:LINES_MAX]]))
        for dense in self.dense:
            dense.parameter.data.copy_(state["values"][dense.name])

    def hide_gradients(self) -> None:
        """Let the optimizer see nothing to step, also where there are gradients again since it was said."""
        self._hide([parameter for group in self.optimizer.param_groups for parameter in group["params"]])

    def hide_along(self) -> None:
        """Let the optimizer see its own alone: it may have no state for others, or no rule."""
        self._hide(self.along)

    def _hide(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        known = {id(parameter) for parameter, _ in self._hidden}
        self._hidden += [
            (parameter, parameter.grad) for parameter in parameters if id(parameter) not in known
        ]
        for parameter in parameters:
            parameter.grad = None

    def show_gradients(self) -> None:
        """Put back what users may want to look at."""
        for parameter, grad in self._hidden:
            if parameter.grad is None:
                parameter.grad = grad
        self._hidden = []


def flat(tensor: torch.Tensor) -> FlatFloats:
    """The memory of a contiguous float32 CPU tensor as an array; a copy for any other."""
    array: FlatFloats = tensor.detach().to("cpu", torch.float32).contiguous().view(-1).numpy()
    return array


def uncompiled(name: str) -> str:
    """A name in a model as it is without torch.compile: at the servers and in checkpoints both are one model.

    >>> uncompiled("_orig_mod.tower._orig_mod.weight")
    'tower.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def names(count: int, earlier: int) -> list[str]:
    """What leads the names of the parameters of so many models, so that no two are called the same."""
    if earlier == 0:
        return [f"{number}." if count > 1 else "" for number in range(count)]
    return [f"model{earlier + number}." for number in range(count)]


def survey(
    models: Mapping[str, torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    earlier: Mapping[str, torch.nn.Module],
) -> list[Stepped]:
    """Who steps what. Raises for a handle that nobody steps, and for parameters of no given model.

    Models are given by what leads the names of their parameters; `earlier` ones were prepared before, and an
    optimizer for them may come now.
    """
    stepped = [Stepped(optimizer) for optimizer in optimizers]
    home: dict[int, tuple[Stepped, int]] = {}
    for one in stepped:
        for index, group in enumerate(one.optimizer.param_groups):
            for parameter in group["params"]:
                home[id(parameter)] = (one, index)
    known: set[int] = set()
    both = {**earlier, **models}
    # First: of an optimizer of another model all else that could be said follows from it.
    _check_strangers(stepped, {id(parameter) for model in both.values() for parameter in model.parameters()})
    for prefix, model in both.items():
        handles = {id(module.weight) for _, module in table_modules(model)}
        if prefix in models:
            _tables(model, prefix, stepped, home)
        known |= handles
        for name, parameter in model.named_parameters():
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            if id(parameter) in home and parameter.numel():  # of nothing there is nothing to train
                one, index = home[id(parameter)]
                one.dense.append(Dense(prefix + uncompiled(name), parameter, one.optimizer, index))
    return stepped


def described(models: Mapping[str, torch.nn.Module], stepped: list[Stepped]) -> list[str]:
    """What workers must have in common, a line for each parameter and table."""
    by = {
        id(parameter): f"stepped by {type(one.optimizer).__name__}"
        for one in stepped
        for group in one.optimizer.param_groups
        for parameter in group["params"]
    }
    lines: list[str] = []
    for prefix, model in models.items():
        tables = {id(module.weight): module for _, module in table_modules(model)}
        for name, parameter in model.named_parameters():
            what = f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
            who = by.get(id(parameter), "stepped by nobody")
            if module := tables.get(id(parameter)):
                what = (
                    f"table {module.table_name!r}, dim {module.dim}, init {module.init}, seed {module.seed}"
                )
                who = who if module.optimizer is None else type(module.optimizer).__name__
            lines.append(f"{prefix}{uncompiled(name)}: {what}, {who}")
    return lines


def check_finite(one: Stepped) -> None:
    """Raise if a dense gradient has a value that is not finite. Where servers step, they refuse it."""
    for dense in one.dense:
        grad = dense.parameter.grad
        # In one number: a sum that is finite has finite parts, in doubles also where floats would overflow.
        if grad is not None and not math.isfinite(_values(grad).sum(dtype=torch.float64)):
            wrong = grad.numel() - int(torch.isfinite(grad.to_dense()).sum())
            raise BadInput(
                f"the gradient of {dense.name} has {wrong} of {grad.numel()} elements that are not finite; "
                f"check the loss for NaN, lower the learning rate, or clip the gradient"
            )


def versions(models: Sequence[torch.nn.Module]) -> list[int]:
    """Numbers that grow when parameters of models that train are changed in place."""
    return [p._version for model in models if model.training for p in model.parameters()]


def is_finite(one: Stepped) -> bool:
    """Whether all its gradients are, of rows too."""
    grads = [parameter.grad for parameter in one.named.values() if parameter.grad is not None]
    rows = [part.grads for grad in grads for part in getattr(grad, "parts", ())]
    return all(math.isfinite(_values(grad).sum(dtype=torch.float64)) for grad in [*grads, *rows])


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad._values() if grad.is_sparse else grad


def _tables(
    model: torch.nn.Module,
    prefix: str,
    stepped: list[Stepped],
    home: dict[int, tuple[Stepped, int]],
) -> None:
    for compiled, module in table_modules(model):
        name, where = uncompiled(compiled), home.get(id(module.weight))
        if where is not None:
            where[0].tables.append(TableUse(prefix + name, module, where[0].optimizer, where[1]))
        elif not module.weight.requires_grad:
            continue  # frozen: read and never pushed
        elif module.optimizer is None or not stepped:
            raise BadInput(
                f"table {module.table_name!r} ({prefix + name}) is stepped by nobody: its handle "
                f"{prefix + name}.weight is in no optimizer that was given to prepare. Give prepare the "
                f"optimizer that was built from model.parameters()"
                + ("" if module.optimizer is not None else ", or the module an optimizer=")
            )
        else:
            first = stepped[0]
            last = len(first.optimizer.param_groups) - 1
            first.tables.append(TableUse(prefix + name, module, first.optimizer, last))


def _check_strangers(stepped: list[Stepped], known: set[int]) -> None:
    for one in stepped:
        strangers = [
            tuple(parameter.shape)
            for group in one.optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in known
        ]
        if strangers:
            raise BadInput(
                f"{type(one.optimizer).__name__} steps {len(strangers)} parameters of no model that was "
                f"given to prepare (the first of shape {strangers[0]}). Build the optimizer from the "
                f"parameters of the model that you prepare, after all changes to the model"
            )
