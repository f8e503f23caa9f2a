"""The words of `--sync`."""

import pytest

from shoal.errors import BadInput
from shoal.sync.words import WORDS, check_word


@pytest.mark.parametrize("text", [word.example for word in WORDS.values()])
def test_every_example_is_a_word(text: str) -> None:
    assert check_word(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("quorum:1", "quorum:0.001", "ssp:0", "delay:0", "asp:staleness", "softsync:1", "dcasgd:0"),
        *("downpour:1,1", "average:1,state=reset", "asp,scale=1", "allreduce,rows=ssp:3", "bmuf:5,rows=asp"),
        *("downpour:2,3,rows=bsp,scale=0.5", "gossip,rows=asp:staleness"),
    ],
)
def test_words_at_their_bounds(text: str) -> None:
    assert check_word(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no such word. Allowed: bsp, quorum:0.9"),
        ("BSP", "there is no such word"),
        ("bsp:1", "bsp takes no argument"),
        ("bsp:", "bsp takes no argument"),
        ("quorum", "quorum takes q"),
        ("quorum:0", "quorum takes q"),
        ("quorum:1.1", "above 0 and at most 1, as quorum:0.9"),
        ("quorum:nan", "quorum takes q"),
        ("ssp:-1", "ssp takes s"),
        ("ssp:1.5", "ssp takes s"),
        ("ssp:\u0663", "ssp takes s"),
        ("asp:fast", "asp takes the word staleness"),
        ("softsync:0", "softsync takes k"),
        ("dcasgd:-0.1", "dcasgd takes l"),
        ("dcasgd:inf", "dcasgd takes l"),
        ("downpour:1", "downpour takes p"),
        ("downpour:0,1", "downpour takes p"),
        ("downpour:1,1,1", "downpour takes p"),
        ("average:0", "average takes H"),
        ("average:10,state=lost", "state=keep|average|reset"),
        ("asp,scale=0", "scale=NUMBER"),
        ("allreduce,rows=gossip", "rows of tables are synchronised by one of bsp"),
        ("allreduce,rows=ssp:x", "ssp takes s"),
        ("allreduce,rows=ssp:1,columns=2", "not 'columns=2'"),
    ],
)
def test_what_is_not_a_word_is_said(text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_word(text)
    assert str(caught.value).startswith(f"sync is {text!r}; ")
    assert said in str(caught.value)


def test_a_word_is_text() -> None:
    with pytest.raises(BadInput, match="sync is 3"):
        check_word(3)  # type: ignore[arg-type]
