"""The words of `--sync`: a table of names, and how a text becomes a policy.

    word[:value,...][,option=value,...][,rows=word...]

A row of the table is a function: its parameters are what the word takes, and it makes the pieces, nothing
else. Values after the colon fill the parameters in order; those with a default may be given by name instead.
`rows=` comes last and takes the rest of the text, for it is a word with values and options of its own.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.errors import BadInput
from shoal.sync import outer
from shoal.sync.payload import Difference, Gradient, GradientSum, Parameters
from shoal.sync.policy import Policy
from shoal.sync.proceed import Always, Bounded, Round, WithNeighbours
from shoal.sync.scale import Compensate, Elastic, Mean, One, Scale, Share, Staleness
from shoal.sync.take import All, Each, Every, First, Neighbours

_SHARE = Share()
_BSP = Policy(Round(), All(), Mean(), Gradient()).called("bsp")


def _asp(scale: Scale = _SHARE) -> Policy:
    return Policy(Always(), Each(), scale, Gradient())


_ASP = _asp().called("asp")


def _ssp(bound: int, scale: Scale = _SHARE) -> Policy:
    return Policy(Bounded(bound), Each(), scale, Gradient())


def _block(period: int, rule: outer.Outer, state: Any) -> Policy:
    """All workers meet at the end of a block, and servers make an outer step."""
    return Policy(Round(), All(), Mean(), Difference(period, rule), _ASP, state, "worker")


WORDS: dict[str, Callable[..., Policy]] = {
    "bsp": lambda: _BSP,
    "quorum": lambda share: Policy(Round(), First(share), Mean(), Gradient()),
    "ssp": _ssp,
    "delay": _ssp,
    "asp": _asp,
    "softsync": lambda count, scale=_SHARE: Policy(Always(), Every(count), scale, Gradient()),
    "dcasgd": lambda strength, scale=_SHARE: Policy(
        Always(), Each(), Compensate(strength, scale), Gradient(), _asp(scale)
    ),
    "downpour": lambda push_every, fetch_every, scale=_SHARE: Policy(
        Always(), Each(), scale, GradientSum(push_every, fetch_every)
    ),
    "average": lambda period, state="keep": Policy(
        Round(), All(), Mean(), Parameters(period), _ASP, state, "worker"
    ),
    "bmuf": lambda period, momentum=None, nesterov=False, state="keep": _block(
        period, outer.bmuf(momentum, nesterov), state
    ),
    "easgd": lambda period, alpha=None, state="keep": Policy(
        Always(), Each(), Elastic(alpha), Difference(period, outer.average()), _ASP, state, "worker"
    ),
    "diloco": lambda period, lr=0.7, momentum=0.9, nesterov=True, state="keep": _block(
        period, outer.diloco(lr, momentum, nesterov), state
    ),
    "allreduce": lambda: Policy(Round(), All(), Mean(), Gradient(), _BSP, dense_home="peers"),
    "gossip": lambda: Policy(WithNeighbours(), Neighbours(), Mean(), Parameters(), _ASP, dense_home="peers"),
    "hogwild": lambda: Policy(Always(), Each(), One(), Parameters(), _ASP, dense_home="shared"),
}

# How the text of a parameter is read, by the parameter's name; what is not here is a number with a point.
_WHOLE = ("bound", "count", "push_every", "fetch_every", "period")
_CHOICES: dict[str, dict[str, Any]] = {
    "scale": {"share": Share(), "1": One(), "staleness": Staleness()},
    "state": {"keep": "keep", "average": "average", "reset": "reset"},
    "nesterov": {"0": False, "1": True},
}
# Of words that do not take all of them.
_FEWER = {("dcasgd", "scale"): ("share", "1"), ("easgd", "state"): ("keep", "reset")}
_ROWS = ("bsp", "quorum", "ssp", "asp", "softsync")
_FEWER_ROWS = {
    **{word: (word, "asp") for word in ("bsp", "quorum", "ssp")},
    "delay": ("ssp", "asp"),
    "softsync": ("asp", "softsync"),
    **dict.fromkeys(("average", "bmuf", "diloco"), ("asp",)),
}


def parse(text: str) -> Policy:
    """The policy that a text names; BadInput says what is wrong with it and what is allowed.

    >>> str(parse("allreduce,rows=ssp:3"))
    'allreduce,rows=ssp:3'
    >>> parse("quorum:1.5")
    Traceback (most recent call last):
        ...
    shoal.errors.BadInput: sync 'quorum:1.5': share is 1.5; it must be a number above 0 and at most 1 ...
    """
    if not isinstance(text, str):
        raise BadInput(f"sync is {text!r}; it must be a word, as 'bsp', or a shoal.sync.Policy")
    main, found, rows = text.strip().partition(",rows=")
    name, values, options = _cut(main)
    if name not in WORDS:
        raise BadInput(_unknown(text, name))
    of_rows = parse(rows) if found else None
    try:
        policy = WORDS[name](**_arguments(name, values, options))
        if of_rows is not None:
            policy = replace(policy, rows=of_rows)
    except BadInput as error:
        raise BadInput(f"sync {text!r}: {error} ({usage(name)})") from None
    return policy.called(text.strip())


def as_policy(sync: str | Policy) -> Policy:
    """`sync` itself if it is a policy, else what the word names: what `shoal.join(sync=...)` takes."""
    return sync if isinstance(sync, Policy) else parse(sync)


def check_word(text: str) -> str:
    """`text`, if it names a policy."""
    parse(text)
    return text


def parse_list(text: str) -> list[Policy]:
    """The policies of a list with commas; a comma belongs to a word unless another word begins behind it.

    >>> [str(policy) for policy in parse_list("bsp,downpour:2,4,average:10,state=reset,asp")]
    ['bsp', 'downpour:2,4', 'average:10,state=reset', 'asp']
    """
    words: list[str] = []
    for part in text.split(","):
        starts = part.strip().partition(":")[0] in WORDS
        if words and not starts and (_continues(part) or not part):
            words[-1] += f",{part}"
        else:
            words.append(part.strip())
    return [parse(word) for word in words]


def usage(name: str) -> str:
    """How a word is written, with all that it takes.

    >>> usage("average")
    'average:period[,state=keep|average|reset][,rows=asp]'
    """
    options = [
        f"[,{option}={'|'.join(_choices(name, option)) or 'number'}]" for option in _parameters(name)[1]
    ]
    rows = "|".join(map(_plain, _FEWER_ROWS.get(name, _ROWS)))
    return f"{_plain(name)}{''.join(options)}[,rows={rows}]"


def _plain(name: str) -> str:
    """A word and what it needs."""
    needed = _parameters(name)[0]
    return f"{name}{':' if needed else ''}{','.join(needed)}"


def _parameters(name: str) -> tuple[list[str], dict[str, Any]]:
    """A word's parameters: those it needs, and those with a default."""
    found = inspect.signature(WORDS[name]).parameters.values()
    needed = [p.name for p in found if p.default is p.empty]
    return needed, {p.name: p.default for p in found if p.default is not p.empty}


