"""Checks of results, before anything is timed.

Collectives run on inputs whose results are known beforehand, for every dtype and order of adding.
All values and partial results are small integers, so nothing rounds. The right answer
comes from a closed form, not from reducing: element i has a base, and rank r's share of it depends
only on ``(r + i) mod n``, which takes every value from 0 to n - 1 exactly once over the ranks.

A compressed all-reduce gets the same inputs. Every rank must have the same bits. Int8 must be
within its published bound. A cast must be exact, as these small integers are exact in the narrow
floats, too. With a residual nothing may be lost: the result, counted once per rank if it is a mean,
and all ranks' residuals must add up to the inputs. Top-k promises only the last property and equal
bits.

Codecs are compared with torch's operators, and gradients with the mean of all ranks' gradients.
Parameters are compared, after some steps, with the parameters of another way to exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import pycomm
from pycomm.bench.contestants import (
    GATHERS,
    REDUCTIONS,
    ROOT,
    Case,
    Compressed,
    Contestant,
)
from pycomm.bench.measure import Prepared

# A prime: the check sees data that land in a wrong place at a distance of a power of two.
PERIOD = 251
# Exact in bfloat16, and 8 bits: no result may pass this.
LARGEST = 255
LARGEST_SUMMAND = 4  # of what is summed or averaged: a base of 2, plus 1, plus 1
POISON = 99
# Rounding of sums in the tensor's own dtype, and in the fp32 of residuals, in units of its epsilon.
SOME_ULPS = 4
TOLERANCE = 1e-6  # of the largest gradient of a parameter


def _spread(pattern: torch.Tensor, case: Case) -> torch.Tensor:
    """Repeats a periodic pattern over all elements."""
    return pattern.to(case.dtype).repeat(-(-case.count // pattern.numel()))[: case.count]


def _index(case: Case) -> torch.Tensor:
    return torch.arange(PERIOD * case.ranks, dtype=torch.int64)


def inputs(case: Case, rank: int) -> torch.Tensor:
    """A rank's input for the whole tensor."""
    index = _index(case)
    if case.collective not in REDUCTIONS:
        different = case.collective in ("all_to_all", "send_recv")
        return _spread((index + 3 * rank * different) % PERIOD, case)
    base, turn, half = index % PERIOD % 3, (rank + index) % case.ranks, case.ranks // 2
    if case.op in ("min", "max"):
        values = base + turn
    elif case.op == "prod":
        values = torch.where(turn == 0, base + 1, 1)
    else:  # as many ranks lie one above the mean as lie one below it
        values = base + 1 + (turn < half).long() - (turn >= case.ranks - half).long()
    return _spread(values, case)


def outputs(case: Case) -> torch.Tensor:
    """The expected result for the whole tensor, where all ranks' results belong to one."""
    index = _index(case)
    if case.collective not in REDUCTIONS:
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


def given(case: Case, rank: int) -> torch.Tensor | None:
    """A rank's input; None if it has none."""
    if case.collective in ("broadcast", "scatter") and rank != ROOT:
        return None
    whole = inputs(case, rank)
    return block(case, rank, whole) if case.collective in GATHERS else whole


def expected(case: Case, rank: int) -> torch.Tensor | None:
    """A rank's result; None if it has none."""
    if case.collective in ("reduce", "gather") and rank != ROOT:
        return None
    if case.collective == "send_recv":
        return inputs(case, (rank - 1) % case.ranks)
    if case.collective == "all_to_all":
        return torch.cat([block(case, rank, inputs(case, peer)) for peer in range(case.ranks)])
    whole = outputs(case)
    return block(case, rank, whole) if case.collective in ("reduce_scatter", "scatter") else whole


def count_wrong(case: Case, rank: int, prepared: Prepared) -> int:
    """Runs the case once on known inputs; returns the number of wrong elements on this rank."""
    source, result = given(case, rank), expected(case, rank)
    prepared.source.fill_(POISON)
    prepared.result.fill_(POISON)
    if source is not None:
        prepared.source.copy_(source)
    prepared.call()
    if result is None:
        return 0
    return int((prepared.result != result.to(prepared.result.device)).sum())


def count_wrong_everywhere(
    case: Case, rank: int, contestants: Sequence[Contestant], runs: Sequence[Prepared]
) -> list[int]:
    """Wrong elements of every contestant, over all ranks."""
    wrong = torch.tensor(
        [
            count_wrong_compressed(case, rank, contestant, run)
            if isinstance(contestant, Compressed)
            else count_wrong(case, rank, run)
            for contestant, run in zip(contestants, runs, strict=False)
        ]
    )
    dist.all_reduce(wrong)
    return [int(count) for count in wrong]


def count_wrong_compressed(
    case: Case, rank: int, contestant: Compressed, prepared: Prepared
) -> int:
    """Runs the case on known inputs; returns the number of elements that fail a check here."""
    wrong = _count_once(case, rank, contestant, prepared)
    if prepared.residual is not None:
        prepared.residual.zero_()  # as it was
    else:
        kept = replace(contestant, feedback=True)
        wrong += _count_once(case, rank, kept, kept.prepare(case))
    return wrong


