"""Checks and conversions of arguments."""

from __future__ import annotations

import functools
import multiprocessing
import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.data import get_worker_info

from pycomm import _C
from pycomm._runtime.torch_private import internal_overlap, local_tensor

_Array = TypeVar("_Array")
_Function = TypeVar("_Function", bound=Callable[..., Any])

# The supported dtypes, reductions and algorithms, as C++ knows them.

# The dtypes of tensors. Which reductions a dtype has is up to csrc/core/elements.h.
ELEMENTS = tuple(getattr(torch, name) for name in _C.elements if hasattr(torch, name))
# From names to numbers of the enums in csrc/. The dtypes with arithmetic of their own:
DTYPES = {getattr(torch, name): number for name, number in _C.dtypes.items()}
OPS = _C.reduce_ops
ALGORITHMS = _C.algorithms
CODED_ALGORITHMS = {name: ALGORITHMS[name] for name in ("auto", *_C.coded_algorithms)}
# The algorithms that add in rank order and round once.
FIXED_ORDER = [name for name in ALGORITHMS if name not in _C.partial_sum_algorithms]
CODECS = _C.codecs


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that no collective accepts."""
    if dtype not in ELEMENTS:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in ELEMENTS)
        raise ValueError(f"{argument} must have one of the dtypes {allowed}, got {dtype}")


def check_choice(argument: str, value: str, choices: dict[str, int]) -> int:
    """The number of a choice; ValueError for anything else."""
    if value not in choices:
        raise ValueError(f"{argument} must be one of {', '.join(choices)}, got {value!r}")
    return choices[value]


def check_coded_algorithm(algorithm: str, topk: bool) -> None:
    """Raises ValueError unless compressed all-reduces, or those of top-k, have the algorithm."""
    check_choice("algorithm", algorithm, CODED_ALGORITHMS)
    if topk and algorithm not in ("auto", "two_shot"):
        raise ValueError(f"algorithm must be auto or two_shot for top-k, got {algorithm!r}")


@functools.cache
def operation_of(
    collective: str, algorithm: str, dtype: torch.dtype, op: str = "sum", root: int = 0
) -> _C.Operation:
    """An operation of any size; ValueError if the dtype or its reduction is not supported."""
    check_dtype("dtype", dtype)
    name = str(dtype).removeprefix("torch.")
    return _C.Operation(collective=collective, algorithm=algorithm, dtype=name, op=op, root=root)


# Arguments in torch.distributed's conventions: groups, timeouts, reductions.

TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def seconds(timeout: object, default: float) -> float:
    """Converts a timeout to seconds: a number, a timedelta, or None for the default."""
    if timeout is None:
        return default
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"timeout must be seconds, a datetime.timedelta or None for {default:g} s, "
            f"got {timeout!r}"
        )
    found = float(value)
    if not found > 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    if found > _C.most_seconds:
        raise ValueError(f"timeout must be at most {_C.most_seconds} s, got {timeout}")
    return found


def check_whole(name: str, value: object) -> None:
    """Raises TypeError unless `value` is an int."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")


