"""The collectives that move a block per rank: gather, scatter and all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm._blocks import Side, is_list, launch_blocks, listed, split
from pycomm._given import given_group
from pycomm._inputs.arguments import check_rank
from pycomm._inputs.arrays import as_tensor
from pycomm._inputs.labels import label_of
from pycomm._inputs.tensors import (
    check_blocks,
    check_disjoint,
    check_same_kind,
    check_tensor,
    check_written,
)
from pycomm._short_way import short_way_first
from pycomm._work import launch
from pycomm.group import Group


@short_way_first
def gather(
    tensor: Any,
    gather_list: Any | None = None,
    dst: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Collects all ranks' `tensor`, in rank order, in `gather_list` on rank `dst`.

    Args:
        tensor: this rank's block; has the same number of elements on every rank.
        gather_list: on rank `dst` a list with a tensor per rank, or one tensor with group size
            times as many elements as `tensor`; None on the other ranks. On CUDA one tensor.
        dst: a rank of the group.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `gather_list`, or a :class:`Work`. Raises the errors of :func:`all_reduce`; a group that
        spans nodes raises ValueError.
    """
    group = given_group(group)
    check_rank("dst", dst, group.size)
    block = as_tensor("tensor", tensor, written=False)
    check_tensor("tensor", block)
    mine = group.rank == dst
    _check_given("gather_list", gather_list, mine)
    whole = None
    if mine and is_list(gather_list):
        side = listed("gather_list", gather_list, group.size, written=True)
        _check_equal("gather_list", side, block)
        work = launch_blocks(
            group, "gather", Side([block]), Side(side.tensors, True), block.shape,
            label=label_of(tag), root=dst, count=block.numel(), async_op=async_op,
        )  # fmt: skip
        return work if async_op else gather_list
    if mine:
        whole = as_tensor("gather_list", gather_list, written=True)
        check_written("gather_list", whole)
        check_blocks("gather_list", whole, "tensor", block, group.size)
        check_disjoint("gather_list", whole, "tensor", block)
    work = launch(
        group, "gather", block, block if whole is None else whole, block.shape,
        label=label_of(tag), root=dst, written=mine, async_op=async_op,
    )  # fmt: skip
    return work if async_op else gather_list


@short_way_first
def scatter(
    tensor: Any,
    scatter_list: Any | None = None,
    src: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Distributes the blocks of rank `src`'s `scatter_list`; rank r gets block r in `tensor`.

    Args:
        tensor: receives this rank's block; has the same number of elements on every rank.
        scatter_list: on rank `src` a list with a tensor per rank, or one tensor with group size
            times as many elements as `tensor`; None on the other ranks. On CUDA one tensor.
        src: a rank of the group.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `tensor`, or a :class:`Work`. Raises the errors of :func:`all_reduce`; a group that spans
        nodes raises ValueError.
    """
    group = given_group(group)
    check_rank("src", src, group.size)
    block = as_tensor("tensor", tensor, written=True)
    check_written("tensor", block)
    mine = group.rank == src
    _check_given("scatter_list", scatter_list, mine)
    whole = None
    if mine and is_list(scatter_list):
        side = listed("scatter_list", scatter_list, group.size, written=False)
        _check_equal("scatter_list", side, block)
        work = launch_blocks(
            group, "scatter", Side(side.tensors, True), Side([block]), block.shape,
            label=label_of(tag), root=src, count=block.numel(), async_op=async_op,
        )  # fmt: skip
        return work if async_op else tensor
    if mine:
        whole = as_tensor("scatter_list", scatter_list, written=False)
        check_tensor("scatter_list", whole)
        check_blocks("scatter_list", whole, "tensor", block, group.size)
        check_disjoint("scatter_list", whole, "tensor", block)
    work = launch(
        group, "scatter", block if whole is None else whole, block, block.shape,
        label=label_of(tag), root=src, async_op=async_op,
    )  # fmt: skip
    return work if async_op else tensor


@short_way_first
def all_to_all(
    output: Any,
    input: Any,  # noqa: A002 - torch.distributed's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Sends block r of `input` to rank r; `output` receives a block from every rank, in rank order.

    Either every rank passes two tensors and no split sizes; then all blocks are equal. Or every
    rank passes lists or split sizes, and blocks may differ in size; the ranks then compare what
    they send and expect. A difference raises :class:`pycomm.Mismatch`.

    Args:
        output: a tensor, or a list with a tensor per rank; does not overlap `input`.
        input: a tensor, or a list with a tensor per rank.
        output_split_sizes: how many of `output`'s first dimension come from each rank; by default
            equally many.
        input_split_sizes: how many of `input`'s first dimension go to each rank; by default
            equally many.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `output`, or a :class:`Work`. Raises the errors of :func:`all_reduce`; a group that spans
        nodes raises ValueError.
    """
    group = given_group(group)
    label = label_of(tag)
    sizes = output_split_sizes is not None or input_split_sizes is not None
    if sizes or is_list(output) or is_list(input):
        result = split("output", output, output_split_sizes, group.size, written=True)
        source = split("input", input, input_split_sizes, group.size, written=False)
        for to in result.tensors:
            for given in source.tensors:
                check_disjoint("output", to, "input", given)
        work = launch_blocks(group, "all_to_all", source, result, label=label, async_op=async_op)
        return work if async_op else output
    whole = as_tensor("output", output, written=True)
    given = as_tensor("input", input, written=False)
    check_written("output", whole)
    check_tensor("input", given)
    check_same_kind("output", whole, "input", given)
    check_disjoint("output", whole, "input", given)
    if whole.numel() != given.numel() or given.numel() % group.size != 0:
        raise ValueError(
            "output and input must have the same number of elements, a multiple of the group's "
            f"size {group.size}, got {whole.numel()} and {given.numel()}"
        )
    shape = torch.Size([given.numel() // group.size])
    work = launch(group, "all_to_all", given, whole, shape, label=label, async_op=async_op)
    return work if async_op else output


def _check_given(name: str, value: Any | None, on_root: bool) -> None:
    if (value is not None) != on_root:
        expected = "must be given on the root" if on_root else "must be None except on the root"
        raise ValueError(f"{name} {expected}, got {type(value).__name__}")


def _check_equal(name: str, side: Side, block: torch.Tensor) -> None:
    check_same_kind(f"{name}[0]", side.tensors[0], "tensor", block)
    for index, tensor in enumerate(side.tensors):
        if tensor.numel() != block.numel():
            raise ValueError(
                f"{name}[{index}] must have as many elements as tensor, {block.numel()}, got "
                f"{tensor.numel()}"
            )
