"""Several tables looked up at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shoal.errors import BadInput
from shoal.nn.lookup import lookup
from shoal.nn.module import Asked, TableModule, uncompiled
from shoal.store.many import pull_many
from shoal.types import FloatRows


class EmbeddingCollection(torch.nn.Module):
    """A dict of `Embedding` and `EmbeddingBag`: a dict of ids in, a dict of vectors out, by one pull for all.

    What is given for a name is what its module's forward takes: ids; or for a bag a tuple (ids, offsets) or
    (ids, offsets, weights). A forward may name some of the modules only. The parameters are called as the
    modules are: `user.weight`.

    >>> import torch, shoal
    >>> user, tags = shoal.nn.Embedding("users", dim=2), shoal.nn.EmbeddingBag("tags", dim=3)
    >>> both = shoal.nn.EmbeddingCollection({"user": user, "tags": tags})
    >>> both.bind(shoal.connect("memory://"), optimizer=shoal.optim.Adagrad(lr=0.05))
    >>> ids, offsets = torch.tensor([4, 5, 6]), torch.tensor([0, 2])
    >>> {name: tuple(vectors.shape) for name, vectors in both({"user": ids, "tags": (ids, offsets)}).items()}
    {'user': (3, 2), 'tags': (2, 3)}
    """

    def __init__(self, modules: Mapping[str, TableModule]) -> None:
        super().__init__()
        for name, module in modules.items():
            if not isinstance(name, str) or not name or "." in name:
                raise BadInput(f"a name in the collection is {name!r}; allowed: text without '.'")
            if not isinstance(module, TableModule):
                raise BadInput(
                    f"{name!r} in the collection is a {type(module).__name__}; "
                    f"allowed: shoal.nn.Embedding and shoal.nn.EmbeddingBag"
                )
            # Not add_module: it refuses names such as "type", which a field of data may well have.
            self._modules[name] = module

    def bind(self, client: Any, optimizer: Any = None) -> None:
        """Bind every module, as `TableModule.bind` does."""
        for name in self:
            self[name].bind(client, optimizer)

    @uncompiled
    def forward(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The vectors of each name in `inputs`, in its order."""
        asked = {name: self._asked(name, given) for name, given in inputs.items()}
        offers = {name: self[name]._take_offer(ask) for name, ask in asked.items()}
        rows = self._pull({name: asked[name] for name, offer in offers.items() if offer is None})
        rows |= {name: offer for name, offer in offers.items() if offer is not None}
        tensors = lookup([self[name]._pulled(ask, rows[name]) for name, ask in asked.items()])
        return {
            name: self[name]._answer(ask, tensor)
            for (name, ask), tensor in zip(asked.items(), tensors, strict=True)
        }

    def _asked(self, name: str, given: Any) -> Asked:
        return self[name]._ask(*given) if isinstance(given, tuple) else self[name]._ask(given)

    def _pull(self, asked: dict[str, Asked]) -> dict[str, FloatRows]:
        if not asked:
            return {}
        client = self[next(iter(asked))].client
        items = [(self[name].table, ask.array) for name, ask in asked.items()]
        pulled = client.reading(lambda: pull_many(client, items))
        return dict(zip(asked, pulled, strict=True))

    def __getitem__(self, name: str) -> TableModule:
        module = self._modules.get(name)
        if not isinstance(module, TableModule):
            raise BadInput(f"no {name!r} in the collection; it has: {', '.join(map(repr, self._modules))}")
        return module

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules
