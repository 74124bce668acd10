"""Where parameters are divided among ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pycomm import _C

UNIT: int = _C.sum_block  # elements between possible cuts


class Range(NamedTuple):
    """Elements of a parameter that one rank owns, in the order in which they lie in memory."""

    rank: int
    begin: int
    end: int


def cut(parameters: Sequence[torch.Tensor], ranks: int) -> list[tuple[Range, ...]]:
    """Cuts parameters that lie one after the other into one part per rank.

    Returns:
        For each parameter, the ranges of the ranks that own some of it, in order.
    """
    begins = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
    cuts = [0, *(_nearest(begins, begins[-1] * k / ranks) for k in range(1, ranks)), begins[-1]]
    parts = []
    for begin, end in itertools.pairwise(begins):
        ranges = []
        for rank in range(ranks):
            first, last = max(begin, cuts[rank]), min(end, cuts[rank + 1])
            if first < last:
                ranges.append(Range(rank, first - begin, last - begin))
        parts.append(tuple(ranges))
    return parts


def _nearest(begins: Sequence[int], wanted: float) -> int:
    """The possible cut that is nearest to an element."""
    for begin, end in itertools.pairwise(begins):
        if wanted < end:
            below = begin + int(wanted - begin) // UNIT * UNIT
            above = min(below + UNIT, end)
            return below if wanted - below <= above - wanted else above
    return begins[-1]
