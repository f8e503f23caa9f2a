"""The random numbers that a script draws without a generator of its own: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Where they stand in this process; that of GPUs, where they are used."""
    name, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if gpus else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, torch.tensor(numbers), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from there. GPUs that are not here are left out."""
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
