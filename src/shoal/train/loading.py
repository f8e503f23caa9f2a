"""What `load_state_dict` does to a prepared model: worker 0's values are everybody's, as its strategy has it.

A job that goes on from a checkpoint passes over what its script loads to begin with, a pretrained model, as
far as the checkpoint has something better. That ends when it trains, or finds that all is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from shoal.nn.module import TableModule

if TYPE_CHECKING:
    from shoal.train.parameters import Stepped
    from shoal.train.worker import Worker

_log = logging.getLogger("shoal.worker")


class Resumed:
    """The checkpoint that a worker goes on from, if any, until it trains."""

    def __init__(self, checkpoint: str, *, tells: bool) -> None:
        self.checkpoint, self._tells = checkpoint, tells
        self._given: dict[int, torch.Tensor] = {}

    def gives(
        self, models: Iterable[torch.nn.Module], stepped: Iterable[Stepped], buffers: Iterable[torch.Tensor]
    ) -> None:
        """The checkpoint has brought back what is stepped in these models, and these buffers."""
        if not self.checkpoint:
            return
        trained = {id(parameter) for one in stepped for parameter in one.named.values()}
        given: list[torch.Tensor] = [dense.parameter for one in stepped for dense in one.dense]
        own = {
            id(buffer)
            for model in models
            if not trained.isdisjoint(map(id, model.parameters()))
            for buffer in model.buffers()
        }
        given += [buffer for buffer in buffers if id(buffer) in own]
        self._given.update((id(one), one) for one in given)

    def gave(self, value: torch.Tensor) -> bool:
        """Whether it is of the checkpoint: frozen parameters, and models that nothing steps, are not."""
        return id(value) in self._given

    def trains(self) -> None:
        """What is loaded from here on is of the job that goes on."""
        self.checkpoint = ""
        self._given.clear()

    @property
    def passes_over(self) -> bool:
        """Whether what is loaded now is older than what the job has."""
        if self.checkpoint and self._tells:
            self._tells = False
            said = "load_state_dict is passed over: this job goes on from checkpoint %s"
            _log.warning(said, self.checkpoint)
        return bool(self.checkpoint)


class _Hook:
    """Of a module whose parameters the job knows; that of a copy or a pickle knows no job."""

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = worker

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class _Loads(_Hook):
    def __call__(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        # The rows of tables are the strategy's affair.
        if self._worker is None or isinstance(module, TableModule):
            return
        resumed, own = self._worker.resumed, {**module._parameters, **module._buffers}
        given = {prefix + name: one for name, one in own.items() if one is not None and resumed.gave(one)}
        loaded = given.keys() & state.keys()
        if loaded and resumed.passes_over:
            state.update({name: given[name] for name in loaded})


class _Loaded(_Hook):
    def __call__(self, module: torch.nn.Module, keys: Any) -> None:
        if self._worker is not None and self._worker.strategy is not None:
            self._worker.strategy.loaded(module)
            self._worker.fixed.loaded(module)


def watch_loading(worker: Worker, module: torch.nn.Module) -> None:
    """From now on `worker` hears of what is loaded into this module, and not into those within it."""
    module.register_load_state_dict_pre_hook(_Loads(worker))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_Loaded(worker))  # type: ignore[no-untyped-call]
