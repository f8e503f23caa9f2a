"""`worker.prepare`: models, optimizers, loaders and schedulers, in any order, made part of the job.

Model and optimizer stay the same objects, changed in place; loaders are wrapped. Twice is harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shoal import optim, sync
from shoal.data.loader import ShardedLoader
from shoal.errors import BadInput, Mismatch, UnknownTable
from shoal.nn.module import TableModule, table_modules
from shoal.sync import Gradient, GradientSum, Policy
from shoal.train.at_servers import AtServers
from shoal.train.batch_rows import BatchKeys, BatchRows, check_prefetch
from shoal.train.blocks import Blocks, Downpour, Elastic
from shoal.train.handles import take_along
from shoal.train.loading import watch_loading
from shoal.train.on_workers import AllReduce, Gossip, Hogwild
from shoal.train.parameters import LINES_MAX, Stepped, TableUse, described, names, survey
from shoal.train.passes import Passes
from shoal.train.strategy import Strategy
from shoal.train.taken_back import check_model
from shoal.train.twins import check_fresh, has_state, settings_of, twin_of

if TYPE_CHECKING:
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.train")

# Returned as they are: changed in place, or reading what is changed.
_AS_THEY_ARE = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    ShardedLoader,
)


def _strategy(policy: Policy) -> type[Strategy]:
    """What a policy means around a step, by where its dense parameters live and what travels."""
    if policy.dense_home == "server":
        return Downpour if isinstance(policy.payload, GradientSum) else AtServers
    if policy.dense_home == "worker":
        return Elastic if isinstance(policy.scale, sync.Elastic) else Blocks
    if policy.dense_home == "peers":
        return AllReduce if isinstance(policy.payload, Gradient) else Gossip
    return Hogwild


def prepare(
    worker: Worker,
    objects: Sequence[Any],
    *,
    split: bool = True,
    keys: BatchKeys | None = None,
    prefetch: int = 0,
    reduction: str = "mean",
) -> list[Any]:
    """The same objects in the same order, ready to train in the job."""
    check_prefetch(prefetch, keys, worker.policy)
    if reduction not in ("mean", "sum"):
        raise BadInput(
            f"prepare: reduction is {reduction!r}; a loss is the 'mean' or the 'sum' over its samples"
        )
    models = [thing for thing in objects if isinstance(thing, torch.nn.Module)]
    optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
    # By identity: a copy of a prepared model is another model.
    fresh = [model for model in models if not any(model is known for known in worker.models)]
    if fresh or optimizers:
        _prepare_training(worker, fresh, optimizers, reduction)
    leased = worker.world_size > 1 and worker.policy.order(worker.world_size) == "leased"
    for thing in objects:
        if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            worker.schedules.add(thing, leased=leased)
    rows = None if keys is None else _batch_rows(worker, objects, keys, split)
    return [_prepared(worker, thing, split, rows, prefetch) for thing in objects]


def _batch_rows(worker: Worker, objects: Sequence[Any], keys: BatchKeys, split: bool) -> BatchRows:
    if not split or all(isinstance(thing, _AS_THEY_ARE) for thing in objects):
        raise BadInput(
            "prepare: keys= without a loader to divide; give the loader in the same call, without split=False"
        )
    if worker.strategy is None:
        raise BadInput(
            "prepare: keys= before any model was prepared; give model and optimizer in the same call"
        )
    rows = BatchRows(worker.client, worker.models, keys)
    worker.strategy.batch_rows.append(rows)
    return rows


def _prepared(worker: Worker, thing: Any, split: bool, rows: BatchRows | None, prefetch: int) -> Any:
    if isinstance(thing, _AS_THEY_ARE):
        return thing
    if not isinstance(thing, Iterable):
        raise BadInput(
            f"prepare: an object of {type(thing).__name__} is none of these: a torch.nn.Module, a torch "
            f"optimizer, a "
            f"learning-rate scheduler, a DataLoader or another iterable of batches"
        )
    if not split:
        worker.divides = True
        return thing
    worker.passes.append(Passes(worker, thing, len(worker.passes), rows, prefetch))
    return worker.passes[-1].loader


def _prepare_training(
    worker: Worker,
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    reduction: str,
) -> None:
    hooked = [one for one in optimizers if not any(one is known for known in worker.optimizers)]
    leading = [*worker.model_names, *names(len(models), len(worker.models))]
    named = dict(zip(leading[len(worker.models) :], models, strict=True))
    stepped = survey(named, hooked, dict(zip(leading, worker.models, strict=False)))
    if models or hooked:
        _agree_on_model(worker, described(named, stepped))
    if worker.step and not worker.models:
        check_model(worker, _opened(worker, models, stepped))
    _bind_tables(worker, models, stepped)
    if worker.strategy is None:
        worker.strategy = _strategy(worker.policy)(worker, worker.policy)
    since = len(worker.strategy.stepped)
    if worker.taken_back is not None:
        worker.taken_back.values(stepped, since)
    worker.strategy.attach(stepped)
    worker.fixed.take(named, stepped)
    for one in stepped:
        one.reduction = reduction
        take_along(one)
        _hook(worker, worker.strategy, one)
        worker.optimizers.append(one.optimizer)
    for module in (module for model in models for module in model.modules()):
        watch_loading(worker, module)
        if isinstance(module, TableModule):
            module.assign_by = worker.strategy.assign_once
    worker.models += models
    worker.model_names = leading
    restored = worker.fixed.restored
    if worker.taken_back is not None:
        restored += worker.taken_back.take(worker, since)
    worker.resumed.gives(worker.models, stepped, restored)
    worker.begin()


def _opened(worker: Worker, models: list[torch.nn.Module], stepped: list[Stepped]) -> dict[str, Any]:
    """The tables and tensors that these models have at the servers."""
    uses = {id(use.module): (one, use) for one in stepped for use in one.tables}
    opened: dict[str, Any] = {}
    for module in (module for model in models for _, module in table_modules(model)):
        optimizer = _table_optimizer(worker, module, uses.get(id(module)))
        opened[module.table_name] = {"dim": module.dim, "shape": None, "optimizer": optimizer}
    if worker.policy.dense_home in ("server", "worker"):
        steps_there = worker.policy.dense_home == "server"
        for dense in (dense for one in stepped for dense in one.dense):
            optimizer = {"optimizer": twin_of(dense.optimizer, dense.group)} if steps_there else {}
            opened[dense.name] = {"shape": tuple(dense.parameter.shape), **optimizer}
    return opened


def _agree_on_model(worker: Worker, described: list[str]) -> None:
    """Raise if another worker has prepared another model."""
    worker.prepared += 1
    for rank, note in worker.agree(worker.prepared, "\n".join(described)):
        there = note.split("\n")
        lines = [f"  worker {worker.rank}: {line}" for line in described if line not in there]
        lines += [f"  worker {rank}: {line}" for line in there if line not in described]
        shown = lines[:LINES_MAX] + ["  ..."] * (len(lines) > LINES_MAX)
        raise Mismatch(
            "\n".join([f"workers {worker.rank} and {rank} have prepared different models:", *shown])
            + "\nBuild the same model with the same optimizer on every worker"
        )


def _bind_tables(worker: Worker, models: list[torch.nn.Module], stepped: list[Stepped]) -> None:
    """Open every table: with its own optimizer, or with the twin of the one that holds its handle."""
    uses = {id(use.module): (one, use) for one in stepped for use in one.tables}
    first: dict[str, tuple[str, TableModule, Any]] = {}
    for model in models:
        for name, module in table_modules(model):
            optimizer = _table_optimizer(worker, module, uses.get(id(module)))
            other, before, steps = first.setdefault(module.table_name, (name, module, optimizer))
            for what, one, two in (("dim", before.dim, module.dim), ("optimizer", steps, optimizer)):
                if one != two and (what == "dim" or module.weight.requires_grad):
                    raise Mismatch(
                        f"table {module.table_name!r} has {what} {one} in module {other} and {what} {two} in "
                        f"module {name}; one name is one table"
                    )
            if not module.bound:
                module.bind(worker.client, optimizer, seed=_seed(worker, module), retune=worker.sets_settings)


def _seed(worker: Worker, module: TableModule) -> int | None:
    """The job's, for a table that is new: one that is there (from a checkpoint, too) keeps its own."""
    if module.seed is not None or worker.seed == 0:  # which is that of a table without one
        return None
    try:
        worker.client.table(module.table_name)
    except UnknownTable:
        return worker.seed
    return None


