"""Handles of tables that are in no optimizer go with the first one: what a script does to the gradients of an
optimizer (`zero_grad`, `GradScaler.unscale_`) reaches their rows, too.

Its state_dict does not show them: it is loaded before `prepare` as after it.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.train.parameters import Stepped


def take_along(one: Stepped) -> None:
    """Put the handles that no group has into the last one. The optimizer never sees their gradients."""
    known = {id(parameter) for group in one.optimizer.param_groups for parameter in group["params"]}
    last = one.optimizer.param_groups[-1]
    for name, parameter in one.named.items():
        if id(parameter) not in known:
            known.add(id(parameter))
            one.along.append(parameter)
            last["params"].append(parameter)
            if "param_names" in last:
                last["param_names"] = [*last["param_names"], name]  # the script's state_dicts hold the list
    if not one.along:
        return
    count, whole = len(one.along), len(last["params"])

    def shown(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state["param_groups"]]
        for name in {"params", "param_names"} & groups[-1].keys():
            groups[-1][name] = groups[-1][name][:-count]
        return {**state, "param_groups": groups}

    def taken(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state["param_groups"]]
        if len(groups[-1]["params"]) + count == whole:
            unused = 1 + max((number for group in groups for number in group["params"]), default=-1)
            groups[-1]["params"] = [*groups[-1]["params"], *range(unused, unused + count)]
            if "param_names" in groups[-1]:
                own = one.optimizer.param_groups[-1]["param_names"]
                groups[-1]["param_names"] = [*groups[-1]["param_names"], *own[-count:]]
        return {**state, "param_groups": groups}

    one.optimizer.register_state_dict_post_hook(shown)
    one.optimizer.register_load_state_dict_pre_hook(taken)
