"""The CUDA streams on which libraries of arrays enqueue their work.

An operation on arrays of such a library is enqueued on the library's own stream. So it comes after
the kernels that have made the arrays, and before those that read its results, without an event. An
array may be freed at once, because the library's allocator reuses its memory on the same stream.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_LEGACY = 1  # the handle of the default stream; 0 in torch


class _Foreign(threading.local):
    captures = False  # another library captures the thread's current stream


_foreign = _Foreign()


def check_not_captured() -> None:
    """Raises RuntimeError in the graph of another library: torch's allocator does not know of it.

    Memory that torch gives there is used by other work when the graph is replayed.
    """
    if _foreign.captures:
        raise RuntimeError(
            "this operation takes memory from torch, which does not know of another library's "
            "graph: capture it with torch.cuda.graph"
        )


@contextlib.contextmanager
def on_stream_of(arrays: Sequence[Any], tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Makes the stream of arrays torch's current one.

    Args:
        arrays: arrays on a CUDA device, at least one.
        tensors: torch's tensors that are used together with them. If there are any on CUDA, the
            stream waits for torch's current one, which then waits for it.

    Raises:
        ValueError: the arrays belong to different streams.
    """
    handles = {handle for array in arrays if (handle := _handle_of(array)) is not None}
    if len(handles) > 1:
        raise ValueError(f"arrays must belong to one stream, got {len(handles)}")
    device = _device_of(arrays[0])
    current = torch.cuda.current_stream(device)
    handle = handles.pop() if handles else current.cuda_stream
    if handle == current.cuda_stream:
        yield
        return
    stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
    shared = any(tensor.is_cuda for tensor in tensors)
    if shared:
        stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            _foreign.captures = torch.cuda.is_current_stream_capturing()
            yield
    finally:
        _foreign.captures = False
        if shared:
            current.wait_stream(stream)


def _handle_of(array: Any) -> int | None:
    """The handle of the stream that an array belongs to; None if its library does not tell."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        handle = cupy.cuda.get_current_stream(array.device.id).ptr
    else:
        handle = getattr(array, "__cuda_array_interface__", {}).get("stream")
    return 0 if handle == _LEGACY else handle


def _device_of(array: Any) -> int:
    """The number of an array's device."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    return torch.cuda.current_device()
