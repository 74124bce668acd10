"""Operations on tensors that have a block per rank, as a list or with blocks of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.autograd.graph import increment_version

from pycomm import _C
from pycomm._inputs import host
from pycomm._inputs.arrays import as_tensor
from pycomm._inputs.dtypes import operation_of
from pycomm._inputs.tensors import check_same_kind, check_tensor, check_written
from pycomm._runtime import ranges
from pycomm._work import Work

if TYPE_CHECKING:
    from pycomm.group import Group


@dataclass(frozen=True)
class Side:
    """What an operation reads or writes.

    Attributes:
        tensors: one tensor, or a tensor per rank.
        listed: True if there is a tensor per rank.
        counts: the number of elements in each rank's block; empty if all are equal.
    """

    tensors: list[torch.Tensor]
    listed: bool = False
    counts: tuple[int, ...] = ()

    def place(self, dense: list[torch.Tensor]) -> tuple[int, _C.Blocks | None]:
        """The address of the tensor, and its blocks if there is more to say about them."""
        addresses = [tensor.data_ptr() for tensor in dense]
        if self.listed:
            return 0, _C.Blocks(addresses, self.counts)
        return addresses[0], _C.Blocks([], self.counts) if self.counts else None


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """True for a list of tensors, as opposed to a tensor or an array."""
    return isinstance(value, (list, tuple))


def listed(name: str, values: Sequence[Any], size: int, *, written: bool) -> Side:
    """Converts and checks a list with a tensor per rank."""
    if len(values) != size:
        raise ValueError(f"{name} must have {size} tensors (the group's size), got {len(values)}")
    tensors: list[torch.Tensor] = []
    for index, value in enumerate(values):
        which = f"{name}[{index}]"
        tensor = as_tensor(which, value, written=written)
        (check_written if written else check_tensor)(which, tensor)
        if tensors:
            check_same_kind(which, tensor, f"{name}[0]", tensors[0])
        tensors.append(tensor)
    return Side(tensors, True, tuple(tensor.numel() for tensor in tensors))


def split(name: str, value: Any, sizes: Sequence[int] | None, size: int, *, written: bool) -> Side:
    """Converts and checks one side of an all-to-all whose blocks may have different sizes.

    Args:
        name: the argument's name.
        value: a list with a tensor per rank, or a tensor.
        sizes: how many of the tensor's first dimension belong to each rank; None: equally many.
        size: the group's size.
        written: the operation writes it.
    """
    if is_list(value):
        if sizes is not None:
            raise ValueError(f"{name} must be a tensor if its split sizes are given, got a list")
        return listed(name, value, size, written=written)
    tensor = as_tensor(name, value, written=written)
    (check_written if written else check_tensor)(name, tensor)
    rows = tensor.shape[0] if tensor.dim() > 0 else 1
    if sizes is None:
        if rows % size != 0:
            raise ValueError(
                f"{name} must have a first dimension that is a multiple of the group's size "
                f"{size}, got {rows}: give split sizes"
            )
        sizes = [rows // size] * size
    if len(sizes) != size or any(n < 0 for n in sizes) or sum(sizes) != rows:
        raise ValueError(
            f"split sizes of {name} must be {size} numbers from 0 that add up to its first "
            f"dimension {rows}, got {list(sizes)}"
        )
    row = tensor.numel() // rows if rows > 0 else 0
    return Side([tensor], False, tuple(n * row for n in sizes))


@ranges.of_calls
def launch_blocks(
    group: Group,
    collective: str,
    source: Side,
    result: Side,
    shape: torch.Size | None = None,
    op: str = "sum",
    *,
    label: str,
    root: int = 0,
    count: int = 0,
    async_op: bool,
) -> Any:
    """Runs or submits an operation on contiguous stand-ins for all tensors.

    `count` is the number of elements in a block, unless the sides have counts. Ranks compare
    `label` and the shape of a block, unless blocks differ in size.
    """
    first = source.tensors[0]
    if first.device.type != "cpu":
        raise ValueError(
            "lists of tensors and blocks of different sizes must lie on the CPU, got "
            f"{first.device}: pass a tensor that has a block of equal size per rank"
        )
    check_same_kind("output", result.tensors[0], "input", first)
    increment_version(result.tensors)
    given = [tensor.detach().contiguous() for tensor in source.tensors]
    made = [
        tensor.detach() if tensor.is_contiguous() else host.empty(*tensor.shape, dtype=tensor.dtype)
        for tensor in result.tensors
    ]
    operation = operation_of(collective, "two_shot", first.dtype, op, root)
    (source_at, inputs), (result_at, outputs) = source.place(given), result.place(made)
    call = _C.call_in_blocks(operation, count, source_at, result_at, inputs, outputs, shape, label)

    def finish() -> None:
        for tensor, dense in zip(result.tensors, made, strict=True):
            if not tensor.is_contiguous():
                tensor.detach().copy_(dense)

    if async_op:
        return Work(group._core.submit_call(call), (call, given, made, result), finish)
    group._core.run_call(call)
    finish()
    return None
