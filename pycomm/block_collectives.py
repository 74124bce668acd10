"""The collectives that move a block per rank: gather, scatter and all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from pycomm import _C
from pycomm._init import resolve_group
from pycomm._inputs import (
    as_tensor,
    check_blocks,
    check_disjoint,
    check_rank,
    check_same_kind,
    check_tensor,
    check_written,
    is_list,
    operation_of,
)
from pycomm._runtime import host, ranges
from pycomm._runtime.log import label_of
from pycomm._short_way import short_way_first
from pycomm._work import Work, launch
from pycomm.group import Group

# Operations on tensors that have a block per rank, as a list or with blocks of different sizes.


@dataclass(frozen=True)
class BlockList:
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


def listed(name: str, values: Sequence[Any], size: int, *, written: bool) -> BlockList:
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
    return BlockList(tensors, True, tuple(tensor.numel() for tensor in tensors))


def split(
    name: str, value: Any, sizes: Sequence[int] | None, size: int, *, written: bool
) -> BlockList:
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
            f"split sizes of {name} must be {size} numbers, none negative, that add up to its "
            f"first dimension {rows}, got {list(sizes)}"
        )
    row = tensor.numel() // rows if rows > 0 else 0
    return BlockList([tensor], False, tuple(n * row for n in sizes))


@ranges.of_calls
def launch_blocks(
    group: Group,
    collective: str,
    source: BlockList,
    result: BlockList,
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
    check_same_kind("output", result.tensors[0], "input", first)
    increment_version(result.tensors)
    if group._takes_to_host(first.device, "lists of tensors and blocks of different sizes"):
        given, made, finish = _mirrors(source.tensors, result.tensors)
    else:
        given, made, finish = _dense(source.tensors, result.tensors)
    operation = operation_of(collective, "two_shot", first.dtype, op, root)
    (source_at, inputs), (result_at, outputs) = source.place(given), result.place(made)
    call = _C.call_in_blocks(operation, count, source_at, result_at, inputs, outputs, shape, label)
    if async_op:
        return Work(group._core.submit_call(call), (call, given, made, result), finish)
    group._core.run_call(call)
    finish()
    return None


_StandIns = tuple[list[torch.Tensor], list[torch.Tensor], Callable[[], None]]


def _dense(sources: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> _StandIns:
    """Contiguous stand-ins for sources and results, and a function that copies results back."""
    given = [tensor.detach().contiguous() for tensor in sources]
    made = [
        tensor.detach() if tensor.is_contiguous() else host.empty(*tensor.shape, dtype=tensor.dtype)
        for tensor in results
    ]

    def finish() -> None:
        for tensor, dense in zip(results, made, strict=True):
            if not tensor.is_contiguous():
                tensor.detach().copy_(dense)

    return given, made, finish


def _mirrors(sources: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> _StandIns:
    """Like _dense(), in host memory for tensors on CUDA."""
    from pycomm._runtime.cuda import HostMirror, fetch

    given, made = list(map(HostMirror, sources)), list(map(HostMirror, results))
    fetch(*given)

    def finish() -> None:
        for mirror in made:
            mirror.put_back()

    return [mirror.host for mirror in given], [mirror.host for mirror in made], finish


# Reduce-scatter and all-gather of lists (pycomm/collectives.py).


def reduce_scatter_list(
    group: Group, output: Any, given: Sequence[Any], op: str, label: str, async_op: bool
) -> Any:
    """:func:`pycomm.reduce_scatter` of a list with a tensor per rank."""
    blocks = listed("input", given, group.size, written=False)
    result = as_tensor("output", output, written=True)
    check_written("output", result)
    _check_own_block("output", result, "input", blocks, group.rank)
    work = launch_blocks(
        group, "reduce_scatter", blocks, BlockList([result]), result.shape, op,
        label=label, async_op=async_op,
    )  # fmt: skip
    return work if async_op else output


def all_gather_list(
    group: Group, output: Sequence[Any], given: Any, label: str, async_op: bool
) -> Any:
    """:func:`pycomm.all_gather` to a list with a tensor per rank."""
    blocks = listed("output", output, group.size, written=True)
    source = as_tensor("input", given, written=False)
    check_tensor("input", source)
    _check_own_block("input", source, "output", blocks, group.rank)
    work = launch_blocks(
        group, "all_gather", BlockList([source]), blocks, source.shape,
        label=label, async_op=async_op,
    )  # fmt: skip
    return work if async_op else output


def _check_own_block(
    name: str, own: torch.Tensor, list_name: str, blocks: BlockList, rank: int
) -> None:
    """Checks this rank's tensor against its block, and that no block overlaps it."""
    block = f"{list_name}[{rank}]"
    check_same_kind(name, own, f"{list_name}[0]", blocks.tensors[0])
    if own.numel() != blocks.counts[rank]:
        raise ValueError(
            f"{name} must have as many elements as {block}, {blocks.counts[rank]}, got "
            f"{own.numel()}"
        )
    for index, tensor in enumerate(blocks.tensors):
        check_disjoint(name, own, f"{list_name}[{index}]", tensor)


