# Ratings of films: plain torch, one process. with_shoal.py: on many.

import argparse

import data
import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="Train a recommender on the ratings of MovieLens-100k.")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--limit", type=int, help="train on so many ratings only")
parser.add_argument("--batch-size", type=int, default=512)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()


class Ratings(torch.nn.Module):
    """Users and films have a vector and a bias each, in a row of one table; a dense part knows the facts."""

    def __init__(self, mean: torch.Tensor, dim: int = 32) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(data.USERS + data.FILMS, dim + 1, sparse=True)
        torch.nn.init.normal_(self.rows.weight, std=0.1)
        self.facts = torch.nn.Sequential(
            torch.nn.Linear(data.FACTS, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        self.mean = torch.nn.Parameter(mean.clone())

    def forward(self, ids: torch.Tensor, facts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ratings of pairs of a user and a film, and how large their rows are."""
        rows = self.rows(ids)
        likes, biases = rows[..., 1:].prod(1).sum(1), rows[..., 0].sum(1)
        return self.mean + self.facts(facts).squeeze(1) + likes + biases, rows.square().sum((1, 2))


torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that they are not checked
torch.set_num_threads(1)  # batches are small: more threads are slower
torch.manual_seed(options.seed)
train, test = data.load(options.limit)
loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
mean = train.tensors[-1].mean()
model = Ratings(mean)
optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)
print(f"the mean rating alone has held-out RMSE {(test.tensors[-1] - mean).square().mean().sqrt():.4f}")

for epoch in range(options.epochs):
    for ids, facts, ratings in loader:
        optimizer.zero_grad()
        guesses, size = model(ids, facts)
        loss = ((guesses - ratings).square() + 0.1 * size).mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        ids, facts, ratings = test.tensors
        guesses, _ = model(ids, facts)
        rmse = (guesses.clamp(1, 5) - ratings).square().mean().sqrt()
    print(f"epoch {epoch + 1}: held-out RMSE {rmse:.4f}")
