"""Words of `--sync`: what they are made of, how they are written, what is refused."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import BadInput
from shoal.sync import (
    WORDS,
    All,
    Always,
    Bounded,
    Compensate,
    Difference,
    Each,
    Elastic,
    Every,
    First,
    Gradient,
    GradientSum,
    Mean,
    Neighbours,
    One,
    Outer,
    Parameters,
    Policy,
    Round,
    Share,
    Staleness,
    WithNeighbours,
    as_policy,
    parse,
    parse_list,
)
from shoal.sync.words import check_word, usage

ASP = Policy(Always(), Each(), Share(), Gradient())
BSP = Policy(Round(), All(), Mean(), Gradient())
# The table of the words, written a second time: text and the row of pieces.
TABLE = {
    "bsp": BSP,
    "quorum:0.9": Policy(Round(), First(0.9), Mean(), Gradient()),
    "ssp:3": Policy(Bounded(3), Each(), Share(), Gradient()),
    "ssp:0": Policy(Bounded(0), Each(), Share(), Gradient()),
    "delay:3": Policy(Bounded(3), Each(), Share(), Gradient()),
    "ssp:3,scale=1": Policy(Bounded(3), Each(), One(), Gradient()),
    "asp": ASP,
    "asp:staleness": Policy(Always(), Each(), Staleness(), Gradient()),
    "asp,scale=1": Policy(Always(), Each(), One(), Gradient()),
    "softsync:4": Policy(Always(), Every(4), Share(), Gradient()),
    "softsync:4,scale=staleness": Policy(Always(), Every(4), Staleness(), Gradient()),
    "dcasgd:0.04": Policy(Always(), Each(), Compensate(0.04), Gradient(), ASP),
    "dcasgd:2,scale=1": Policy(
        Always(),
        Each(),
        Compensate(2.0, One()),
        Gradient(),
        Policy(Always(), Each(), One(), Gradient()),
    ),
    "downpour:5,2": Policy(Always(), Each(), Share(), GradientSum(5, 2)),
    "average:10": Policy(Round(), All(), Mean(), Parameters(10), ASP, "keep", "worker"),
    "average:10,state=reset": Policy(Round(), All(), Mean(), Parameters(10), ASP, "reset", "worker"),
    "average:10,state=average": Policy(Round(), All(), Mean(), Parameters(10), ASP, "average", "worker"),
    "bmuf:50": Policy(Round(), All(), Mean(), Difference(50, Outer(1.0, None, False)), ASP, "keep", "worker"),
    "bmuf:50,momentum=0.9,nesterov=1": Policy(
        Round(), All(), Mean(), Difference(50, Outer(1.0, 0.9, True)), ASP, "keep", "worker"
    ),
    "easgd:8": Policy(Always(), Each(), Elastic(), Difference(8, Outer()), ASP, "keep", "worker"),
    "easgd:8,alpha=0.1": Policy(
        Always(), Each(), Elastic(0.1), Difference(8, Outer()), ASP, "keep", "worker"
    ),
    "diloco:500": Policy(
        Round(), All(), Mean(), Difference(500, Outer(0.7, 0.9, True)), ASP, "keep", "worker"
    ),
    "allreduce": Policy(Round(), All(), Mean(), Gradient(), BSP, dense_home="peers"),
    "allreduce,rows=ssp:3": Policy(
        Round(),
        All(),
        Mean(),
        Gradient(),
        Policy(Bounded(3), Each(), Share(), Gradient()),
        dense_home="peers",
    ),
    "gossip": Policy(WithNeighbours(), Neighbours(), Mean(), Parameters(1), ASP, dense_home="peers"),
    "hogwild": Policy(Always(), Each(), One(), Parameters(1), ASP, dense_home="shared"),
}
TEXTS = pytest.mark.parametrize("text", TABLE)


@TEXTS
def test_a_word_is_a_row_of_pieces(text: str) -> None:
    assert parse(text) == TABLE[text]


@TEXTS
def test_a_policy_gives_its_word_back(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@TEXTS
def test_words_are_hashable_and_distinct(text: str) -> None:
    same = {other for other, policy in TABLE.items() if policy == TABLE[text]}
    assert same == ({"ssp:3", "delay:3"} if text in ("ssp:3", "delay:3") else {text})
    assert hash(parse(text)) == hash(TABLE[text])


def test_the_table_here_names_every_word() -> None:
    assert {text.partition(":")[0].partition(",")[0] for text in TABLE} == set(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_the_documentation_names_every_word_as_it_is_written(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sync.md").read_text()
    assert f"`{usage(name).partition('[')[0]}`" in page


@pytest.mark.parametrize("name", WORDS)
def test_a_word_takes_what_its_usage_lists_and_nothing_else(name: str) -> None:
    plain, *options = usage(name).replace("]", "").split("[,")
    head, _, values = plain.partition(":")
    some = {"": "", "share": ":0.5", "strength": ":0.5", "push_every,fetch_every": ":2,2"}
    word = head + some.get(values, ":2")
    listed = dict(option.split("=", 1) for option in options)
    rows = [text.partition(":")[0] for text in listed.pop("rows").split("|")]
    for row, value in {"bsp": "", "quorum": ":0.5", "ssp": ":2", "asp": "", "softsync": ":2"}.items():
        with contextlib.nullcontext() if row in rows else pytest.raises(BadInput, match="rows is"):
            parse(f"{word},rows={row}{value}")
    known = {"scale": ("share", "1", "staleness"), "state": ("keep", "average", "reset")}
    for option, allowed in ((option, known.get(option, ())) for option in listed):
        for value in allowed:
            with contextlib.nullcontext() if value in listed[option].split("|") else refused(option):
                parse(f"{word},{option}={value}")


def refused(option: str) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(BadInput, match=rf"{option} is '\w+'; it must be one of [\w, ]+ \(\w+:")


def test_a_changed_copy_is_not_called_by_the_word() -> None:
    changed = replace(parse("asp"), scale=One())
    assert "One()" in str(changed)
    assert changed == parse("asp,scale=1")


def test_values_may_follow_in_order_or_by_name() -> None:
    assert parse("asp:staleness") == parse("asp,scale=staleness")
    assert parse("bmuf:50,0.9,1") == parse("bmuf:50,nesterov=1,momentum=0.9")


def test_rows_take_the_rest_of_the_text() -> None:
    assert parse("gossip,rows=asp,scale=1").rows == parse("asp,scale=1")
    assert str(parse("gossip,rows=asp,scale=1")) == "gossip,rows=asp,scale=1"


@pytest.mark.parametrize("text", [" bsp ", "average:10, state=reset", "downpour: 5, 2"])
def test_spaces_do_not_matter(text: str) -> None:
    assert parse(text) == TABLE[text.replace(" ", "")]


def test_join_takes_words_and_policies() -> None:
    assert as_policy("asp") == as_policy(ASP) == ASP
    assert check_word("average:10,state=reset") == "average:10,state=reset"


REFUSED = {
    "bps": "no word 'bps'. Did you mean bsp?",
    "": "no word ''",
    "quorum": "it takes 1",
    "quorum:0": "share is 0.0; it must be a number above 0 and at most 1",
    "quorum:1.01": "share is 1.01",
    "quorum:nan": "share is nan",
    "quorum:many": "share is 'many'; it must be a number",
    "ssp:-1": "bound is -1; it must be a whole number from 0",
    "ssp:1.5": "bound is '1.5'; it must be a whole number",
    "ssp:9999999999": "bound is 9999999999",
    "softsync:0": "count is 0; it must be a whole number from 1",
    "softsync:2,scale=mean": "scale is 'mean'; it must be one of share, 1, staleness",
    "average:5,rows=bsp": "one clock",
    "dcasgd:-1": "strength is -1.0",
    "dcasgd:1,scale=staleness": "scale is 'staleness'; it must be one of share, 1 ",
    "downpour:5": "it takes 2 to 3",
    "downpour:0,1": "push_every is 0",
    "downpour:1,0": "fetch_every is 0",
    "average:0": "period is 0",
    "average:5,state=lost": "state is 'lost'; it must be one of keep, average, reset",
    "average:5,rows=ssp:3": "one clock",
    "bmuf:5,momentum=1": "momentum is 1.0; it must be a finite number, at least 0 and below 1",
    "bmuf:5,nesterov=yes": "nesterov is 'yes'; it must be one of 0, 1",
    "easgd:5,alpha=0": "alpha is 0.0",
    "easgd:5,state=average": "state is 'average'; it must be one of keep, reset ",
    "diloco:5,lr=-1": "lr is -1.0",
    "asp:staleness,scale=1": "scale is given twice",
    "asp:often": "scale is 'often'",
    "bsp:3": "it takes 0",
    "bsp,state=keep": "'state=keep' is no option of bsp",
    "bsp,3": "'3' is no option of bsp",
    "allreduce,rows=average:3": "rows is average:3",
    "allreduce,rows=dcasgd:3": "rows is dcasgd:3",
    "allreduce,rows=gossip": "rows is gossip",
    "allreduce,rows=later": "no word 'later'",
    "average:10,rows=asp,state=reset": "'state=reset' is no option of asp",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_word_is_refused_with_its_reason(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse(text)
    assert REFUSED[text] in str(refused.value)


def test_an_unknown_word_lists_all_with_their_arguments() -> None:
    with pytest.raises(BadInput) as refused:
        parse("sometimes")
    assert all(usage(name) in str(refused.value) for name in WORDS)
    assert "as in asp:staleness" in str(refused.value)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(BadInput, match="sync is 3"):
        parse(3)  # type: ignore[arg-type]


def test_a_list_is_cut_where_words_begin() -> None:
    listed = (
        "bsp,quorum:0.75,ssp:3,asp,asp:staleness,average:10,state=reset,downpour:2,4,allreduce,rows=ssp:3"
    )
    assert [str(policy) for policy in parse_list(listed)] == [
        "bsp",
        "quorum:0.75",
        "ssp:3",
        "asp",
        "asp:staleness",
        "average:10,state=reset",
        "downpour:2,4",
        "allreduce,rows=ssp:3",
    ]


def test_a_misspelt_word_of_a_list_is_named() -> None:
    with pytest.raises(BadInput, match="no word 'spp'"):
        parse_list("bsp,spp:3")


@given(st.text(alphabet="abspq:,=.1 0rows", max_size=20))
def test_any_text_is_a_policy_or_bad_input(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert parse(str(parse(text))) == parse(text)


@given(st.floats(0.001, 1.0), st.integers(1, 200))
def test_a_quorum_is_the_ceiling_of_its_share(share: float, n: int) -> None:
    quorum = parse(f"quorum:{share}").core_spec(n)["quorum"]
    assert 1 <= quorum <= n
    assert abs(quorum - math.ceil(share * n)) <= (1 if abs(share * n - round(share * n)) < 1e-6 else 0)


@pytest.mark.parametrize(("share", "n", "quorum"), [(0.7, 10, 7), (0.9, 9, 9), (0.9, 10, 9), (0.75, 4, 3)])
def test_rounding_does_not_add_a_worker(share: float, n: int, quorum: int) -> None:
    assert parse(f"quorum:{share}").core_spec(n)["quorum"] == quorum
