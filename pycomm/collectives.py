"""The collectives. Argument order and names follow torch.distributed."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from pycomm import _C
from pycomm._given import given_group
from pycomm._inputs.arguments import reduction
from pycomm._inputs.arrays import as_tensor
from pycomm._inputs.dtypes import (
    ALGORITHMS,
    FIXED_ORDER,
    OPS,
    check_choice,
    operation_of,
)
from pycomm._inputs.labels import label_of
from pycomm._inputs.tensors import (
    check_blocks,
    check_disjoint,
    check_like,
    check_tensor,
    check_written,
)
from pycomm._runtime.log import DEBUG, all_reduce_called
from pycomm._runtime.staging import StandIn, fetch
from pycomm.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable


class Work:
    """A running operation, returned with ``async_op=True``. It keeps its tensors alive."""

    def __init__(
        self,
        core: _C.Work | None,
        tensors: tuple[torch.Tensor, ...] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._core = core
        self._tensors = tensors
        self._finish = finish

    def wait(self) -> None:
        """Blocks until the operation is complete, and raises its error if it failed."""
        if self._core is not None:
            self._core.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None

    @property
    def nonfinite(self) -> bool:
        """True if a gradient of a compressed operation had an infinity or a NaN. Waits.

        The value is the same on every rank. If it is true, residuals are unchanged.
        """
        self.wait()
        return self._core is not None and self._core.nonfinite()

    def is_completed(self) -> bool:
        """True if :meth:`wait` would return at once."""
        return self._core is None or self._core.completed()

    def interval(self) -> tuple[float, float]:
        """Start and end, in seconds of ``time.perf_counter``; on CUDA zeros. Waits."""
        self.wait()
        return (0.0, 0.0) if self._core is None else self._core.interval()

    def moved(self) -> int:
        """Bytes read from and written to other ranks' memory; on CUDA 0. Waits.

        In a group that spans nodes, the bytes that this rank has received from other nodes.
        """
        self.wait()
        return 0 if self._core is None else self._core.moved()

    def __del__(self) -> None:
        # The worker still uses the tensors' memory, so it must not be freed yet.
        if self._core is not None and not self._core.completed():
            _Orphans.adopt(self._core, self._tensors)


class _Orphans:
    """Works without any other reference; each is released once it has completed."""

    held: ClassVar[dict[int, tuple[_C.Work, tuple[torch.Tensor, ...]]]] = {}

    @classmethod
    def adopt(cls, core: _C.Work, tensors: tuple[torch.Tensor, ...]) -> None:
        # Each step is atomic: other threads and the garbage collector may run in between.
        cls.held[id(core)] = (core, tensors)
        for key, (old, _) in list(cls.held.items()):
            if old.completed():
                cls.held.pop(key, None)


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
        algorithm: ``"auto"``, ``"one_shot"``, ``"two_shot"``, ``"ring"`` or ``"tree"``
            (docs/algorithms.md). One-shot and two-shot add in rank order and round once.
        deterministic: refuse algorithms that add in another order.
        group: by default the first group made, or one on torch.distributed's default group.
        async_op: return a :class:`Work` at once; operations still run in the order of the calls.
        tag: a number or a name that ranks compare, so that calls of equal size in another order
            raise :class:`pycomm.Mismatch`. With the environment variable ``PYCOMM_LOG=debug`` ranks
            also compare the file and line of the call.

    Returns:
        `out` if given, otherwise `tensor`; a :class:`Work` with `async_op`.

    Raises:
        ValueError, TypeError: an argument is not as described.
        pycomm.CollectiveError: the operation failed; for its subclasses see :mod:`pycomm.errors`.
        pycomm.GroupUnusable: the group is closed, has failed, or was inherited by a fork.
    """
    if type(group) is not Group:
        group = given_group(group)
    if op not in OPS or algorithm not in ALGORITHMS:
        op = reduction(op, OPS)
        check_choice("algorithm", algorithm, ALGORITHMS)
    if deterministic and algorithm not in FIXED_ORDER:
        allowed = f"{', '.join(FIXED_ORDER[:-1])} or {FIXED_ORDER[-1]}"
        raise ValueError(f"algorithm must be {allowed} when deterministic, got {algorithm!r}")
    if (
        out is None
        and not async_op
        and tag is None
        and not DEBUG
        and _C.all_reduce(group._handle, tensor, OPS[op], ALGORITHMS[algorithm])
    ):
        return tensor
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
    work = _launch(
        group,
        "all_reduce",
        source,
        result,
        source,
        op,
        label=label_of(tag),
        algorithm=algorithm,
        async_op=async_op,
    )
    return work if async_op else tensor if out is None else out


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
        input: has group size times as many elements as `output`; block r goes to rank r.
        op: as in :func:`all_reduce`; adds in rank order and rounds once.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `output`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = given_group(group)
    op = reduction(op, OPS)
    source, result = _source_and_result(output, input)
    check_blocks("input", source, "output", result, group.size)
    label = label_of(tag)
    work = _launch(
        group, "reduce_scatter", source, result, result, op, label=label, async_op=async_op
    )
    return work if async_op else output


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
        output: has group size times as many elements as `input`; does not overlap it.
        input: this rank's block.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `output`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = given_group(group)
    source, result = _source_and_result(output, input)
    check_blocks("output", result, "input", source, group.size)
    label = label_of(tag)
    work = _launch(group, "all_gather", source, result, source, label=label, async_op=async_op)
    return work if async_op else output


