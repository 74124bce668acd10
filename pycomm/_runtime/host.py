"""Tensors in host memory whatever the caller's defaults are, and zeroed tensors in huge pages.

torch's constructors follow ``torch.set_default_dtype()``, ``torch.set_default_device()``, a device
context, and ``torch.inference_mode()``, whose tensors cannot be written to afterwards.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from pycomm import _C

P = ParamSpec("P")
T = TypeVar("T")

pinned = weakref.WeakKeyDictionary[Any, int]()  # bytes by owner, beside those of torch's allocator


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes an uninitialised tensor."""
    return ordinary(torch.empty, shape, dtype=dtype, device="cpu")


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor of zeros."""
    return ordinary(torch.zeros, shape, dtype=dtype, device="cpu")


def tensor(
    values: bool | float | Sequence[Any], *, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Makes a tensor from Python's numbers."""
    return ordinary(torch.tensor, values, dtype=dtype, device="cpu")


def ordinary(make: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls `make` outside of ``torch.inference_mode()``, so that its tensors may be written to."""
    if not torch.is_inference_mode_enabled():
        return make(*arguments, **options)
    with torch.inference_mode(False), torch.no_grad():
        return make(*arguments, **options)


def makes_lasting(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that makes tensors to which later calls write."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return ordinary(function, *args, **kwargs)

    return call


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like torch.zeros, with one dimension."""
    return _zeroed(torch.empty(count, dtype=dtype, device=device))


def huge_page_zeros_like(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
    except OSError as error:  # some containers hide the file
        never = isinstance(error, FileNotFoundError)
    if never:
        logging.getLogger("pycomm.memory").warning(
            "the system gives no huge pages (%s): optimizers read memory slower", _HUGE_PAGES
        )
