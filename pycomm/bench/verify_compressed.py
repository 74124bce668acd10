"""What a compressed all-reduce must hold to, on the inputs of `verify`.

Every rank has the same bits. Int8 is off by no more than its published bound; a cast is exact, as
these small integers are in the narrow floats, too. With a residual nothing is lost: the result,
counted once per rank if it is a mean, and all ranks' residuals add up to what went in. That is all
that can be asked of top-k.
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
    """Runs the case on known inputs; how many elements break a promise on this rank."""
    wrong = _count(case, rank, contestant, prepared)
    if prepared.residual is None:
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
    """How many elements have other bits than on rank 0."""
    first = result.clone()
    dist.broadcast(first.view(torch.uint8), 0)
    bits = torch.int32 if result.element_size() == 4 else torch.int16
    return int((first.view(bits) != result.view(bits)).sum())


def _bound(compression: pycomm.Compression, algorithm: str, case: Case) -> float:
    """What compression may change of an element of the result, roundings of sums aside."""
    if not isinstance(compression, pycomm.Int8) or case.ranks == 1:
        return 0.0
    roundings = {"ring": (case.ranks + 1) / 2, "tree": math.ceil(math.log2(case.ranks)) + 1}
    mean = roundings.get(algorithm, 2) * verify.LARGEST_SUMMAND / 254
    return mean * (case.ranks if case.op == "sum" else 1)


def _rounding(case: Case) -> float:
    """What rounding sums to the tensor's dtype may change."""
    largest = verify.LARGEST_SUMMAND * (case.ranks if case.op == "sum" else 1)
    return SOME_ULPS * torch.finfo(case.dtype).eps * largest


def _lost(case: Case, result: torch.Tensor, residual: torch.Tensor) -> int:
    """How many elements do not add up, over all ranks, to what went in."""
    dist.all_reduce(residual)
    total = residual + result.float() * (case.ranks if case.op == "avg" else 1)
    expected = verify.outputs(replace(case, op="sum")).float()
    limit = _rounding(replace(case, op="sum"))
    return int((~((total - expected).abs() <= limit)).sum())
