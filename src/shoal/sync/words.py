"""The words of `--sync`: how each is written and which arguments it takes. What they do is elsewhere.

A word is a name, its arguments after a colon, and settings after commas:

    bsp    quorum:0.75    downpour:4,2    average:10,state=reset    allreduce,rows=ssp:3

This module only says whether a text is such a word, so that a mistake is found before a process starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import BadInput

__all__ = ["WORDS", "Word", "check_word"]

_PERIOD_MAX = 1_000_000_000
_STATES = ("keep", "average", "reset")


@dataclass(frozen=True)
class Word:
    """One word: an example of how it is written, what its arguments may be, and where it can be used."""

    example: str
    # What each argument must be, in words, and the test of it. An argument that is not given is missing.
    arguments: tuple[tuple[str, Callable[[str], bool]], ...] = ()
    # Whether it may be left without arguments, as in `asp` beside `asp:staleness`.
    bare: bool = False
    # Whether the rows of tables can be synchronised by it: `rows=` takes these alone.
    rows: bool = False


def _whole(low: int) -> Callable[[str], bool]:
    return lambda text: text.isascii() and text.isdigit() and low <= int(text) <= _PERIOD_MAX


def _fraction(text: str) -> bool:
    return 0 < _number(text) <= 1


def _not_negative(text: str) -> bool:
    return 0 <= _number(text) < math.inf


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


_Q = ("q, the share of workers to wait for, above 0 and at most 1", _fraction)
_S = ("s, the steps that the fastest may be ahead, a whole number of at least 0", _whole(0))
_K = ("k, the gradients that make an update, a whole number of at least 1", _whole(1))
_L = ("l, the strength of the compensation, a number of at least 0", _not_negative)
_P = ("p, the steps between pushes, a whole number of at least 1", _whole(1))
_F = ("f, the steps between fetches, a whole number of at least 1", _whole(1))
_H = ("H, the steps of a block, a whole number of at least 1", _whole(1))
_STALENESS = ("the word staleness", lambda text: text == "staleness")

WORDS: dict[str, Word] = {
    "bsp": Word("bsp", rows=True),
    "quorum": Word("quorum:0.9", (_Q,), rows=True),
    "ssp": Word("ssp:3", (_S,), rows=True),
    "delay": Word("delay:3", (_S,), rows=True),
    "asp": Word("asp", (_STALENESS,), bare=True, rows=True),
    "softsync": Word("softsync:2", (_K,), rows=True),
    "dcasgd": Word("dcasgd:0.04", (_L,)),
    "downpour": Word("downpour:5,5", (_P, _F)),
    "average": Word("average:10", (_H,)),
    "bmuf": Word("bmuf:10", (_H,)),
    "easgd": Word("easgd:10", (_H,)),
    "diloco": Word("diloco:100", (_H,)),
    "allreduce": Word("allreduce"),
    "gossip": Word("gossip"),
    "hogwild": Word("hogwild"),
}


def check_word(text: str) -> str:
    """`text` if it is a word of `--sync`; BadInput says which part of it is not, and what is allowed.

    >>> check_word("allreduce,rows=ssp:3")
    'allreduce,rows=ssp:3'
    >>> check_word("quorum:2")
    Traceback (most recent call last):
        ...
    shoal.errors.BadInput: sync is 'quorum:2'; quorum takes q, the share of workers to wait for, ...
    """
    if not isinstance(text, str):
        raise BadInput(f"sync is {text!r}; allowed: a word, as 'bsp'")
    plain, settings = _split(text)
    _check_plain(text, plain)
    for setting in settings:
        _check_setting(text, setting)
    return text


def _split(text: str) -> tuple[str, list[str]]:
    """The word itself and its settings; a comma also stands between the arguments of a word."""
    parts = text.split(",")
    first = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    return ",".join(parts[:first]), parts[first:]


def _check_plain(text: str, plain: str) -> None:
    name, colon, rest = plain.partition(":")
    word = WORDS.get(name)
    if word is None:
        raise BadInput(f"sync is {text!r}; there is no such word. Allowed: {_list(WORDS)}, asp:staleness")
    if not colon and (word.bare or not word.arguments):
        return
    if not word.arguments:
        raise BadInput(f"sync is {text!r}; {name} takes no argument")
    given = rest.split(",")
    fits = len(given) == len(word.arguments)
    if not fits or not all(test(value) for (_, test), value in zip(word.arguments, given, strict=True)):
        wanted = " and ".join(what for what, _ in word.arguments)
        raise BadInput(f"sync is {text!r}; {name} takes {wanted}, as {word.example}")


def _check_setting(text: str, setting: str) -> None:
    name, equals, value = setting.partition("=")
    if name == "rows" and equals:
        word = WORDS.get(value.partition(":")[0])
        if word is None or not word.rows:
            allowed = _list({name: word for name, word in WORDS.items() if word.rows})
            raise BadInput(f"sync is {text!r}; rows of tables are synchronised by one of {allowed}")
        _check_plain(text, value)
        return
    known = {"state": value in _STATES, "scale": 0 < _number(value) < math.inf}
    if not known.get(name, False):
        raise BadInput(
            f"sync is {text!r}; what follows a word is rows=WORD, state={'|'.join(_STATES)} or scale=NUMBER, "
            f"as allreduce,rows=ssp:3; not {setting!r}"
        )


def _list(words: dict[str, Word]) -> str:
    return ", ".join(word.example for word in words.values())
