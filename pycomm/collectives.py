"""The collectives. Argument order and names follow torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from pycomm._init import resolve_group
from pycomm._inputs import (
    ALGORITHMS,
    FIXED_ORDER,
    OPS,
    as_tensor,
    check_blocks,
    check_choice,
    check_disjoint,
    check_like,
    check_rank,
    check_tensor,
    check_written,
    is_list,
    operation_of,
    reduction,
)
from pycomm._runtime import ranges
from pycomm._runtime.log import DEBUG, all_reduce_called, label_of
from pycomm._short_way import short_way_first
from pycomm._work import Work, launch
from pycomm.group import Group


@short_way_first
def all_reduce(
    tensor: Any,
    op: str = "sum",
    *,
    out: Any | None = None,
    algorithm: str = "auto",
    deterministic: bool = False,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
    preserve: bool = False,
) -> Any:
    """Reduces a tensor over all ranks of a group; every rank gets the same bits.

    Args:
        tensor: a tensor of any shape and strides, on the CPU or on CUDA (then enqueued on the
            current stream), or an array of NumPy, CuPy or another library with DLPack.
            Overwritten unless `out` is given.
        op: ``"sum"``, ``"avg"`` (integers truncate), ``"min"``, ``"max"`` (both propagate NaN),
            ``"prod"``, ``"band"``, ``"bor"`` or ``"bxor"``, or the equivalent ``ReduceOp`` of
            torch.distributed. Floats have no bitwise reductions. 16-bit floats accumulate in fp32;
            integers wrap around. For bool, sum and max are OR, prod and min are AND, and there is
            no avg. Complex tensors have sum and avg; uint16, uint32 and uint64 have sum, prod and
            the bitwise ones; 8-bit floats have none, but other collectives move them.
        out: receives the result; has `tensor`'s shape and dtype, and does not overlap it.
        algorithm: ``"auto"``, ``"one_shot"``, ``"two_shot"``, ``"ring"``, ``"tree"`` or, on GPUs
            whose switch adds, ``"multicast"`` (docs/explanation/algorithms.md). One-shot and
            two-shot add in rank order and round once. Between nodes there is no one-shot, over NCCL
            no ring and no tree, and ``"auto"`` is two-shot, or the table's that :func:`init` got.
        deterministic: refuse algorithms that add in another order.
        group: by default the first group made, or one on torch.distributed's default group.
        async_op: return a :class:`Work` at once; operations still run in the order of the calls.
        tag: a number or a name that ranks compare, so that calls of equal size in another order
            raise :class:`pycomm.Mismatch`. With the environment variable ``PYCOMM_LOG=debug`` ranks
            also compare the file and line of the call.
        preserve: succeed on all survivors or on none, so that :func:`pycomm.recover` can complete
            the operation after a failure; on the CPU. Keeps a copy of `tensor` meanwhile unless
            `out` is given, and takes as much longer as a barrier. All ranks must pass the same,
            and, with `async_op`, wait for their works in the same order.

    Returns:
        `out` if given, otherwise `tensor`; a :class:`Work` with `async_op`.

    Raises:
        ValueError, TypeError: an argument is not as described.
        pycomm.CollectiveError: the operation failed; for its subclasses see :mod:`pycomm.errors`.
        pycomm.GroupUnusable: the group is closed, has failed, or was inherited by a fork.
    """
    group = resolve_group(group)
    op = reduction(op, OPS)
    check_choice("algorithm", algorithm, ALGORITHMS)
    if deterministic and algorithm not in FIXED_ORDER:
        allowed = f"{', '.join(FIXED_ORDER[:-1])} or {FIXED_ORDER[-1]}"
        raise ValueError(f"algorithm must be {allowed} when deterministic, got {algorithm!r}")
    if deterministic:
        algorithm = group._core.in_rank_order(algorithm)
    source = as_tensor("tensor", tensor, written=out is None)
    (check_tensor if out is not None else check_written)("tensor", source)
    result = source
    if out is not None:
        result = as_tensor("out", out, written=True)
        check_written("out", result)
        check_like("out", result, "tensor", source)
        check_disjoint("out", result, "tensor", source)
    if DEBUG:
        all_reduce_called(group, result, algorithm)
    given = tensor if out is None else out
    options: dict[str, Any] = {"op": op, "algorithm": algorithm, "label": label_of(tag)}
    if preserve:
        from pycomm.recovery import Preserved

        contribution = source.detach().clone() if out is None else source.detach()
        kept = Preserved(group, "all_reduce", result, contribution, given, **options)
        return kept.start(source, async_op)
    work = launch(group, "all_reduce", source, result, source.shape, async_op=async_op, **options)
    return work if async_op else given


@short_way_first
def reduce(
    tensor: Any,
    dst: int = 0,
    op: str = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Reduces a tensor over all ranks of a group; only rank `dst` gets the result.

    Args:
        tensor: overwritten on rank `dst`, unchanged elsewhere.
        dst: a rank of the group.
        op: as in :func:`all_reduce`; adds in rank order and rounds once.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `tensor`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
    op = reduction(op, OPS)
    check_rank("dst", dst, group.size)
    mine = group.rank == dst
    data = as_tensor("tensor", tensor, written=mine)
    (check_written if mine else check_tensor)("tensor", data)
    work = launch(
        group, "reduce", data, data, data.shape, op,
        label=label_of(tag), root=dst, written=mine, async_op=async_op,
    )  # fmt: skip
    return work if async_op else tensor


@short_way_first
def reduce_scatter(
    output: Any,
    input: Any,  # noqa: A002 - torch.distributed's name
    op: str = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Reduces `input`, which holds a block per rank; rank r gets block r in `output`.

    Args:
        output: receives this rank's block; does not overlap `input`.
        input: a tensor with group size times as many elements as `output`, or a list with a tensor
            per rank, which may differ in size; block r goes to rank r. On CUDA, lists go through
            host memory.
        op: as in :func:`all_reduce`; adds in rank order and rounds once.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `output`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
    op = reduction(op, OPS)
    label = label_of(tag)
    if is_list(input):
        from pycomm.block_collectives import reduce_scatter_list

        return reduce_scatter_list(group, output, input, op, label, async_op)
    source, result = _source_and_result(output, input)
    check_blocks("input", source, "output", result, group.size)
    work = launch(
        group, "reduce_scatter", source, result, result.shape, op, label=label, async_op=async_op
    )
    return work if async_op else output


@short_way_first
def all_gather(
    output: Any,
    input: Any,  # noqa: A002 - torch.distributed's name
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Collects all ranks' `input`, in rank order, in `output` on every rank.

    Args:
        output: a tensor with group size times as many elements as `input`, or a list with a tensor
            per rank, which may differ in size; does not overlap `input`. On CUDA, lists go through
            host memory.
        input: this rank's block.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `output`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
    label = label_of(tag)
    if is_list(output):
        from pycomm.block_collectives import all_gather_list

        return all_gather_list(group, output, input, label, async_op)
    source, result = _source_and_result(output, input)
    check_blocks("output", result, "input", source, group.size)
    work = launch(group, "all_gather", source, result, source.shape, label=label, async_op=async_op)
    return work if async_op else output


@short_way_first
def broadcast(
    tensor: Any,
    src: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
    preserve: bool = False,
) -> Any:
    """Copies rank `src`'s tensor into the tensors of all other ranks.

    Args:
        tensor: read on rank `src`, overwritten elsewhere.
        src: a rank of the group.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.
        preserve: as in :func:`all_reduce`, without a copy: the tensor is `src`'s or is lost.

    Returns:
        `tensor`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
    data = as_tensor("tensor", tensor, written=True)
    check_written("tensor", data)
    check_rank("src", src, group.size)
    options: dict[str, Any] = {"root": src, "label": label_of(tag)}
    if preserve:
        from pycomm.recovery import Preserved

        is_source = group.rank == src
        kept = Preserved(group, "broadcast", data, None, tensor, holds=is_source, **options)
        return kept.start(data, async_op)
    work = launch(group, "broadcast", data, data, data.shape, async_op=async_op, **options)
    return work if async_op else tensor


@short_way_first
def barrier(
    *, group: Group | None = None, async_op: bool = False, tag: int | str | None = None
) -> Work | None:
    """Returns when every rank of the group has called it.

    Raises the errors of :func:`all_reduce`.
    """
    group = resolve_group(group)
    operation = operation_of("barrier", "one_shot", torch.uint8)
    arguments = (operation, 0, 0, 0, None, label_of(tag))
    if not (async_op or ranges.watched()):  # entering a range takes a third as long as a barrier
        group._core.run(*arguments)
        return None
    with ranges.record_range(group, "barrier"):
        if async_op:
            return Work(group._core.submit(*arguments))
        group._core.run(*arguments)
    return None


def _source_and_result(output: Any, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts and checks the two arguments, which must not overlap."""
    result = as_tensor("output", output, written=True)
    source = as_tensor("input", given, written=False)
    check_written("output", result)
    check_tensor("input", source)
    check_disjoint("output", result, "input", source)
    return source, result