def check_process_group(group: object) -> None:
    """Raises an error unless `group` is None, a ProcessGroup or a one-dimensional DeviceMesh."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain this process")
    dimensions = getattr(group, "ndim", 1) if hasattr(group, "get_group") else 1
    if dimensions != 1:
        raise ValueError(
            f"group must be a DeviceMesh of one dimension, got {group!r}: pass mesh[name], or "
            "mesh.get_group(name)"
        )
    if not (group is None or hasattr(group, "get_group") or isinstance(group, dist.ProcessGroup)):
        number = isinstance(group, numbers.Real)
        raise TypeError(
            "group must be a torch.distributed process group, a DeviceMesh of one dimension or "
            f"None, got {group!r}" + (f": pass timeout={group}" if number else "")
        )


def process_group_of(group: Any) -> Any:
    """The process group of an argument `group`; torch.distributed must be set up."""
    if hasattr(group, "get_group"):
        return group.get_group()
    return group if group is not None else dist.group.WORLD


def reduction(op: object, allowed: Iterable[str]) -> str:
    """Pycomm's name of a reduction that is given by name or as torch.distributed's ReduceOp."""
    for name in allowed:
        if op == (name if isinstance(op, str) else TORCH_OPS[name]):
            return name
    torchs = "" if isinstance(op, str) else " or the same ReduceOp of torch.distributed,"
    raise ValueError(f"op must be one of {', '.join(allowed)},{torchs} got {op!r}")


def check_rank(argument: str, rank: object, size: int) -> None:
    """Raises ValueError unless `rank` is the number of a rank in a group of this size."""
    if not isinstance(rank, numbers.Integral) or not 0 <= int(rank) < size:
        raise ValueError(f"{argument} must be a rank from 0 to {size - 1}, got {rank!r}")


def check_is_rank() -> None:
    """Raises RuntimeError in a DataLoader's worker, which inherits torchrun's environment."""
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if importing or get_worker_info() is not None:
        raise RuntimeError(
            "this process is a child of a rank, such as a worker of a DataLoader, and not a rank "
            "itself: it must not make or use groups. A script that starts such processes must make "
            "its groups under `if __name__ == '__main__':`"
        )


# Checks of tensors that take part in an operation.

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
    try:
        has_memory = tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # "... Tensor that doesn't have storage"
        has_memory = False
    if not has_memory:
        raise TypeError(
            f"{argument} must have memory, got a tensor without memory: either a torch.func "
            "transform is active, or the tensor's storage has been freed"
        )
    if tensor.is_neg():
        raise ValueError(f"{argument} must be materialised, got a negated view: call resolve_neg()")
    if tensor.is_conj():
        raise ValueError(f"{argument} must be materialised, got a conjugate: call resolve_conj()")


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


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """True for a list of tensors, as opposed to a tensor or an array."""
    return isinstance(value, (list, tuple))


# Arrays of other libraries: pycomm/_runtime/arrays.py converts them.


def as_tensor(argument: str, value: Any, *, written: bool) -> torch.Tensor:
    """The tensor itself, or a tensor that shares the memory of an array.

    Args:
        argument: the argument's name.
        value: a tensor, or an array.
        written: the operation writes it, so an array must not be read-only.
    """
    if isinstance(value, torch.Tensor):
        return value
    from pycomm._runtime.arrays import to_tensor

    return to_tensor(argument, value, written=written)


def like_input(given: _Array, made: torch.Tensor) -> _Array:
    """A new tensor as an array of the library that `given` is from, sharing the memory."""
    if isinstance(given, torch.Tensor):
        return cast("_Array", made)
    from pycomm._runtime.arrays import to_library_of

    return cast("_Array", to_library_of(given, made))


def on_stream_of_arrays(function: _Function) -> _Function:
    """Makes a function enqueue its work where the libraries of its CUDA arrays enqueue theirs."""

    @functools.wraps(function)
    def on_their_stream(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if _plain_types.issuperset(map(type, given)):
            return function(*args, **kwargs)
        given += [each for value in given if is_list(value) for each in value]
        others = [value for value in given if not isinstance(value, torch.Tensor)]
        if not any(map(_is_array, others)):
            _plain_types.update(filter(_is_plain, map(type, given)))
            return function(*args, **kwargs)
        from pycomm._runtime.arrays import run_on_their_stream

        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        return run_on_their_stream(others, tensors, lambda: function(*args, **kwargs))

    return cast("_Function", on_their_stream)


_plain_types: set[type] = set()  # that have been met, and whose values are no arrays


def _is_plain(kind: type) -> bool:
    """True for types of Python, torch and this package whose values neither are nor hold arrays."""
    ours = kind.__module__.partition(".")[0] in ("builtins", "torch", "pycomm")
    return ours and not issubclass(kind, (list, tuple))


def _is_array(value: Any) -> bool:
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


# Arguments of codecs: what can be encoded, and where it is written.

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


def elements(argument: str, value: Any) -> torch.Tensor:
    """A contiguous tensor of what is to be encoded."""
    tensor = as_tensor(argument, value, written=False)
    check_memory(argument, tensor)
    check_compressible(argument, tensor)
    return tensor.detach().contiguous()