def _count_once(case: Case, rank: int, contestant: Compressed, prepared: Prepared) -> int:
    compression = pycomm.parse_compression(contestant.compression)
    prepared.result.fill_(POISON)
    prepared.source.copy_(inputs(case, rank))
    prepared.call()
    result = prepared.result.cpu()
    wrong = _unlike_first(result)
    if not isinstance(compression, pycomm.TopK):
        off = (result.float() - outputs(case).float()).abs()
        limit = _bound(compression, contestant.algorithm, case) + _rounding(case)
        wrong += int((~(off <= limit)).sum())
    if prepared.residual is not None:
        wrong += _lost(case, result, prepared.residual.cpu())
    return wrong


def _unlike_first(result: torch.Tensor) -> int:
    """The number of elements whose bits differ from rank 0's."""
    first = result.clone()
    dist.broadcast(first.view(torch.uint8), 0)
    bits = torch.int32 if result.element_size() == 4 else torch.int16
    return int((first.view(bits) != result.view(bits)).sum())


def _bound(compression: pycomm.Compression, algorithm: str, case: Case) -> float:
    """The largest error of an element from compression, without the rounding of sums."""
    if not isinstance(compression, pycomm.Int8) or case.ranks == 1:
        return 0.0
    roundings = {"ring": (case.ranks + 1) / 2, "tree": math.ceil(math.log2(case.ranks)) + 1}
    mean = roundings.get(algorithm, 2) * LARGEST_SUMMAND / 254
    return mean * (case.ranks if case.op == "sum" else 1)


def _rounding(case: Case) -> float:
    """The largest error from rounding sums to the tensor's dtype."""
    largest = LARGEST_SUMMAND * (case.ranks if case.op == "sum" else 1)
    return SOME_ULPS * torch.finfo(case.dtype).eps * largest


def _lost(case: Case, result: torch.Tensor, residual: torch.Tensor) -> int:
    """The number of elements whose results and residuals do not add up to the inputs."""
    dist.all_reduce(residual)
    total = residual + result.float() * (case.ranks if case.op == "avg" else 1)
    expected = outputs(replace(case, op="sum")).float()
    limit = _rounding(replace(case, op="sum"))
    return int((~((total - expected).abs() <= limit)).sum())


def count_far_decoded(
    codec: pycomm.Int8, x: torch.Tensor, wire: torch.Tensor, taken: torch.Tensor, add: bool
) -> int:
    """The number of elements with a larger error than half a scale of int8 plus rounding errors."""
    if add:
        taken.copy_(x)
    codec.decode(codec.encode(x, wire), x.numel(), taken, add=add)
    blocks = x.float().view(-1, codec.block)
    limit = blocks.abs().amax(1, keepdim=True)
    limit *= 1 / 254 + torch.finfo(taken.dtype).eps / 2 + 2**-21
    off = (taken.float().view_as(blocks) - (2 if add else 1) * blocks).abs()
    return int((~(off <= limit)).sum())


def count_unselected(codec: pycomm.TopK, x: torch.Tensor, largest: torch.Tensor) -> int:
    """The number of selected elements that are out of order, wrong in value, or too small."""
    indices, values = codec.select(x)
    if len(indices) != len(largest) or len(values) != len(largest):
        return len(largest)
    ours, theirs = values.abs().sort().values, largest.float().sort().values
    disorder = int((indices[1:] <= indices[:-1]).sum())
    return disorder + int((values != x[indices]).sum()) + int((ours != theirs).sum())


def count_unlike(
    codec: pycomm.Compression, x: torch.Tensor, wire: torch.Tensor, expected: torch.Tensor
) -> int:
    """The number of elements that a codec decodes to other values than expected."""
    decoded = codec.decode(codec.encode(x, wire), x.numel(), dtype=x.dtype)
    return int((decoded != expected).sum())


def count_wrong_gradients(trained: nn.Module, alone: nn.Module) -> int:
    """The number of gradients, over all ranks, that are not the mean of all ranks' gradients."""
    wrong = torch.zeros((), dtype=torch.int64)
    for ours, theirs in zip(trained.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        mean = theirs.grad.to("cpu", copy=True)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        wrong += (~((ours.grad.cpu() - mean).abs() <= TOLERANCE * mean.abs().max())).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def count_different(ours: nn.Module, theirs: nn.Module) -> int:
    """The number of parameters, over all ranks, that differ in any bit."""
    return _count_parameters(ours, theirs, lambda a, b: _bits(a) != _bits(b))


def count_far(ours: nn.Module, theirs: nn.Module, limit: float) -> int:
    """The number of parameters, over all ranks, that differ by `limit` or more."""
    return _count_parameters(ours, theirs, lambda a, b: ~((a - b).abs() < limit))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def _count_parameters(
    ours: nn.Module,
    theirs: nn.Module,
    differ: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> int:
    found = torch.zeros((), dtype=torch.int64)
    for one, other in zip(_whole(ours), _whole(theirs), strict=True):
        found += differ(one, other).sum().cpu()
    dist.all_reduce(found)
    return int(found)


def _whole(model: nn.Module) -> Sequence[torch.Tensor]:
    tensors = (parameter.detach() for parameter in model.parameters())
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
