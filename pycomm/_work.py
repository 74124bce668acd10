"""Running operations: launching them on tensors, and the handle of those under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import increment_version

from pycomm import _C
from pycomm._inputs import operation_of
from pycomm._runtime import ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm.group import Group


# Keeps the tensors of running operations alive after the caller has dropped their handles.


class Running(Protocol):
    """An operation that uses the memory of tensors until it has completed."""

    def completed(self) -> bool: ...


_held: dict[int, tuple[Running, tuple[object, ...]]] = {}


def keep_alive(operation: Running, tensors: tuple[object, ...]) -> None:
    """Holds `tensors` until `operation` has completed."""
    # Each step is atomic: other threads and the garbage collector may run in between.
    _held[id(operation)] = (operation, tensors)
    for key, (old, _) in list(_held.items()):
        if old.completed():
            _held.pop(key, None)


# Running operations: launching them on tensors, and the handle of those under way.


class Work:
    """A running operation, returned with ``async_op=True``. It keeps its tensors alive."""

    _core: _C.Work | None = None  # of an object whose making has failed

    def __init__(
        self,
        core: _C.Work | None,
        tensors: tuple[object, ...] = (),
        finish: Callable[[], None] | None = None,
        stream: tuple[int, int] | None = None,
    ) -> None:
        self._core = core
        self._tensors = tensors
        self._finish = finish
        self._stream = stream  # that runs it on CUDA: number of the device, and handle
        self._cause: ranges.Open | None = None
        if core is not None and hasattr(ranges.here, "opened"):
            self._cause = ranges.launched(core)
        # Given a function that waits, also decides that the operation has succeeded on all ranks.
        self._settle: Callable[[Callable[[], None]], None] | None = None

    def wait(self) -> None:
        """Blocks until the operation is complete, and raises its error if it failed.

        On CUDA only the current stream waits, for what the stream of the call has to do so far.
        With ``preserve=True``, all ranks must call this, in the same order as other operations.
        """
        if self._settle is None:
            self._complete()
        else:
            self._settle(self._complete)

    def _complete(self) -> None:
        if self._core is not None:
            if self._cause is None:
                self._core.wait()
            else:
                with self._cause.waiting():
                    self._core.wait()
        if self._stream is not None:
            from pycomm._runtime.cuda import follow

            follow(*self._stream)
        if self._finish is not None:
            self._finish()
            self._finish = None

    @property
    def nonfinite(self) -> bool:
        """True if a gradient of a compressed operation had an infinity or a NaN. Waits.

        The value is the same on every rank. If it is true, residuals are unchanged.
        """
        self._complete()
        return self._core is not None and self._core.nonfinite()

    def is_completed(self) -> bool:
        """True if :meth:`wait` would return at once, or only decides."""
        return self._core is None or self._core.completed()

    def interval(self) -> tuple[float, float]:
        """Start and end, in seconds of ``time.perf_counter``; on CUDA zeros. Waits."""
        self._complete()
        return (0.0, 0.0) if self._core is None else self._core.interval()

    def moved(self) -> int:
        """Bytes read from and written to other ranks' memory; on CUDA 0. Waits.

        In a group that spans nodes, the bytes that this rank has received from other nodes.
        """
        self._complete()
        return 0 if self._core is None else self._core.moved()

    def __del__(self) -> None:
        # The worker still uses the tensors' memory, so it must not be freed yet.
        if self._core is not None and not self._core.completed():
            keep_alive(self._core, self._tensors)


def launch(
    group: Group,
    collective: str,
    source: torch.Tensor,
    result: torch.Tensor,
    shape: torch.Size,
    op: str = "sum",
    *,
    label: str,
    algorithm: str = "two_shot",
    root: int = 0,
    written: bool = True,
    async_op: bool,
) -> Any:
    """Runs or submits an operation.

    Ranks compare `label` and `shape`, that of the tensor or of a rank's block. A
    rank that has no result passes its source again, with `written=False`; one that has no source
    passes its result.
    """
    span = group._span
    if span is not None and source.is_cuda and collective in span.collectives:
        return span.collectives[collective](
            span, source, result, op, algorithm=algorithm, root=root, async_op=async_op
        )
    return _launch(
        group, collective, source, result, shape, op, label=label, algorithm=algorithm, root=root,
        written=written, async_op=async_op,
    )  # fmt: skip


@ranges.of_calls
def _launch(
    group: Group,
    collective: str,
    source: torch.Tensor,
    result: torch.Tensor,
    shape: torch.Size,
    op: str,
    *,
    label: str,
    algorithm: str,
    root: int,
    written: bool,
    async_op: bool,
) -> Any:
    """Runs or submits an operation on contiguous stand-ins for the tensors; see launch()."""
    if written:
        increment_version(result)  # autograd may have saved the old value
    stages = group._stages(source.device)
    dense_source, dense_result, finish = stand_ins(stages, source, result)
    if not written:
        finish = _nothing
    operation = operation_of(collective, algorithm, source.dtype, op, root)
    if dense_source.device.type == "cuda":
        from pycomm._runtime.cuda import current_stream

        if group.size > 1:
            side = group._cuda_side(source.device)
            side.run(operation, shape.numel(), dense_source, dense_result, shape, label)
        else:
            group._core.check_usable()
            if dense_result is not dense_source:
                dense_result.copy_(dense_source.view_as(dense_result))
        finish()
        return Work(None, stream=current_stream(source)) if async_op else result
    source_at, result_at = dense_source.data_ptr(), dense_result.data_ptr()
    arguments = (operation, shape.numel(), source_at, result_at, shape, label)
    if async_op:
        work = group._core.submit(*arguments)
        return Work(work, (dense_source, dense_result, result), finish)
    group._core.run(*arguments)
    finish()
    return result


def _nothing() -> None:
    """Copies no result."""


def stand_ins(
    on_host: bool, source: torch.Tensor, result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
    """Contiguous tensors in host memory or on the tensors' device, and a copy-back function.

    The function copies the result to `result` if it is not there already.
    """
    if not on_host:
        return dense_stand_ins(source, result)
    from pycomm._runtime.cuda import HostMirror, fetch

    given = HostMirror(source)
    fetch(given)
    made = given if result is source else HostMirror(result)
    return given.host, made.host, made.put_back


def dense_stand_ins(
    source: torch.Tensor, result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
    """Contiguous tensors on the tensors' own device; see stand_ins()."""
    if source.is_cuda and not (source.is_contiguous() and result.is_contiguous()):
        from pycomm._runtime.arrays import check_not_captured

        check_not_captured()
    dense_source = source.detach().contiguous()
    dense_result = dense_source if result is source else result.detach()
    if not dense_result.is_contiguous():
        dense_result = torch.empty(result.shape, dtype=result.dtype, device=result.device)

    def finish() -> None:
        if dense_result.data_ptr() != result.data_ptr():
            result.detach().copy_(dense_result)

    return dense_source, dense_result, finish
