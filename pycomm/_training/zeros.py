"""Zeroed memory for tensors that last from step to step; in huge pages if the system has them."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch

from pycomm import _C

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like torch.zeros, with one dimension."""
    return _zeroed(torch.empty(count, dtype=dtype, device=device))


def zeros_like(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Like torch.zeros_like."""
    return _zeroed(torch.empty_like(like, dtype=dtype))


def _zeroed(made: torch.Tensor) -> torch.Tensor:
    if made.is_cpu:
        _C.advise_huge_pages(made.data_ptr(), made.nbytes)
        _look_for_huge_pages()
    return made.zero_()


@functools.cache
def _look_for_huge_pages() -> None:
    try:
        never = "[never]" in _HUGE_PAGES.read_text()
    except OSError as error:  # some containers hide it, which says nothing
        never = isinstance(error, FileNotFoundError)
    if never:
        logging.getLogger("pycomm.memory").warning(
            "the system gives no huge pages (%s): optimizers read memory slower", _HUGE_PAGES
        )
