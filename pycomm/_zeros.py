"""Zeroed memory for what is kept from step to step: in huge pages, where the system has some."""

from __future__ import annotations

import torch

from pycomm import _C


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As torch.zeros, of one dimension."""
    return _zeroed(torch.empty(count, dtype=dtype, device=device))


def zeros_like(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torch.zeros_like."""
    return _zeroed(torch.empty_like(like, dtype=dtype))


def _zeroed(made: torch.Tensor) -> torch.Tensor:
    if made.is_cpu:
        _C.advise_huge_pages(made.data_ptr(), made.nbytes)
    return made.zero_()
