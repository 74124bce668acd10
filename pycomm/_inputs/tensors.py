"""Checks of tensors that take part in an operation."""

from __future__ import annotations

import sys

import torch
from torch.autograd import forward_ad

from pycomm._inputs.dtypes import check_dtype
from pycomm._runtime.torch_private import internal_overlap, local_tensor

# Types that need no further check that they have memory of their own.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_memory(argument: str, tensor: torch.Tensor) -> None:
    """Raises an error for tensors that do not directly refer to CPU or CUDA memory.

    A tensor subclass that handles operations itself (DTensor, FakeTensor, MaskedTensor) stores its
    elements elsewhere or has none, and so do tensors inside of torch.func's transforms.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        local = ": pass its to_local()" if hasattr(tensor, "to_local") else ""
        raise TypeError(
            f"{argument} must be an ordinary tensor, got a {type(tensor).__name__}{local}"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{argument} must be dense, got {kind}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{argument} must lie on the CPU or a CUDA device, got {tensor.device}")
    if not _has_memory(tensor):
        raise TypeError(
            f"{argument} must have memory, got a tensor without: one inside of a torch.func "
            "transform, or whose storage has been freed"
        )
    if tensor.is_neg():
        raise ValueError(f"{argument} must be materialised, got a negated view: call resolve_neg()")
    if tensor.is_conj():
        raise ValueError(f"{argument} must be materialised, got a conjugate: call resolve_conj()")


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # "... Tensor that doesn't have storage"
        return False


def check_tensor(argument: str, tensor: torch.Tensor) -> None:
    """Raises an error for tensors that no collective accepts."""
    check_memory(argument, tensor)
    check_dtype(argument, tensor.dtype)
    check_no_gradient(argument, tensor)


def is_dtensor(tensor: object) -> bool:
    """True for a DTensor. Does not import DTensor, because this takes seconds."""
    if type(tensor) in PLAIN:
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a DTensor; another tensor itself."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def needs_gradient(tensor: torch.Tensor) -> bool:
    """True if autograd records what happens to this tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def has_tangent(tensor: torch.Tensor) -> bool:
    """True if the tensor takes part in forward-mode differentiation."""
    dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def check_no_gradient(argument: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for tensors for which autograd would silently ignore the operation."""
    if needs_gradient(tensor):
        raise ValueError(
            f"{argument} must not require grad: only torch.ops.pycomm's all_reduce, reduce, "
            "reduce_scatter, all_gather, all_to_all and broadcast have gradients; use those, pass "
            f"{argument}.detach(), or call under torch.no_grad()"
        )
    if has_tangent(tensor):
        raise ValueError(f"{argument} must not carry a tangent: this operation has no derivative")


def check_written(argument: str, tensor: torch.Tensor) -> None:
    """Raises an error for tensors that cannot receive a result."""
    check_tensor(argument, tensor)
    check_no_overlap(argument, tensor)


def check_no_overlap(argument: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for tensors whose elements share memory."""
    if internal_overlap(tensor) == 1:
        raise ValueError(f"{argument} must not overlap itself in memory, got an expanded tensor")


def check_same_kind(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises ValueError unless two tensors have the same dtype and device."""
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name} must have {other_name}'s dtype {other.dtype}, got {tensor.dtype}")
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must lie on {other_name}'s device {other.device}, got {tensor.device}"
        )


def check_like(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises ValueError unless two tensors have the same dtype, device and shape."""
    check_same_kind(name, tensor, other_name, other)
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have {other_name}'s shape {tuple(other.shape)}, got {tuple(tensor.shape)}"
        )


def check_blocks(
    name: str, tensor: torch.Tensor, block_name: str, block: torch.Tensor, size: int
) -> None:
    """Raises ValueError unless `tensor` has `size` times as many elements as `block`."""
    check_same_kind(name, tensor, block_name, block)
    if tensor.numel() != block.numel() * size:
        raise ValueError(
            f"{name} must have {size} (the group's size) times as many elements as {block_name}, "
            f"{block.numel() * size}, got {tensor.numel()}"
        )


def check_disjoint(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises ValueError if two tensors overlap, unless they are the same dense tensor."""
    if tensor.numel() == 0 or other.numel() == 0:
        return
    if (
        tensor.data_ptr() == other.data_ptr()
        and tensor.numel() == other.numel()
        and tensor.is_contiguous()
        and other.is_contiguous()
    ):
        return  # in place
    (a, a_end), (b, b_end) = _span(tensor), _span(other)
    if a < b_end and b < a_end:
        raise ValueError(f"{name} must not overlap {other_name} in memory")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
