"""One row per id."""

from __future__ import annotations

import torch

from shoal.nn.module import Asked, TableModule, uncompiled


class _Padded(Asked):
    """Ids without the padding among them; `places` says where the others go in `outer`."""

    __slots__ = ("outer", "places")

    def __init__(self, ids: torch.Tensor, kept: torch.Tensor) -> None:
        super().__init__(ids[kept])
        self.outer = ids.shape
        self.places = kept.reshape(-1).nonzero().reshape(-1)


class Embedding(TableModule):
    """`torch.nn.Embedding` on a table: ids of any shape in, vectors of shape ids.shape + (dim,) out.

    Ids are int64, int32 or uint64, of any value: there is no number of embeddings. `padding_idx` is an id
    like any other (negative ones do not count from the end); it reads as zeros and is never pushed.
    Outputs are float32, or what the module was converted to.

    >>> import torch, shoal
    >>> items = shoal.nn.Embedding("items", dim=2, optimizer=shoal.optim.SGD(lr=1.0), padding_idx=0)
    >>> items.bind(shoal.connect("memory://"))
    >>> items.table.assign([7], [[1.0, 2.0]])
    >>> items(torch.tensor([[7, 0]])).tolist()
    [[[1.0, 2.0], [0.0, 0.0]]]
    """

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of `input`."""
        return self._run(input)

    def _ask(self, input: torch.Tensor) -> Asked:
        ids = self._keys(input)
        if self.padding_idx is not None:
            kept = ids != self.padding_idx
            if not kept.all():
                return _Padded(ids, kept)
        return Asked(ids)

    def _answer(self, asked: Asked, rows: torch.Tensor) -> torch.Tensor:
        if not isinstance(asked, _Padded):
            return rows
        padded = rows.new_zeros(asked.outer.numel(), self.dim)
        padded.index_copy_(0, asked.places.to(padded.device), rows)
        return padded.reshape(*asked.outer, self.dim)
