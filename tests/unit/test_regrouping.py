"""Who makes the next group of workers, and who is in it, by what all of them have put down."""

from shoal.train.regroup import _Mark, _Seen


def seen(phases: list[str], **marks: _Mark) -> _Seen:
    return _Seen({"phases": phases, "clocks": [0] * len(phases)}, {int(r[1:]): m for r, m in marks.items()})


def test_the_most_senior_of_those_who_live_leads() -> None:
    replaced = _Mark(life=4, since=3)
    now = seen(["working", "gone", "at_end"], r0=replaced, r1=_Mark(2, since=1), r2=_Mark(3, since=1))
    assert now.leader == 2
    assert now.members() == [2, 0]
    assert seen(["working", "working"], r0=_Mark(1), r1=_Mark(2)).leader == 0


def test_a_new_worker_leads_nobody_and_comes_last() -> None:
    now = seen(["working", "waiting"], r0=_Mark(1, wants=4), r1=_Mark(2, since=1))
    assert now.leader == 1
    assert now.members() == [1, 0]


def test_nobody_joins_while_a_sum_is_not_applied() -> None:
    now = seen(["working", "waiting"], r0=_Mark(1, wants=4), r1=_Mark(2, since=1, summed=1))
    assert now.members() == [1]


def test_what_the_dead_wanted_does_not_count() -> None:
    now = seen(
        ["gone", "waiting", "working"], r0=_Mark(1, wants=9, since=1), r1=_Mark(2, since=1), r2=_Mark(3, 2)
    )
    assert now.want(1)
    assert now.want(1, new=True)
    assert not now.want(1, new=False)
    assert not now.want(2)


def test_a_step_of_any_number_can_be_sat_out() -> None:
    step = 5_000_000_000
    assert _Mark(1, high=step >> 20, low=step % (1 << 20)).sits_out == step
