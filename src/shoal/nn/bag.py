"""One vector per bag of ids."""

from __future__ import annotations

import torch

from shoal.config import check_choice
from shoal.errors import BadInput
from shoal.init import Initializer
from shoal.nn.module import Asked, TableModule, uncompiled
from shoal.nn.reduction import Mode, reduce_rows
from shoal.optim import Optimizer
from shoal.types import Codec


class _Bags(Asked):
    """Ids in the order of their bags; bag i is ends[i] to ends[i + 1]. No `ends`: each has one id."""

    __slots__ = ("ends", "weights")

    def __init__(self, keys: torch.Tensor, ends: torch.Tensor | None, weights: torch.Tensor | None) -> None:
        super().__init__(keys)
        self.ends = ends
        self.weights = weights


class EmbeddingBag(TableModule):
    """`torch.nn.EmbeddingBag` on a table: bags of ids in, one vector of `dim` per bag out.

    Ids are (B, L), a bag per row, or one-dimensional with `offsets`, the start of each bag; with
    `include_last_offset` their last entry is the end of the last bag. `mode` is sum, mean, max or sqrtn (the
    sum divided by the square root of the bag's size); `per_sample_weights` are for sum. An empty bag is
    zeros. `padding_idx` is an id like any other; it is left out of its bag and of its size.

    >>> import torch, shoal
    >>> tags = shoal.nn.EmbeddingBag("tags", dim=2, mode="mean", optimizer=shoal.optim.SGD(lr=1.0))
    >>> tags.bind(shoal.connect("memory://"))
    >>> tags.table.assign([1, 2], [[1.0, 1.0], [3.0, 5.0]])
    >>> tags(torch.tensor([1, 2, 1]), torch.tensor([0, 2])).tolist()
    [[2.0, 3.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        optimizer: Optimizer | None = None,
        init: Initializer | None = None,
        seed: int | None = None,
        wire: Codec = "fp32",
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(
            name, dim, optimizer=optimizer, init=init, seed=seed, wire=wire, padding_idx=padding_idx
        )
        self.mode: Mode = check_choice("mode", mode, Mode)
        self.include_last_offset = bool(include_last_offset)

    @uncompiled
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A vector of each bag of `input`."""
        return self._run(input, offsets, per_sample_weights)

    def _ask(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Asked:
        keys = self._keys(input)
        weights = per_sample_weights
        if weights is not None:
            self._check_weights(keys, weights)
            weights = weights.reshape(-1)
        if keys.dim() == 2 and offsets is None:
            bags, length = keys.shape
            ends = None if length == 1 else torch.arange(bags + 1).mul_(length)
        elif keys.dim() == 1 and offsets is not None:
            ends = self._ends(offsets, len(keys))
            last = int(ends[-1])
            keys = keys[:last]
            weights = None if weights is None else weights[:last]
        else:
            raise self._bad_shape(keys, offsets)
        return self._without_padding(keys.reshape(-1), ends, weights)

    def _without_padding(
        self, keys: torch.Tensor, ends: torch.Tensor | None, weights: torch.Tensor | None
    ) -> Asked:
        kept = None if self.padding_idx is None else keys != self.padding_idx
        if kept is None or kept.all():
            return _Bags(keys, ends, weights)
        before = torch.zeros(len(keys) + 1, dtype=torch.int64)
        torch.cumsum(kept, 0, out=before[1:])
        return _Bags(
            keys[kept],
            before if ends is None else before[ends],
            None if weights is None else weights[kept.to(weights.device)],
        )

    def _answer(self, asked: Asked, rows: torch.Tensor) -> torch.Tensor:
        assert isinstance(asked, _Bags)
        ends, weights = asked.ends, asked.weights
        if ends is None and weights is None:
            return rows  # of one row each: its sum, mean and maximum
        if ends is None:
            ends = torch.arange(len(rows) + 1)
        return reduce_rows(rows, ends, self.mode, weights)

    def _ends(self, offsets: torch.Tensor, ids: int) -> torch.Tensor:
        """The start of every bag and the end of the last, checked."""
        if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int64, torch.int32):
            seen = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
            raise BadInput(f"{self._where}: offsets are {seen}; allowed: a tensor of int64 or int32")
        if offsets.dim() != 1 or (self.include_last_offset and not len(offsets)):
            least = (
                "one-dimensional, with at least one entry" if self.include_last_offset else "one-dimensional"
            )
            raise BadInput(f"{self._where}: offsets have shape {tuple(offsets.shape)}; they must be {least}")
        ends = offsets.to("cpu", torch.int64)
        if not self.include_last_offset:
            # As in torch, ids without any bag are ignored.
            ends = torch.cat([ends, torch.tensor([ids if len(ends) else 0])])
        if int(ends[0]) != 0 or int(ends[-1]) > ids or bool((ends[1:] < ends[:-1]).any()):
            raise BadInput(
                f"{self._where}: offsets are {_short(offsets)} for {ids} ids; they must begin with 0, "
                f"not fall, and not exceed the number of ids"
            )
        return ends

    def _check_weights(self, keys: torch.Tensor, weights: torch.Tensor) -> None:
        if self.mode != "sum":
            raise BadInput(
                f"{self._where}: per_sample_weights with mode {self.mode!r}; they are for mode 'sum' only"
            )
        if weights.shape != keys.shape:
            raise BadInput(
                f"{self._where}: per_sample_weights have shape {tuple(weights.shape)}; "
                f"expected that of the ids, {tuple(keys.shape)}"
            )
        if weights.dtype != self.weight.dtype:
            raise BadInput(
                f"{self._where}: per_sample_weights are {weights.dtype}; expected {self.weight.dtype}"
            )

    def _bad_shape(self, keys: torch.Tensor, offsets: torch.Tensor | None) -> BadInput:
        seen = f"ids of shape {tuple(keys.shape)} {'without' if offsets is None else 'with'} offsets"
        return BadInput(f"{self._where}: {seen}; allowed: (B, L) without offsets, or (N,) with offsets")

    def extra_repr(self) -> str:
        """torch's: what the module is, inside the parentheses of its repr."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _short(offsets: torch.Tensor) -> str:
    shown = offsets[:8].tolist()
    return str(shown) if len(offsets) <= 8 else f"{str(shown)[:-1]}, ...]"
