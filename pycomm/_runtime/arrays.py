"""Arrays of other libraries: tensors that share their memory, and the streams of their kernels.

An operation on CUDA arrays is enqueued on the stream on which their library enqueues its own work.
So it comes after the kernels that have made the arrays, and before those that read its results,
without an event. An array may be freed at once, because the library's allocator reuses its memory
on the same stream. Libraries that do not tell their stream are as other users of torch's stream.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType, from_dlpack

# Arrays as tensors, and tensors as arrays.


def to_tensor(argument: str, value: Any, *, written: bool) -> torch.Tensor:
    """A tensor that shares the memory of an array.

    Args:
        argument: the argument's name.
        value: an array of NumPy, CuPy or another library, with ``__dlpack__`` or
            ``__cuda_array_interface__``.
        written: the operation writes it, so it must not be read-only.
    """
    if not (hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")):
        number = isinstance(value, numbers.Number)
        raise TypeError(
            f"{argument} must be a torch.Tensor or an array with __dlpack__, "
            f"got {type(value).__name__}" + (f": pass torch.tensor({value})" if number else "")
        )
    if any(stride < 0 for stride in getattr(value, "strides", None) or ()):
        raise ValueError(f"{argument} must not have negative strides, which torch lacks")
    if written and _is_read_only(value):
        raise ValueError(f"{argument} must be writable, got a read-only array")
    try:
        if hasattr(value, "__dlpack__"):
            return from_dlpack(value)
        tensor = torch.as_tensor(value, dtype=None, device="cuda")
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{argument} must be an array that torch can take: {error}") from error
    if tensor.numel() and tensor.data_ptr() != value.__cuda_array_interface__["data"][0]:
        raise ValueError(f"{argument} must lie on the current device, {tensor.device}")
    return tensor


def _is_read_only(array: Any) -> bool:
    if not getattr(getattr(array, "flags", None), "writeable", True):
        return True
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface is not None and bool(interface["data"][1])


def to_library_of(given: Any, made: torch.Tensor) -> Any:
    """A new tensor as an array of the library of `given`, or the tensor if it cannot be one."""
    if hasattr(given, "__array_namespace__"):
        library = given.__array_namespace__()
    else:
        library = sys.modules.get(type(given).__module__.partition(".")[0])
    convert = getattr(library, "from_dlpack", None)
    if convert is None:
        return made
    ordered = not made.is_cuda or _handle_of(given) is not None
    try:
        return convert(_Exported(made) if ordered else made)
    except (BufferError, RuntimeError, TypeError, ValueError):  # such as bfloat16 in NumPy
        return made


class _Exported:
    """A tensor that another library may take without an order of streams.

    The tensor's work is on that library's own stream already, and torch refuses some streams.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self._tensor.__dlpack__(stream=-1 if self._tensor.is_cuda else None, **options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


# The streams of CUDA arrays.

_LEGACY = 1  # the handle of the default stream; 0 in torch
_CUDA_MEMORY = (DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAManaged)


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


def run_on_their_stream(
    values: Iterable[Any], tensors: Sequence[torch.Tensor], function: Callable[[], Any]
) -> Any:
    """Runs a function on the stream of the CUDA arrays among values, and its end, too.

    Args:
        values: arrays and other values.
        tensors: torch's tensors that are used together with the arrays.
        function: the function, which may return a Work or a Request. Its ``wait`` calls what is
            then in ``_finish``, if anything, to copy results to arrays.
    """
    arrays = [value for value in values if _is_on_cuda(value)]
    if not arrays:
        return function()
    with _on_stream_of(arrays, tensors):
        made = function()
    if hasattr(made, "_stream"):
        made._stream = None  # the library's own, on which its next work is, too
    if (finish := getattr(made, "_finish", None)) is not None:
        made._finish = functools.partial(_finish_on_stream, finish, arrays, tensors)
    return made


def _finish_on_stream(
    finish: Callable[[], object], arrays: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> None:
    with _on_stream_of(arrays, tensors):
        finish()


def stream_of(handle: int, device: torch.device | int) -> torch.cuda.Stream:
    """The stream with a handle; of 0, which is the default stream's, torch would make a new one."""
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _on_stream_of(arrays: Sequence[Any], tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Makes the arrays' stream torch's current one.

    If tensors of torch on CUDA are used, too, the stream waits for torch's current one, which then
    waits for it.
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
    captured = torch.cuda.is_current_stream_capturing()  # by torch, which then knows
    stream = stream_of(handle, device)
    shared = any(tensor.is_cuda for tensor in tensors)
    if shared:
        stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            _foreign.captures = not captured and torch.cuda.is_current_stream_capturing()
            yield
    finally:
        _foreign.captures = False
        if shared:
            current.wait_stream(stream)


def _is_on_cuda(value: Any) -> bool:
    """True for an array on a CUDA device."""
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in _CUDA_MEMORY
    return hasattr(value, "__cuda_array_interface__")


def _device_of(array: Any) -> int:
    """The number of an array's device."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    return torch.cuda.current_device()


def _handle_of(array: Any) -> int | None:
    """The handle of the stream that an array belongs to; None if its library does not tell."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        handle = cupy.cuda.get_current_stream(array.device.id).ptr
    else:
        handle = getattr(array, "__cuda_array_interface__", {}).get("stream")
    return 0 if handle == _LEGACY else handle