def _cut(text: str) -> tuple[str, list[str], list[str]]:
    """A text without `rows=`: the name, the values in order, and the options as they stand."""
    first, *rest = text.split(",")
    name, colon, value = first.partition(":")
    values = [value] if colon else []
    options: list[str] = []
    for part in rest:
        (values if colon and not options and "=" not in part else options).append(part)
    return name.strip(), values, options


def _arguments(name: str, values: list[str], options: list[str]) -> dict[str, Any]:
    needed, optional = _parameters(name)
    order = [*needed, *optional]
    if len(values) < len(needed) or len(values) > len(order):
        given = "1 value" if len(values) == 1 else f"{len(values)} values"
        raise BadInput(f"{name} is given {given} after the colon; it takes {_count(needed, order)}")
    read = {parameter: _read(name, parameter, value) for parameter, value in zip(order, values, strict=False)}
    for option in options:
        parameter, equals, value = option.partition("=")
        parameter = parameter.strip()
        if not equals or parameter not in optional:
            known = ", ".join([*optional, "rows"])
            raise BadInput(f"{option!r} is no option of {name}; it has: {known}, written name=value")
        if parameter in read:
            raise BadInput(f"{parameter} is given twice")
        read[parameter] = _read(name, parameter, value)
    return read


def _count(needed: list[str], order: list[str]) -> str:
    low, high = len(needed), len(order)
    return f"{low}" if low == high else f"{low} to {high}"


def _choices(name: str, parameter: str) -> dict[str, Any]:
    """What can be written for a word's parameter, and what it stands for; nothing: a number."""
    found = _CHOICES.get(parameter, {})
    return {text: found[text] for text in _FEWER.get((name, parameter), found)}


def _read(name: str, parameter: str, text: str) -> Any:
    text = text.strip()
    if choices := _choices(name, parameter):
        if text not in choices:
            raise BadInput(f"{parameter} is {text!r}; it must be one of {', '.join(choices)}")
        return choices[text]
    try:
        return int(text) if parameter in _WHOLE else float(text)
    except ValueError:
        kind = "whole number" if parameter in _WHOLE else "number"
        raise BadInput(f"{parameter} is {text!r}; it must be a {kind}") from None


def _unknown(text: str, name: str) -> str:
    near = difflib.get_close_matches(name, WORDS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    words = "".join(f"\n  {usage(word)}" for word in WORDS)
    note = "docs/sync.md; an option may stand behind the colon, as in asp:staleness"
    return f"sync {text!r}: there is no word {name!r}.{hint} The words ({note}):{words}"


def _continues(part: str) -> bool:
    """Whether a part of a list is a value or an option rather than a misspelt word."""
    if "=" in part:
        return True
    try:
        float(part)
    except ValueError:
        return part.strip() in _CHOICES["scale"] or part.strip() in _CHOICES["state"]
    return True
