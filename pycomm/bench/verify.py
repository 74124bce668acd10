"""Inputs with results that are known beforehand, for every dtype and order of adding.

All values are small integers, and so are all partial results, so nothing rounds. The right answer
comes from a closed form, not from reducing: element i has a base, and rank r's share of it depends
only on ``(r + i) mod n``, which takes every value from 0 to n - 1 exactly once over the ranks.
"""

from __future__ import annotations

import torch

from pycomm.bench.cases import Case
from pycomm.bench.contestants import Prepared

# A prime: data that land a power of two off their place are seen.
PERIOD = 251
# Exact in bfloat16, and 8 bits: no result may pass this.
LARGEST = 255
LARGEST_SUMMAND = 4  # of what is summed or averaged: a base of 2, plus 1, plus 1
POISON = 99


def _spread(pattern: torch.Tensor, case: Case) -> torch.Tensor:
    """Repeats a periodic pattern over all elements."""
    return pattern.to(case.dtype).repeat(-(-case.count // pattern.numel()))[: case.count]


def _index(case: Case) -> torch.Tensor:
    return torch.arange(PERIOD * case.ranks, dtype=torch.int64)


def inputs(case: Case, rank: int) -> torch.Tensor:
    """A rank's input for the whole tensor."""
    index = _index(case)
    if case.collective in ("all_gather", "broadcast"):
        return _spread(index % PERIOD, case)
    base, turn, half = index % PERIOD % 3, (rank + index) % case.ranks, case.ranks // 2
    if case.op in ("min", "max"):
        values = base + turn
    elif case.op == "prod":
        values = torch.where(turn == 0, base + 1, 1)
    else:  # as many ranks lie one above the mean as lie one below it
        values = base + 1 + (turn < half).long() - (turn >= case.ranks - half).long()
    return _spread(values, case)


def outputs(case: Case) -> torch.Tensor:
    """The expected result for the whole tensor."""
    index = _index(case)
    if case.collective in ("all_gather", "broadcast"):
        return _spread(index % PERIOD, case)
    base = index % PERIOD % 3
    values = {
        "sum": (base + 1) * case.ranks,
        "avg": base + 1,
        "min": base,
        "max": base + case.ranks - 1,
        "prod": base + 1,
    }[case.op]
    assert int(values.max()) <= LARGEST, f"no exact values for {case.ranks} ranks"
    return _spread(values, case)


def block(case: Case, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """A rank's block of the whole tensor."""
    length = case.count // case.ranks
    return whole[rank * length : (rank + 1) * length]


def count_wrong(case: Case, rank: int, prepared: Prepared) -> int:
    """Runs the case once on known inputs; returns the number of wrong elements on this rank."""
    given, expected = inputs(case, rank), outputs(case)
    if case.collective == "all_gather":
        given = block(case, rank, given)
    if case.collective == "reduce_scatter":
        expected = block(case, rank, expected)
    prepared.result.fill_(POISON)
    if case.collective != "broadcast" or rank == 0:
        prepared.source.copy_(given)
    prepared.call()
    return int((prepared.result != expected.to(prepared.result.device)).sum())
