"""The server twin of a `torch.optim` optimizer: the same rule, run at the servers.

Only the kinds below have one, by exact type: a subclass may have changed the rule. Flags that change the
result and that the servers do not know are refused by name; flags that only choose an implementation
(foreach, fused, capturable) do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal import optim
from shoal.errors import BadInput

Group = Mapping[str, Any]


def _adam(kind: type[optim.Adam | optim.AdamW], group: Group) -> optim.Optimizer:
    first, second = group["betas"]
    return kind(
        lr=float(group["lr"]),
        betas=(float(first), float(second)),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )


_TWINS: dict[type, Callable[[Group], optim.Optimizer]] = {
    torch.optim.SGD: lambda group: optim.SGD(
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
    ),
    torch.optim.Adagrad: lambda group: optim.Adagrad(
        lr=float(group["lr"]),
        lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"],
        initial_accumulator_value=group["initial_accumulator_value"],
        eps=group["eps"],
    ),
    torch.optim.Adam: lambda group: _adam(
        optim.AdamW if group.get("decoupled_weight_decay") else optim.Adam, group
    ),
    torch.optim.AdamW: lambda group: _adam(optim.AdamW, group),
}
# What a twin is made of, but for lr, which comes with every push.
_SETTINGS = ("momentum", "dampening", "nesterov", "betas", "eps", "weight_decay", "lr_decay")
_REFUSED_FLAGS = ("amsgrad", "maximize", "differentiable")


def check_twin(optimizer: torch.optim.Optimizer, *, tables_alone: bool = False) -> None:
    """Raise unless the servers can run this optimizer with these flags; `tables_alone`: else it runs here."""
    kind = type(optimizer)
    if kind not in _TWINS:
        known = ", ".join(f"torch.optim.{twin.__name__}" for twin in _TWINS)
        word = " (allreduce, average, bmuf, easgd, diloco, gossip, hogwild)"
        other = "" if tables_alone else f", or a sync word whose optimizer runs on the workers{word}"
        raise BadInput(
            f"{kind.__module__}.{kind.__qualname__} has no twin at the servers; those that have: {known}. "
            f"Take one of them{other}. A table can have one of its own under every word: "
            f"shoal.nn.Embedding(..., optimizer=shoal.optim.Adagrad(lr=0.1))"
        )
    for number, group in enumerate(optimizer.param_groups):
        for flag in _REFUSED_FLAGS:
            if group.get(flag):
                raise BadInput(
                    f"{kind.__name__}({flag}=True), in parameter group {number}, has no twin at the servers; "
                    f"leave {flag} out"
                )


def twin_of(optimizer: torch.optim.Optimizer, group: Group, *, tables_alone: bool = False) -> optim.Optimizer:
    """What the servers run for the parameters of `group`.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> str(twin_of(sgd, sgd.param_groups[0]))
    'SGD(lr=0.1, momentum=0.9)'
    """
    check_twin(optimizer, tables_alone=tables_alone)
    return _TWINS[type(optimizer)](group)


def settings_of(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """The hyper-parameters of each group that servers keep."""
    return [[group.get(name) for name in _SETTINGS] for group in optimizer.param_groups]


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps leave anything but values behind."""
    return type(optimizer) is not torch.optim.SGD or any(g["momentum"] for g in optimizer.param_groups)


def check_fresh(optimizer: torch.optim.Optimizer, policy: object) -> None:
    """Raise if it brings state of steps that it has made: that of the servers is not set by it."""
    made = [
        name
        for state in optimizer.state.values()
        for name, value in state.items()
        if value is not None and (name == "momentum_buffer" or (name == "step" and float(value) > 0))
    ]
    if made:
        raise BadInput(
            f"{type(optimizer).__name__} brings state of earlier steps ({made[0]} of {len(made)} "
            f"parameters); under {policy} its state lies at the servers, where nobody can put it. Keep it by "
            f"worker.save(url) and worker.load(url); or load the model alone; or take a sync word whose "
            f"optimizer runs on the workers, as allreduce"
        )