def _table_optimizer(worker: Worker, module: TableModule, use: tuple[Stepped, TableUse] | None) -> Any:
    if module.optimizer is not None:
        return module.optimizer
    if use is None:
        try:  # frozen: what is there, or nothing but first values
            return worker.client.table(module.table_name).optimizer
        except UnknownTable:
            return optim.SGD(lr=0.0)
    here = worker.policy.dense_home != "server"
    return twin_of(use[0].optimizer, use[1].group, tables_alone=here)


@contextmanager
def _named(worker: Worker) -> Iterator[None]:
    """What is refused within a step says whose, and which: by the script's count, since a clock may count
    blocks of them.
    """
    try:
        yield
    except BadInput as error:
        where = f"worker {worker.rank}"
        if str(error).startswith(where):
            raise
        raise type(error)(f"{where}, step {worker.steps_made - 1}: {error}") from None


def _hook(worker: Worker, strategy: Strategy, one: Stepped) -> None:
    known = {id(parameter) for group in one.optimizer.param_groups for parameter in group["params"]}

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            raise BadInput(
                f"{type(optimizer).__name__}.step(closure) is not supported: a step of the job has one "
                f"gradient. Call "
                f"the closure yourself, then step()"
            )
        for group in optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise BadInput(
                    f"{type(optimizer).__name__} has parameters that it had not when it was given to "
                    f"prepare; call add_param_group before prepare"
                )
        divides = worker.passes or worker.divides or worker.world_size == 1
        if worker.steps_made == 0 and worker.rank == 0 and not divides:
            _log.warning(
                "no loader was given to prepare: each of the %d workers trains all that it draws. To divide "
                "the data over them, give prepare the loader",
                worker.world_size,
            )
        worker.stepping()
        worker.schedules.stepped(optimizer)
        with _named(worker):
            worker.lives.step(lambda: strategy.before(one))
        if worker.lives.void:  # the optimizer does nothing
            one.hide_gradients()
        one.hide_along()

    def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _named(worker):
            worker.lives.step(lambda: strategy.after(one))
        one.show_gradients()
        worker.stepped()

    def loads(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if one.handled or not worker.resumed.passes_over:
            return None
        return {**state, "state": one.optimizer_state()["state"]}  # hyper-parameters are the script's

    def loaded(optimizer: torch.optim.Optimizer) -> None:
        if strategy.policy.dense_home == "server" and one.dense and not one.handled:
            check_fresh(optimizer, strategy.policy)

    loaded(one.optimizer)
    _watch_state(worker, strategy, one)
    one.settings = settings_of(one.optimizer)
    one.optimizer.register_load_state_dict_pre_hook(loads)
    one.optimizer.register_load_state_dict_post_hook(loaded)
    # Lets GradScaler call step also where a gradient is not finite, and tell us instead of skipping it.
    one.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    one.optimizer.register_step_pre_hook(before)
    one.optimizer.register_step_post_hook(after)


def _watch_state(worker: Worker, strategy: Strategy, one: Stepped) -> None:
    """Say once that a state_dict lacks what lies at the servers, where that is something."""
    if not isinstance(strategy, AtServers) or not one.dense or worker.rank != 0:
        return

    def given(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if one.handled or strategy.told_of_state or not worker.steps_made or not has_state(optimizer):
            return
        strategy.told_of_state = True
        _log.warning(
            "%s.state_dict() has no state of the steps made: under %s that lies at the servers (momentum, "
            "moments), and a script that loads this later goes on without it. worker.save(url) keeps all",
            type(optimizer).__name__,
            worker.policy,
        )

    one.optimizer.register_state_dict_post_hook(given)
