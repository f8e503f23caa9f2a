"""Policies that no word names, composed of the pieces, against plain NumPy: they do what they say."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.crew import run_workers, several
from tests.train.quadratic import Floats, gradient, start, steps

import shoal.nn
from shoal.sync import (
    Always,
    Bounded,
    Difference,
    Each,
    Elastic,
    Every,
    First,
    Gradient,
    Mean,
    Neighbours,
    Outer,
    Parameters,
    Policy,
    Round,
    Share,
    WithNeighbours,
    parse,
)
from shoal.train.worker import Worker

LR, ASP = 0.05, parse("asp")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def local(rank: int, w: Floats, count: int) -> Floats:
    """Steps that a worker makes by itself."""
    for _ in range(count):
        w = w - LR * gradient(rank, w)
    return w


def test_a_quorum_of_models_takes_the_first_and_drops_the_rest() -> None:
    """Of two workers the one that ends its block first: its model is then everybody's."""
    with several(2, Policy(Round(), First(0.5), Mean(), Parameters(3), ASP, "keep", "worker")) as workers:
        models = [steps(worker, 3, sgd) for worker in workers]
        centre = start()
        for block, first in enumerate([0, 1, 1, 0]):
            centre = local(first, centre, 3)
            for rank in (first, 1 - first):
                model, _, run = models[rank]
                run()
                np.testing.assert_allclose(model.values, centre, **CLOSE)
            assert sum(worker.dropped for worker in workers) == block + 1


@pytest.mark.parametrize(("lr", "momentum", "nesterov"), [(0.5, 0.0, False), (0.8, 0.4, True)])
def test_blocks_with_an_outer_step_of_ones_own(lr: float, momentum: float, nesterov: bool) -> None:
    workers, blocks, rule = 3, 4, Outer(lr, momentum, nesterov)
    policy = Policy(Round(), First(1.0), Mean(), Difference(2, rule), ASP, "reset", "worker")

    def script(worker: Worker) -> list[Floats]:
        model, _, run = steps(worker, 2, sgd)
        return [model.values.copy() for _ in range(blocks) if run() is None]

    centre, velocity, expected = start(), np.zeros_like(start()), []
    for _ in range(blocks):
        moved = centre - np.mean([local(rank, centre, 2) for rank in range(workers)], axis=0)
        velocity = momentum * velocity + moved
        centre = centre - lr * (moved + momentum * velocity if nesterov else velocity)
        expected.append(centre)
    for found in run_workers(workers, script, policy):
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_an_elastic_force_by_an_outer_step_of_ones_own() -> None:
    """The worker goes all of alpha to the centre, the centre half of it to the worker, with momentum."""
    rule = Outer(lr=0.5, momentum=0.6)
    policy = Policy(Always(), Each(), Elastic(0.4), Difference(1, rule), ASP, dense_home="worker")
    with several(1, policy) as (worker,):
        model, _, run = steps(worker, 1, sgd)
        w, centre, velocity = start(), start(), np.zeros_like(start())
        for _ in range(6):
            force = 0.4 * (w - centre)
            velocity = 0.6 * velocity + force
            w, centre = w - LR * gradient(0, w) - force, centre + 0.5 * velocity
            run()
            np.testing.assert_allclose(model.values, w, **CLOSE)


BY_TWOS = Policy(Bounded(1), Every(2), Share(), Gradient())


def test_several_gradients_make_an_update_of_those_who_wait_by_steps() -> None:
    with several(2, BY_TWOS) as workers:
        models = [steps(worker, 1, sgd) for worker in workers]
        now, read = start(), [start(), start()]
        for _ in range(4):  # in turn: the second makes the update, which the first has not seen yet
            grads = [gradient(rank, w) for rank, w in enumerate(read)]
            models[0][2]()
            read[0] = now
            now = read[1] = now - LR * (grads[0] + grads[1]) / 2
            models[1][2]()
            for (model, _, _), expected in zip(models, read, strict=True):
                np.testing.assert_allclose(model.values, expected, **CLOSE)


def test_nobody_runs_ahead_of_those_whose_gradients_make_an_update_together() -> None:
    def script(worker: Worker) -> None:
        _, _, run = steps(worker, 4, sgd)
        if worker.rank == 1:
            until = time.monotonic() + 10
            while (state := worker.rounds.state())["phases"][0] != "waiting":
                assert time.monotonic() < until, state
            assert state["clocks"][0] == 2  # two steps are finished, and the third may not begin
        run()

    run_workers(2, script, BY_TWOS)


@pytest.mark.parametrize("period", [1, 3])
def test_gossip_mixes_after_its_period(period: int) -> None:
    policy = Policy(WithNeighbours(), Neighbours(), Mean(), Parameters(period), ASP, dense_home="peers")

    def script(worker: Worker) -> list[Floats]:
        model, _, run = steps(worker, 1, sgd)
        return [model.values.copy() for _ in range(7) if run() is None]

    models, expected = [start(), start()], []
    for step in range(1, 8):
        grads = [gradient(rank, w) for rank, w in enumerate(models)]
        if step % period == 0:
            models = [np.mean(models, axis=0)] * 2
        models = [w - LR * grad for w, grad in zip(models, grads, strict=True)]
        expected.append(models)
    np.testing.assert_allclose(np.stack(run_workers(2, script, policy), axis=1), expected, **CLOSE)


def test_rows_in_rounds_beside_an_elastic_force_are_a_mean_over_samples() -> None:
    def script(worker: Worker) -> float:
        emb = shoal.nn.Embedding("items", dim=1, init=shoal.init.Zeros())
        optimizer = torch.optim.SGD(emb.parameters(), lr=1.0)
        worker.prepare(emb, optimizer)
        (emb(torch.tensor([7])).sum() * (1 + worker.rank)).backward()
        worker.weight(1 + 2 * worker.rank)
        optimizer.step()
        return float(emb.table.pull([7]).item())

    for word in ("easgd:2,rows=bsp", "downpour:1,1,rows=bsp"):
        assert run_workers(2, script, word) == [-(1 * 1 + 2 * 3) / 4] * 2
