"""Tensors in host memory, which no default of the caller's changes.

torch's constructors follow ``torch.set_default_dtype()``, the device that is a context or the
default, and ``torch.inference_mode()``, whose tensors cannot be written to afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor with any values."""
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
    """Decorates a function that makes tensors which later calls write to."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return ordinary(function, *args, **kwargs)

    return call
