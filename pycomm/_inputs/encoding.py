"""Arguments of codecs: what can be encoded, and where it is written."""

from __future__ import annotations

from typing import Any

import torch

from pycomm._inputs.arguments import check_whole
from pycomm._inputs.arrays import as_tensor
from pycomm._inputs.tensors import check_memory, check_no_gradient

COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)


def check_compressible(argument: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless codecs support the tensor's dtype."""
    if tensor.dtype not in COMPRESSIBLE:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in COMPRESSIBLE)
        raise ValueError(f"{argument} must have one of the dtypes {allowed}, got {tensor.dtype}")


def check_step(step: int) -> None:
    """Raises an error unless `step` is in the range of the random numbers' counter."""
    check_whole("step", step)
    if not 0 <= step < 2**32:
        raise ValueError(f"step must be from 0 to 2^32 - 1, got {step}")


def check_count(n: int) -> None:
    """Raises an error unless `n` can be a number of elements."""
    check_whole("n", n)
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")


def elements(argument: str, value: Any) -> torch.Tensor:
    """A contiguous tensor of what is to be encoded."""
    tensor = as_tensor(argument, value, written=False)
    check_memory(argument, tensor)
    check_compressible(argument, tensor)
    return tensor.detach().contiguous()


def check_wire(argument: str, wire: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Raises ValueError unless encoded bytes can lie there; returns `wire`."""
    check_memory(argument, wire)
    if wire.dtype != torch.uint8 or not wire.is_contiguous():
        raise ValueError(f"{argument} must be contiguous and uint8, got {wire.dtype}")
    if wire.device != device:
        raise ValueError(f"{argument} must lie on {device}, got {wire.device}")
    if wire.data_ptr() % 4:
        raise ValueError(f"{argument} must be aligned to 4 bytes")
    return wire


def check_target(target: torch.Tensor, n: int, device: torch.device, add: bool) -> None:
    """Raises ValueError unless `n` elements can be decoded into it."""
    check_memory("out", target)
    check_compressible("out", target)
    check_no_gradient("out", target)
    if target.numel() != n or not target.is_contiguous():
        raise ValueError(f"out must be contiguous and have {n} elements, got {target.numel()}")
    if target.device != device:
        raise ValueError(f"out must lie on {device}, got {target.device}")
    if add and target.dtype != torch.float32:
        raise ValueError(f"out must be float32 where add=True, got {target.dtype}")
