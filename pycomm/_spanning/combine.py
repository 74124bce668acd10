"""Reductions over the parts of several nodes as operations of torch.

The bits are those of csrc/core/reduce.h: 16-bit floats accumulate in fp32, integers wrap around,
the mean divides once, and NaNs are canonical.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Unsigned types whose arithmetic torch lacks; their sums, products and bits are the signed ones'.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OF_BOOL = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}


def _least(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.where((total < part) | (total != total), total, part)


def _most(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.where((total > part) | (total != total), total, part)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "min": _least,
    "max": _most,
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


def combine(parts: torch.Tensor, op: str, ranks: int) -> torch.Tensor:
    """Reduces over the first dimension, in its order.

    Args:
        parts: the contributions, contiguous; their dtype has the reduction. Overwritten.
        op: the reduction, by pycomm's name.
        ranks: the number of ranks that have contributed; the mean's divisor.

    Returns:
        A tensor of the same dtype, which may lie in `parts`.
    """
    dtype = parts.dtype
    if dtype.is_complex:
        real = torch.view_as_real(parts)
        return torch.view_as_complex(combine(real, op, ranks))
    if dtype == torch.bool:
        return combine(parts.view(torch.uint8), _OF_BOOL.get(op, op), ranks).view(dtype)
    if dtype in _SIGNED:
        return combine(parts.view(_SIGNED[dtype]), op, ranks).view(dtype)
    wide = _WIDE.get(dtype, dtype)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = _FOLDS[op](total, part.to(wide))
    if op == "avg":
        # A tensor on the device: by a number, CUDA would multiply with the inverse.
        divisor = torch.full((), ranks, dtype=wide, device=parts.device)
        total.div_(divisor, rounding_mode=None if wide.is_floating_point else "trunc")
    return rounded(total, dtype)


def rounded(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum in the dtype of its result, with canonical NaNs; it may be the same tensor."""
    result = total.to(dtype)
    if dtype.is_floating_point:
        result.masked_fill_(result.isnan(), math.nan)  # processors make different ones
    return result