# The collectives that move a block per rank: gather, scatter and all-to-all.


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
            times as many elements as `tensor`; None on the other ranks. On CUDA, a list is filled
            before the call returns, also with `async_op`.
        dst: a rank of the group.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `gather_list`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
    check_rank("dst", dst, group.size)
    block = as_tensor("tensor", tensor, written=False)
    check_tensor("tensor", block)
    mine = group.rank == dst
    _check_given("gather_list", gather_list, mine)
    whole = None
    if mine and is_list(gather_list):
        side = listed("gather_list", gather_list, group.size, written=True)
        _check_equal("gather_list", side, block)
        if block.is_cuda:  # the other ranks do not know of the list
            whole = block.new_empty(group.size, *block.shape)
            gather(block, whole, dst, group=group, tag=tag)
            for tensor, part in zip(side.tensors, whole, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))
            increment_version(side.tensors)
            if not async_op:
                return gather_list
            from pycomm._runtime.cuda import current_stream

            return Work(None, stream=current_stream(whole))
        work = launch_blocks(
            group, "gather", BlockList([block]), BlockList(side.tensors, True), block.shape,
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
            times as many elements as `tensor`; None on the other ranks.
        src: a rank of the group.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `tensor`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
    check_rank("src", src, group.size)
    block = as_tensor("tensor", tensor, written=True)
    check_written("tensor", block)
    mine = group.rank == src
    _check_given("scatter_list", scatter_list, mine)
    whole = None
    if mine and is_list(scatter_list):
        side = listed("scatter_list", scatter_list, group.size, written=False)
        _check_equal("scatter_list", side, block)
        if block.is_cuda:  # the other ranks do not know of the list
            whole = torch.cat([given.detach().reshape(-1) for given in side.tensors])
            work = scatter(block, whole, src, group=group, async_op=async_op, tag=tag)
            return work if async_op else tensor
        work = launch_blocks(
            group, "scatter", BlockList(side.tensors, True), BlockList([block]), block.shape,
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
        output: a tensor, or a list with a tensor per rank; does not overlap `input`. On CUDA, lists
            and split sizes go through host memory.
        input: a tensor, or a list with a tensor per rank.
        output_split_sizes: how many of `output`'s first dimension come from each rank; by default
            equally many.
        input_split_sizes: how many of `input`'s first dimension go to each rank; by default
            equally many.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `output`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
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


def _check_equal(name: str, side: BlockList, block: torch.Tensor) -> None:
    check_same_kind(f"{name}[0]", side.tensors[0], "tensor", block)
    for index, tensor in enumerate(side.tensors):
        if tensor.numel() != block.numel():
            raise ValueError(
                f"{name}[{index}] must have as many elements as tensor, {block.numel()}, got "
                f"{tensor.numel()}"
            )
