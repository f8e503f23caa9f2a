"""A policy as plain data: what workers tell the supervisor of their job, for not every policy has a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from shoal import settings
from shoal.errors import BadInput
from shoal.sync.outer import Outer
from shoal.sync.payload import Difference, Gradient, GradientSum, Parameters
from shoal.sync.policy import Policy
from shoal.sync.proceed import Always, Bounded, Round, WithNeighbours
from shoal.sync.scale import Compensate, Elastic, Mean, One, Share, Staleness
from shoal.sync.take import All, Each, Every, First, Neighbours

_PROCEED, _TAKE = (Always, Bounded, Round, WithNeighbours), (Each, All, First, Every, Neighbours)
_SCALE = (Mean, Share, One, Staleness, Compensate, Elastic)
_PAYLOAD = (Gradient, GradientSum, Difference, Parameters, Outer)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Policy, *_PROCEED, *_TAKE, *_SCALE, *_PAYLOAD)}


def to_plain(policy: Policy) -> dict[str, Any]:
    """What JSON can hold, with what the policy is called.

    >>> from shoal.sync import parse
    >>> plain = to_plain(parse("ssp:3"))
    >>> plain["called"], plain["proceed"], plain["rows"]
    ('ssp:3', {'kind': 'Bounded', 'bound': 3}, None)
    """
    return {**_parts(policy), "called": str(policy)}


def from_plain(data: Mapping[str, Any]) -> Policy:
    """The policy of `to_plain`, under that name.

    >>> from shoal.sync import parse
    >>> from_plain(to_plain(parse("diloco:50"))) == parse("diloco:50")
    True
    """
    policy = _made({name: value for name, value in data.items() if name != "called"})
    if not isinstance(policy, Policy):
        raise BadInput(f"unknown policy {data.get('kind')!r}; known: Policy")
    return policy.called(str(data.get("called", "")))


def _parts(piece: Any) -> dict[str, Any]:
    # A class of the user's own goes as the piece that it is derived from: who reads it needs no more.
    kind = next(kind for kind in type(piece).__mro__ if kind in _KINDS.values())
    values = {one.name: getattr(piece, one.name) for one in fields(kind) if one.init}
    return {"kind": kind.__name__, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _parts(value)
    return float(value) if isinstance(value, float) else value  # one of NumPy's is a float, too


def _made(data: Mapping[str, Any]) -> Any:
    values = {name: _made(value) if isinstance(value, dict) else value for name, value in data.items()}
    return settings.from_plain("piece of a policy", _KINDS, values)
