"""How workers synchronise: four small pieces, policies made of them, and words that name the usual ones.

A policy says when a worker may start a step (`Proceed`), which contributions make an update (`Take`), by
what they are scaled (`Scale`), and what travels how often (`Payload`). A word such as `ssp:3` is a row of
these and nothing else; own compositions are as good as words and go to `shoal.join(sync=...)`. Nothing here
does any work: no torch, no sockets, values in and values out.

>>> parse("ssp:3") == Policy(Bounded(3), Each(), Share(), Gradient())
True
"""

from shoal.sync.mixing import mixing
from shoal.sync.outer import Outer
from shoal.sync.payload import Difference, Gradient, GradientSum, Parameters, Payload
from shoal.sync.policy import Policy
from shoal.sync.proceed import Always, Bounded, Proceed, Round, WithNeighbours
from shoal.sync.scale import Compensate, Elastic, Mean, One, Scale, Share, Staleness
from shoal.sync.take import All, Each, Every, First, Neighbours, Take
from shoal.sync.words import WORDS, as_policy, parse, parse_list

__all__ = [
    "WORDS",
    "All",
    "Always",
    "Bounded",
    "Compensate",
    "Difference",
    "Each",
    "Elastic",
    "Every",
    "First",
    "Gradient",
    "GradientSum",
    "Mean",
    "Neighbours",
    "One",
    "Outer",
    "Parameters",
    "Payload",
    "Policy",
    "Proceed",
    "Round",
    "Scale",
    "Share",
    "Staleness",
    "Take",
    "WithNeighbours",
    "as_policy",
    "mixing",
    "parse",
    "parse_list",
]
