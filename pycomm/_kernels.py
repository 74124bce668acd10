"""Kernels of torch.ops.pycomm: collectives of CUDA tensors, and the compressed operations.

The collectives of CPU tensors are in csrc/bind/ops.cpp. The kernels here check the same and raise
the same errors. They run below autograd, on the current stream.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pycomm import block_collectives, collectives, compressed
from pycomm._inputs import check_rank
from pycomm._runtime.lifetime import open_groups
from pycomm.compression import parse_compression

if TYPE_CHECKING:
    from pycomm.compression import Compression

_find = open_groups.find


def _check_contiguous(*tensors: torch.Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("tensor must be contiguous")


def _check_group_size(group_size: int, group: str) -> None:
    size = _find(group).size
    if group_size != size:
        raise ValueError(f"group_size must be the group's size, {size}, got {group_size}")


def _rows(given: torch.Tensor) -> int:
    if given.dim() == 0:
        raise ValueError("input must have at least one dimension")
    return given.shape[0]


def _rows_per_rank(given: torch.Tensor, size: int) -> int:
    rows = _rows(given)
    if rows % size:
        raise ValueError(
            f"input's first dimension must be a multiple of {size}, the group's size, got {rows}"
        )
    return rows // size


# Collectives of CUDA tensors.


def all_reduce_(tensor: torch.Tensor, op: str, algorithm: str, group: str) -> None:
    _check_contiguous(tensor)
    collectives.all_reduce(tensor, op, algorithm=algorithm, group=_find(group))


def all_reduce(tensor: torch.Tensor, op: str, algorithm: str, group: str) -> torch.Tensor:
    given = tensor.contiguous()
    result = torch.empty_like(given)
    collectives.all_reduce(given, op, out=result, algorithm=algorithm, group=_find(group))
    return result


def reduce(tensor: torch.Tensor, dst: int, group: str) -> torch.Tensor:
    found = _find(group)
    check_rank("dst", dst, found.size)
    result = tensor.clone(memory_format=torch.contiguous_format)
    collectives.reduce(result, dst, group=found)
    return result if found.rank == dst else result.zero_()


def reduce_scatter_(output: torch.Tensor, given: torch.Tensor, op: str, group: str) -> None:
    _check_contiguous(output, given)
    collectives.reduce_scatter(output, given, op, group=_find(group))


def reduce_scatter(given: torch.Tensor, op: str, group_size: int, group: str) -> torch.Tensor:
    _check_group_size(group_size, group)
    output = given.new_empty(_rows_per_rank(given, group_size), *given.shape[1:])
    reduce_scatter_(output, given.contiguous(), op, group)
    return output


def all_gather_(output: torch.Tensor, given: torch.Tensor, group: str) -> None:
    _check_contiguous(output, given)
    collectives.all_gather(output, given, group=_find(group))


def all_gather(given: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
    _check_group_size(group_size, group)
    output = given.new_empty(_rows(given) * group_size, *given.shape[1:])
    all_gather_(output, given.contiguous(), group)
    return output


def all_to_all(given: torch.Tensor, group: str) -> torch.Tensor:
    found = _find(group)
    _rows_per_rank(given, found.size)
    dense = given.contiguous()
    output = torch.empty_like(dense)
    block_collectives.all_to_all(output, dense, group=found)
    return output


def broadcast_(tensor: torch.Tensor, src: int, group: str) -> None:
    _check_contiguous(tensor)
    collectives.broadcast(tensor, src, group=_find(group))


def broadcast(tensor: torch.Tensor, src: int, group: str) -> torch.Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    collectives.broadcast(result, src, group=_find(group))
    return result


# Compressed operations, on both devices.


@functools.lru_cache
def parsed(compression: str) -> Compression:
    """The compression with this name."""
    return parse_compression(compression)


def compressed_all_reduce_(
    tensor: torch.Tensor,
    compression: str,
    residual: torch.Tensor | None,
    velocity: torch.Tensor | None,
    op: str,
    algorithm: str,
    step: int,
    offset: int,
    strict: bool,
    group: str,
) -> None:
    compressed.compressed_all_reduce(
        tensor,
        parsed(compression),
        residual=residual,
        velocity=velocity,
        op=op,
        algorithm=algorithm,
        step=step,
        offset=offset,
        strict=strict,
        group=_find(group),
    )


def compressed_all_reduce(
    tensor: torch.Tensor,
    compression: str,
    op: str,
    algorithm: str,
    step: int,
    offset: int,
    strict: bool,
    group: str,
) -> torch.Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    compressed_all_reduce_(
        result, compression, None, None, op, algorithm, step, offset, strict, group
    )
    return result


def compressed_reduce_scatter_(
    output: torch.Tensor,
    given: torch.Tensor,
    compression: str,
    residual: torch.Tensor | None,
    op: str,
    step: int,
    offset: int,
    strict: bool,
    group: str,
) -> None:
    compressed.compressed_reduce_scatter(
        output,
        given,
        parsed(compression),
        residual=residual,
        op=op,
        step=step,
        offset=offset,
        strict=strict,
        group=_find(group),
    )


def compressed_reduce_scatter(
    given: torch.Tensor,
    compression: str,
    op: str,
    step: int,
    offset: int,
    strict: bool,
    group_size: int,
    group: str,
) -> torch.Tensor:
    _check_group_size(group_size, group)
    output = given.new_empty(_rows_per_rank(given, group_size), *given.shape[1:])
    compressed_reduce_scatter_(
        output, given.contiguous(), compression, None, op, step, offset, strict, group
    )
    return output


def encode(x: torch.Tensor, compression: str, step: int, offset: int) -> torch.Tensor:
    return parsed(compression).encode(x, step=step, offset=offset)


def decode(wire: torch.Tensor, compression: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    return parsed(compression).decode(wire, n, dtype=dtype)
