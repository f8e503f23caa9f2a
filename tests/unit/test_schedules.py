"""Schedulers of a worker that replaces one that died."""

import torch

from shoal.train.schedules import Schedules


def one() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_one_that_moves_with_the_steps_goes_on_and_one_that_moves_by_passes_does_not() -> None:
    first, lives = Schedules(), [one(), one()]
    for _, scheduler in lives:
        first.add(scheduler)
    for _ in range(4):
        for optimizer, _ in lives:
            first.stepped(optimizer)
            optimizer.step()
        lives[0][1].step()
    lives[1][1].step()
    assert first.moved() == (4, -1)
    second, again = Schedules(first.moved()), [one(), one()]
    for _, scheduler in again:
        second.add(scheduler)
    assert [optimizer.param_groups[0]["lr"] for optimizer, _ in again] == [0.5**4, 1.0]
    assert second.moved() == (4, -1)  # a third life would go on there, too
    for _ in range(2):
        second.stepped(again[0][0])
        again[0][0].step()
        again[0][1].step()
    assert second.moved()[0] == 6
