"""Memory for what optimizers keep."""

from __future__ import annotations

import torch

from pycomm import _C


def zeros_like(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torch.zeros_like, in huge pages where it lies on the CPU and the system has some."""
    made = torch.empty_like(like, dtype=dtype)
    if made.is_cpu:
        _C.advise_huge_pages(made.data_ptr(), made.nbytes)
    return made.zero_()
