"""Checks of a compressed all-reduce, on the inputs of `verify`.

Every rank must have the same bits. Int8 must be within its published bound. A cast must be exact,
as these small integers are exact in the narrow floats, too. With a residual nothing may be lost:
the result, counted once per rank if it is a mean, and all ranks' residuals must add up to the
inputs. Top-k promises only the last property and equal bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

import pycomm
from pycomm.bench import verify
from pycomm.bench.cases import Case
from pycomm.bench.contestants import Compressed, Prepared

# Rounding of sums in the tensor's own dtype, and in the fp32 of residuals, in units of its epsilon.
SOME_ULPS = 4


def count_wrong(case: Case, rank: int, contestant: Compressed, prepared: Prepared) -> int:
    """Runs the case on known inputs; returns the number of elements that fail a check here."""
    wrong = _count(case, rank, contestant, prepared)
    if prepared.residual is not None:
        prepared.residual.zero_()  # as it was
    else:
        kept = replace(contestant, feedback=True)
        wrong += _count(case, rank, kept, kept.prepare(case))
    return wrong


def _count(case: Case, rank: int, contestant: Compressed, prepared: Prepared) -> int:
    compression = pycomm.parse_compression(contestant.compression)
    prepared.result.fill_(verify.POISON)
    prepared.source.copy_(verify.inputs(case, rank))
    prepared.call()
    result = prepared.result.cpu()
    wrong = _unlike_first(result)
    if not isinstance(compression, pycomm.TopK):
        off = (result.float() - verify.outputs(case).float()).abs()
        limit = _bound(compression, contestant.algorithm, case) + _rounding(case)
        wrong += int((~(off <= limit)).sum())
    if prepared.residual is not None:
        wrong += _lost(case, result, prepared.residual.cpu())
    return wrong


def _unlike_first(result: torch.Tensor) -> int:
    """The number of elements with other bits than on rank 0."""
    first = result.clone()
    dist.broadcast(first.view(torch.uint8), 0)
    bits = torch.int32 if result.element_size() == 4 else torch.int16
    return int((first.view(bits) != result.view(bits)).sum())


def _bound(compression: pycomm.Compression, algorithm: str, case: Case) -> float:
    """The largest error of an element from compression, without the rounding of sums."""
    if not isinstance(compression, pycomm.Int8) or case.ranks == 1:
        return 0.0
    roundings = {"ring": (case.ranks + 1) / 2, "tree": math.ceil(math.log2(case.ranks)) + 1}
    mean = roundings.get(algorithm, 2) * verify.LARGEST_SUMMAND / 254
    return mean * (case.ranks if case.op == "sum" else 1)


def _rounding(case: Case) -> float:
    """The largest error from rounding sums to the tensor's dtype."""
    largest = verify.LARGEST_SUMMAND * (case.ranks if case.op == "sum" else 1)
    return SOME_ULPS * torch.finfo(case.dtype).eps * largest


def _lost(case: Case, result: torch.Tensor, residual: torch.Tensor) -> int:
    """The number of elements whose results and residuals do not add up to the inputs."""
    dist.all_reduce(residual)
    total = residual + result.float() * (case.ranks if case.op == "avg" else 1)
    expected = verify.outputs(replace(case, op="sum")).float()
    limit = _rounding(replace(case, op="sum"))
    return int((~((total - expected).abs() <= limit)).sum())
