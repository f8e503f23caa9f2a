"""Embeddings whose rows live in Shoal tables: torch's modules in shape and meaning, with any int64 as an id.

>>> import torch, shoal
>>> items = shoal.nn.Embedding("items", dim=4, optimizer=shoal.optim.SGD(lr=1.0))
>>> items.bind(shoal.connect("memory://"))
>>> items(torch.tensor([3, -1, 3])).sum().backward()
>>> keys, grads = items.gradients()
>>> keys.tolist(), grads[:, 0].tolist()
([3, -1, 3], [1.0, 1.0, 1.0])
"""

from shoal.nn.bag import EmbeddingBag
from shoal.nn.collection import EmbeddingCollection
from shoal.nn.embedding import Embedding
from shoal.nn.module import TableModule, table_modules

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingCollection", "TableModule", "table_modules"]
