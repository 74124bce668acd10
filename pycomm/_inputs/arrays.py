"""Converts arrays of other libraries to tensors that share their memory."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


def as_tensor(argument: str, value: Any, *, written: bool) -> torch.Tensor:
    """The tensor itself, or a tensor that shares the memory of a DLPack array (NumPy, CuPy)."""
    if isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        number = isinstance(value, numbers.Number)
        raise TypeError(
            f"{argument} must be a torch.Tensor or an array with __dlpack__, "
            f"got {type(value).__name__}" + (f": pass torch.tensor({value})" if number else "")
        )
    if any(stride < 0 for stride in getattr(value, "strides", None) or ()):
        raise ValueError(f"{argument} must not have negative strides, which torch lacks")
    if written and not getattr(getattr(value, "flags", None), "writeable", True):
        raise ValueError(f"{argument} must be writable, got a read-only array")
    try:
        return from_dlpack(value)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"{argument} must be an array that torch can take: {error}") from error
