"""The compressed all-reduce and reduce-scatter."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from pycomm import _C
from pycomm._init import resolve_group
from pycomm._inputs import (
    as_tensor,
    check_blocks,
    check_coded_algorithm,
    check_compressible,
    check_disjoint,
    check_like,
    check_step,
    check_tensor,
    check_written,
    operation_of,
    reduction,
)
from pycomm._runtime.log import DEBUG, all_reduce_called, label_of
from pycomm._runtime.ranges import record_range
from pycomm._short_way import short_way_first
from pycomm._work import Work, stand_ins
from pycomm.compression import SMALLEST_BLOCK, Cast, Compression, Identity, Int8, TopK
from pycomm.errors import NonFinite

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm._nccl.compressed import Flow
    from pycomm._runtime.cuda import NonfiniteFlag
    from pycomm.group import Group

_C.set_compressions_of_short_way((Cast, Identity, Int8, TopK))

# Prepared calls of compressed operations, and the handles of those under way.

_NONFINITE = "a gradient has an infinity or a NaN, on this rank or another"


@dataclass(frozen=True)
class PreparedCall:
    """Contiguous stand-ins for a call's tensors, and a function that copies results back.

    Attributes:
        source: the stand-in for the gradient.
        result: the stand-in for the result.
        others: other tensors that must stay alive until the operation is complete.
        finish: copies results back.
        strict: raise NonFinite if a value is not finite.
    """

    source: torch.Tensor
    result: torch.Tensor
    others: tuple[torch.Tensor, ...]
    finish: Callable[[], None]
    strict: bool

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that must stay alive until the operation is complete."""
        return (self.source, self.result, *self.others)

    def on_cpu(self, group: Group, call: _C.Call, async_op: bool) -> Work | None:
        """Runs the call, or hands it to the group's worker."""
        if async_op:
            work = group._core.submit_call(call)
            return _CompressedWork(work, self.tensors(), self.finish, self.strict)
        self._conclude(group._core.run_call(call))
        return None

    def on_stream(self, group: Group, call: _C.Call, async_op: bool) -> Work | None:
        """Enqueues the call; waits for it only if strict."""
        from pycomm._runtime.cuda import NonfiniteFlag

        side = group._cuda_side(self.source.device)
        flag = NonfiniteFlag(side.device, side.check) if async_op or self.strict else None
        side.run_bucket([call], self.tensors(), flag)
        return self._enqueued(flag, async_op)

    def on_span(self, group: Group, flow: Flow, async_op: bool) -> Work | None:
        """Enqueues the flow of the call over NCCL; waits for it only if strict."""
        from pycomm._runtime.cuda import NonfiniteFlag

        span = group._span
        assert span is not None
        device = self.source.device
        flag = NonfiniteFlag(device, group.check) if async_op or self.strict else None

        def run() -> None:
            found = flow(span, flag is not None)
            if flag is not None and found is not None:
                flag.set(found)

        span.enqueue(device, run, self.tensors())
        return self._enqueued(flag, async_op)

    def _enqueued(self, flag: NonfiniteFlag | None, async_op: bool) -> Work | None:
        if async_op:
            self.finish()
            from pycomm._runtime.cuda import current_stream

            return _StreamWork(flag, self.strict, current_stream(self.source))
        self._conclude(flag is not None and flag.read())
        return None

    def _conclude(self, nonfinite: bool) -> None:
        self.finish()
        if self.strict and nonfinite:
            raise NonFinite(_NONFINITE)


class _CompressedWork(Work):
    def __init__(self, *details: Any) -> None:
        *rest, self._strict = details
        super().__init__(*rest)

    def wait(self) -> None:
        """Blocks until the operation is complete, and raises its error if it failed."""
        super().wait()
        if self._strict and self._core is not None and self._core.nonfinite():
            raise NonFinite(_NONFINITE)


class _StreamWork(Work):
    """An operation on a CUDA stream. Later work on the stream need not wait for it."""

    def __init__(self, flag: NonfiniteFlag | None, strict: bool, stream: tuple[int, int]) -> None:
        super().__init__(None, stream=stream)
        self._flag = flag
        self._strict = strict

    def wait(self) -> None:
        """If strict, blocks until the stream has run the operation, and raises its error."""
        super().wait()
        if self._strict and self.nonfinite:
            raise NonFinite(_NONFINITE)

    @property
    def nonfinite(self) -> bool:
        """See :attr:`Work.nonfinite`. Waits until the stream has run the operation."""
        return self._flag is not None and self._flag.read()

    def is_completed(self) -> bool:
        """True if :attr:`nonfinite` would return at once."""
        return self._flag is None or self._flag.event.query()  # type: ignore[no-untyped-call]


