"""A Ray actor that holds the arrays: NumPy in, NumPy out, large ones as views of Ray's shared memory."""

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.contender import LR, Keys, Rows, Spec, first_rows

_STORE_BYTES = 4 << 30


@dataclass(frozen=True)
class RayActor:
    abilities = frozenset({"pull", "push", "dense"})
    environment: ClassVar[dict[str, str]] = {}

    @property
    def name(self) -> str:
        return "ray actor"

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("ray") else "ray is not installed"

    @contextmanager
    def serve(self, spec: Spec) -> Iterator[str]:
        import ray

        context = ray.init(
            num_cpus=8,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            logging_level="ERROR",
            namespace="bench",
            runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "2"}},
        )
        try:
            actor = ray.remote(_Shard)
            actors = [actor.options(name=f"server{i}").remote(spec, i) for i in range(spec.servers)]
            ray.get([each.ready.remote() for each in actors])
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()

    def connect(self, address: str, spec: Spec, rank: int) -> "_Store":
        return _Store(address, spec)


class _Shard:
    """What one actor holds: keys `k` with k % servers == index, at row k // servers. Updated with torch."""

    def __init__(self, spec: Spec, index: int) -> None:
        import torch

        self._torch = torch
        self._rows = torch.from_numpy(first_rows(np.arange(index, spec.rows, spec.servers), spec.dim))
        self._sums = torch.zeros_like(self._rows)
        self._weight = torch.zeros(spec.dense_elements)

    def ready(self) -> int:
        return threading.get_native_id()

    def pull(self, keys: Keys) -> Rows:
        return self._rows.index_select(0, self._torch.tensor(keys)).numpy()

    def push(self, keys: Keys, grads: Rows) -> None:
        torch = self._torch
        unique, inverse = torch.unique(torch.tensor(keys), return_inverse=True)
        merged = torch.zeros(unique.numel(), self._rows.shape[1])
        merged.index_add_(0, inverse, torch.from_dlpack(_writable_view(grads)))
        sum_now = self._sums.index_select(0, unique).addcmul_(merged, merged)
        self._sums.index_copy_(0, unique, sum_now)
        self._rows.index_add_(0, unique, merged.div_(sum_now.sqrt_().add_(1e-10)), alpha=-LR)

    def exchange_dense(self, grad: Rows) -> Rows:
        self._weight.add_(self._torch.from_dlpack(_writable_view(grad)), alpha=-LR)
        return self._weight.numpy()


def _writable_view(array: Rows) -> Rows:
    """Ray's arrays are read-only, which torch refuses to look at; nothing here writes to them."""
    view = np.lib.stride_tricks.as_strided(array)
    if not view.flags.writeable:
        interface = dict(array.__array_interface__, data=(array.__array_interface__["data"][0], False))
        view = np.asarray(_Interface(interface, array))
    return view


class _Interface:
    def __init__(self, interface: dict[str, Any], keep_alive: Any) -> None:
        self.__array_interface__, self.keep_alive = interface, keep_alive


class _Store:
    def __init__(self, address: str, spec: Spec) -> None:
        import ray

        ray.init(address=address, namespace="bench", logging_level="ERROR", log_to_driver=False)
        self._ray, self._dim = ray, spec.dim
        self._actors = [ray.get_actor(f"server{i}") for i in range(spec.servers)]

    def pull(self, keys: Keys) -> Any:
        if len(self._actors) == 1:
            return self._ray.get(self._actors[0].pull.remote(keys))
        parts = self._split(keys)
        got = self._ray.get([a.pull.remote(local) for a, (_, local) in zip(self._actors, parts, strict=True)])
        rows = np.empty((keys.size, self._dim), np.float32)
        for (places, _), values in zip(parts, got, strict=True):
            rows[places] = values
        return rows

    def push(self, keys: Keys, grads: Rows) -> None:
        if len(self._actors) == 1:
            self._ray.get(self._actors[0].push.remote(keys, grads))
            return
        parts = zip(self._actors, self._split(keys), strict=True)
        self._ray.get([actor.push.remote(local, grads[places]) for actor, (places, local) in parts])

    def _split(self, keys: Keys) -> list[tuple[Keys, Keys]]:
        count = len(self._actors)
        places = [np.flatnonzero(keys % count == i) for i in range(count)]
        return [(place, keys[place] // count) for place in places]

    def exchange_dense(self, grad: Rows) -> Any:
        return self._ray.get(self._actors[0].exchange_dense.remote(grad))

    def close(self) -> None:
        self._ray.shutdown()