def broadcast(
    tensor: Any,
    src: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Copies rank `src`'s tensor into the tensors of all other ranks.

    Args:
        tensor: read on rank `src`, overwritten elsewhere.
        src: a rank of the group.
        group: as in :func:`all_reduce`.
        async_op: as in :func:`all_reduce`.
        tag: as in :func:`all_reduce`.

    Returns:
        `tensor`, or a :class:`Work`. Raises the errors of :func:`all_reduce`.
    """
    group = given_group(group)
    data = as_tensor("tensor", tensor, written=True)
    check_written("tensor", data)
    if not isinstance(src, numbers.Integral) or not 0 <= src < group.size:
        raise ValueError(f"src must be a rank from 0 to {group.size - 1}, got {src!r}")
    label = label_of(tag)
    work = _launch(group, "broadcast", data, data, data, label=label, root=src, async_op=async_op)
    return work if async_op else tensor


def barrier(
    *, group: Group | None = None, async_op: bool = False, tag: int | str | None = None
) -> Work | None:
    """Returns when every rank of the group has called it.

    Raises the errors of :func:`all_reduce`.
    """
    group = given_group(group)
    operation = operation_of("barrier", "one_shot", torch.uint8)
    arguments = (operation, 0, 0, 0, None, label_of(tag))
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


def _launch(
    group: Group,
    collective: str,
    source: torch.Tensor,
    result: torch.Tensor,
    block: torch.Tensor,
    op: str = "sum",
    *,
    label: str,
    algorithm: str = "two_shot",
    root: int = 0,
    async_op: bool,
) -> Any:
    """Runs or submits an operation on contiguous stand-ins for the tensors.

    Ranks compare `label` and the shape of `block`, which is the tensor or a rank's share of it.
    """
    increment_version(result)  # autograd may have saved the old value
    dense_source, dense_result, finish = stand_ins(group, source, result)
    operation = operation_of(collective, algorithm, source.dtype, op, root)
    if dense_source.device.type == "cuda" and group.size == 1:
        if dense_result is not dense_source:
            dense_result.copy_(dense_source.view_as(dense_result))
        finish()
        return Work(None) if async_op else result
    if dense_source.device.type == "cuda":
        side = group._cuda_side(source.device)
        side.run(operation, block.numel(), dense_source, dense_result, block.shape, label)
        finish()
        return Work(None) if async_op else result
    source_at, result_at = dense_source.data_ptr(), dense_result.data_ptr()
    arguments = (operation, block.numel(), source_at, result_at, block.shape, label)
    if async_op:
        work = group._core.submit(*arguments)
        return Work(work, (dense_source, dense_result, result), finish)
    group._core.run(*arguments)
    finish()
    return result


def stand_ins(
    group: Group, source: torch.Tensor, result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
    """Contiguous tensors on the device where the group exchanges, and a copy-back function.

    The function copies the result to `result` if it is not there already.
    """
    if group._stages(source.device):
        given = StandIn(source)
        fetch(given)
        made = given if result is source else StandIn(result)
        return given.host, made.host, made.put_back
    dense_source = source.detach().contiguous()
    dense_result = dense_source if result is source else result.detach()
    if not dense_result.is_contiguous():
        dense_result = torch.empty(result.shape, dtype=result.dtype, device=result.device)

    def finish() -> None:
        if dense_result.data_ptr() != result.data_ptr():
            result.detach().copy_(dense_result)

    return dense_source, dense_result, finish