# The compressed all-reduce and reduce-scatter.

_OPS = ("avg", "sum")


@short_way_first
def compressed_all_reduce(
    tensor: Any,
    compression: Compression | None = None,
    *,
    residual: Any | None = None,
    velocity: Any | None = None,
    op: str = "avg",
    out: Any | None = None,
    algorithm: str = "auto",
    step: int = 0,
    offset: int = 0,
    strict: bool = False,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Averages a tensor over all ranks, compressed on the way; every rank gets the same bits.

    A `residual` keeps what compression loses, both when this rank encodes its contribution and when
    it encodes results as an owner. The next call adds it to the tensor. Summed over ranks, gradient
    plus residual before the call equals group size times result, plus residual after it.

    Args:
        tensor: float32, float16 or bfloat16; any shape and strides, on the CPU or a CUDA device; or
            an array of NumPy, CuPy or another library with DLPack. Overwritten unless `out` is
            given.
        compression: ``pycomm.Int8()``, ``pycomm.TopK(density=0.01)``, ``pycomm.Cast()`` or
            ``pycomm.Identity()``. All ranks must pass equal ones.
        residual: float32, contiguous, of the tensor's shape; zeros before the first call. Pass one
            on all ranks or on none.
        velocity: like `residual`; required if the compression has momentum, otherwise not allowed.
        op: ``"avg"`` or ``"sum"``, or ``ReduceOp.AVG`` or ``SUM`` of torch.distributed.
        out: receives the result; has `tensor`'s shape and dtype, and does not overlap it.
        algorithm: ``"auto"`` (two-shot at every size), ``"two_shot"``, ``"ring"`` or ``"tree"``
            (the last two not with top-k, and not between nodes over NCCL). Ring and tree encode at
            every hop: docs/explanation/algorithms.md gives the error bounds.
        step: the training step, for stochastic rounding and warm-up. Ranks compare it if it changes
            the result.
        offset: index of this tensor's first element in a larger whole, if the tensor is a part of
            one; a multiple of the compression's block (128 if it has none). With two-shot, the bits
            then do not depend on how the whole is split.
        strict: raise :class:`pycomm.NonFinite` after the operation if a gradient has an infinity or
            a NaN. Otherwise :attr:`Work.nonfinite` reports it, and the same elements of the result
            are not finite (with int8 the whole block). With a residual, values so large that a sum
            might overflow (float16: beyond 64,992) count as infinite.
        group: by default the first group made, or one on torch.distributed's default group.
        async_op: return a :class:`Work` at once.
        tag: as in :func:`pycomm.all_reduce`.

    Returns:
        `out` if given, otherwise `tensor`; a :class:`Work` with `async_op`.

    Raises:
        ValueError, TypeError: an argument is not as described.
        pycomm.NonFinite: see `strict`.
        pycomm.CollectiveError: as in :func:`pycomm.all_reduce`. The result, `residual` and
            `velocity` are then undefined: copy them before the call if you need them.
    """
    group = resolve_group(group)
    op = reduction(op, _OPS)
    compression = _check_options(compression, algorithm, step, offset)
    source = as_tensor("tensor", tensor, written=out is None)
    (check_written if out is None else check_tensor)("tensor", source)
    check_compressible("tensor", source)
    result = source if out is None else as_tensor("out", out, written=True)
    if out is not None:
        check_written("out", result)
        check_like("out", result, "tensor", source)
        check_disjoint("out", result, "tensor", source)
    others = {"tensor": source, "out": result}
    kept = _check_state("residual", residual, "tensor", others)
    others |= {} if kept is None else {"residual": kept}
    speed = _check_state("velocity", velocity, "tensor", others)
    if (compression.momentum > 0) != (speed is not None):
        raise ValueError("velocity must be given if, and only if, the compression has momentum")
    if speed is not None and kept is None:
        raise ValueError("residual must be given if the compression has momentum")
    if DEBUG:
        all_reduce_called(group, source, algorithm, compression)
    increment_version([result, *(t for t in (kept, speed) if t is not None)])
    spans = group._spans(source.device)
    if spans:
        from pycomm._runtime.plan import check_over_nccl

        check_over_nccl(algorithm)
    on_host = group._exchanges_on_host(source.device)
    dense, dense_result, put_result = stand_ins(on_host, source, result)
    state = [t for t in (kept, speed) if t is not None]
    state, put_state = _state_stand_ins(state) if on_host else (state, _nothing)
    label = label_of(tag)

    def finish() -> None:
        put_result()
        put_state()

    call = PreparedCall(dense, dense_result, (result, *state), finish, strict)
    run: Callable[[], Work | None]
    if spans:
        from pycomm._nccl.compressed import CodedCall, all_reduce

        coded = CodedCall(
            dense.view(-1),
            dense_result.view(-1),
            compression,
            op,
            step,
            offset,
            None if kept is None else kept.view(-1),
            None if speed is None else speed.view(-1),
        )
        flow = functools.partial(all_reduce, call=coded)
        run = functools.partial(call.on_span, group, flow, async_op)
    else:
        pointers = [tensor.data_ptr() for tensor in state]
        core = _C.Call(
            operation_of("all_reduce", algorithm, dense.dtype, op),
            count=dense.numel(),
            input=dense.data_ptr(),
            output=dense_result.data_ptr(),
            codec=compression.codec(dense.numel(), dense.dtype, step),
            residual=pointers[0] if kept is not None else 0,
            velocity=pointers[1] if speed is not None else 0,
            momentum=compression.momentum,
            seed=compression.seed,
            step=step,
            offset=offset,
            shape=source.shape,
            label=label,
        )
        start = call.on_stream if dense.device.type == "cuda" else call.on_cpu
        run = functools.partial(start, group, core, async_op)
    with record_range(group, "compressed_all_reduce"):
        work = run()
    return work if async_op else tensor if out is None else out


@short_way_first
def compressed_reduce_scatter(
    output: Any,
    input: Any,  # noqa: A002 - torch.distributed's name
    compression: Compression,
    *,
    residual: Any | None = None,
    op: str = "avg",
    step: int = 0,
    offset: int = 0,
    strict: bool = False,
    group: Group | None = None,
    async_op: bool = False,
    tag: int | str | None = None,
) -> Any:
    """Averages `input`, which holds a block per rank, compressed; rank r gets block r in `output`.

    Contributions are encoded, once each; results are not. A `residual` keeps what this rank's
    encodings lose, and the next call adds it. Summed over ranks, gradient plus residual before the
    call equals group size times results, plus residual after it.

    In a group that spans nodes, the ranks of a node add their gradients in fp32 first, and each
    encodes the sums of its stripe of every node's blocks. Only these elements of its residual are
    used, always the same ones for blocks of one size; it leaves the others unchanged.

    Args:
        output: receives this rank's block; does not overlap `input`.
        input: float32, float16 or bfloat16; group size times as many elements as `output`. On a
            CUDA device it goes through host memory, unless NCCL connects the group's nodes. Or an
            array of NumPy or another library with DLPack.
        compression: ``pycomm.Int8()``, ``pycomm.Cast()`` or ``pycomm.Identity()``, equal on all
            ranks. Not top-k, whose owners do not hold a block each.
        residual: float32, contiguous, of the input's shape; zeros before the first call. Pass one
            on all ranks or on none.
        op: ``"avg"`` or ``"sum"``, or ``ReduceOp.AVG`` or ``SUM`` of torch.distributed.
        step: the training step, for stochastic rounding.
        offset: index of the input's first element in a larger whole, for stochastic rounding; a
            multiple of the compression's block (128 if it has none).
        strict: as in :func:`pycomm.compressed_all_reduce`. All ranks report what one has found.
        group: as in :func:`pycomm.compressed_all_reduce`.
        async_op: as in :func:`pycomm.compressed_all_reduce`.
        tag: as in :func:`pycomm.all_reduce`.

    Returns:
        `output`, or a :class:`Work`. Raises the errors of :func:`pycomm.compressed_all_reduce`.
    """
    group = resolve_group(group)
    op = reduction(op, _OPS)
    compression = _check_options(compression, "two_shot", step, offset)
    if isinstance(compression, TopK):
        raise ValueError(
            f"compression must be Int8, Cast or Identity, got {compression!r}: top-k does not "
            "leave each rank one block of the result"
        )
    result = as_tensor("output", output, written=True)
    source = as_tensor("input", input, written=False)
    check_written("output", result)
    check_tensor("input", source)
    check_compressible("input", source)
    check_blocks("input", source, "output", result, group.size)
    check_disjoint("output", result, "input", source)
    kept = _check_state("residual", residual, "input", {"input": source, "output": result})
    spans = group._spans(source.device)
    on_host = not spans and group._takes_to_host(source.device, "compressed reduce-scatters")
    state = [] if kept is None else [kept]
    increment_version([result, *state])
    dense, dense_result, put_result = stand_ins(on_host, source, result)
    state, put_state = _state_stand_ins(state) if on_host else (state, _nothing)
    label = label_of(tag)

    def finish() -> None:
        put_result()
        put_state()

    call = PreparedCall(dense, dense_result, (result, *state), finish, strict)
    run: Callable[[], Work | None]
    if spans:
        from pycomm._nccl.compressed import CodedCall, reduce_scatter

        coded = CodedCall(
            dense.view(-1), dense_result.view(-1), compression, op, step, offset,
            None if kept is None else kept.view(-1),
        )  # fmt: skip
        flow = functools.partial(reduce_scatter, call=coded)
        run = functools.partial(call.on_span, group, flow, async_op)
    else:
        core = _C.Call(
            operation_of("reduce_scatter", "two_shot", dense.dtype, op),
            count=dense_result.numel(),
            input=dense.data_ptr(),
            output=dense_result.data_ptr(),
            codec=compression.codec(dense.numel(), dense.dtype, step),
            residual=state[0].data_ptr() if state else 0,
            velocity=0,
            momentum=0.0,
            seed=compression.seed,
            step=step,
            offset=offset,
            shape=result.shape,
            label=label,
        )
        run = functools.partial(call.on_cpu, group, core, async_op)
    with record_range(group, "compressed_reduce_scatter"):
        work = run()
    return work if async_op else output


def _nothing() -> None:
    """Copies nothing back."""


def _state_stand_ins(
    state: list[torch.Tensor],
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Like stand_ins() in host memory, for tensors that are both read and written."""
    from pycomm._runtime.cuda import HostMirror, fetch

    staged = [HostMirror(tensor) for tensor in state]
    fetch(*staged)

    def put_back() -> None:
        for stand_in in staged:
            stand_in.put_back()

    return [stand_in.host for stand_in in staged], put_back


def _check_options(
    compression: Compression | None, algorithm: str, step: int, offset: int
) -> Compression:
    if not isinstance(compression, Compression):
        raise TypeError(
            "compression must be pycomm.Int8(), TopK(...), Cast() or Identity(), "
            f"got {compression!r}"
        )
    check_coded_algorithm(algorithm, isinstance(compression, TopK))
    check_step(step)
    block = getattr(compression, "block", SMALLEST_BLOCK)
    if offset < 0 or offset % block:
        raise ValueError(f"offset must be a multiple of the block, {block}, got {offset}")
    if offset >= SMALLEST_BLOCK << 32:
        raise ValueError(f"offset must be below 2^39, got {offset}")
    return compression


def _check_state(
    name: str, state: Any | None, source_name: str, others: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """Checks a residual or a velocity, which is fp32 and written in place.

    It belongs to the tensor `source_name` of `others` and overlaps none of them.
    """
    if state is None:
        return None
    source = others[source_name]
    tensor = as_tensor(name, state, written=True)
    check_written(name, tensor)
    if tensor.dtype != torch.float32:
        raise ValueError(f"{name} must be float32, got {tensor.dtype}")
    if tensor.shape != source.shape or tensor.device != source.device:
        raise ValueError(
            f"{name} must have {source_name}'s shape and device, {tuple(source.shape)} on "
            f"{source.device}, got {tuple(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    for other_name, other in others.items():
        if tensor.data_ptr() == other.data_ptr() and tensor.numel():
            raise ValueError(f"{name} must not overlap {other_name} in memory")
        check_disjoint(name, tensor, other_name, other)
    return tensor.detach()
