"""Memory pools of torch and CuPy in the heap of a rank's CUDA window.

A pool asks the heap for segments, and gives them back when it is emptied. Both are decided by this
rank alone. What it gives back is used again once the device is idle, as other memory of the heap
is, so it may be given back while kernels use it, on any stream.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._runtime.arrays import stream_of
from pycomm._runtime.torch_private import when_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm._runtime.cuda import CudaHeap, CudaSide

# What torch's pools use, by the number of their functions: tensors may outlive their group.
_in_use: dict[int, tuple[Any, ...]] = {}


def _torch_pool(heap: CudaHeap | None, device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        if heap is None:
            return torch.cuda.MemPool()
        _name_refusals()
        number = _C.open_mem_pool(heap.ranges, heap.endpoint)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _C.__file__, f"pycomm_mem_pool_malloc_{number}", "pycomm_mem_pool_free"
        )
        _in_use[number] = allocator, heap.parts, heap.lent
        return torch.cuda.MemPool(allocator.allocator())  # type: ignore[no-untyped-call]


@functools.cache
def _name_refusals() -> None:
    """Makes torch's error tell how much of the heap is free, if a heap has had no room."""
    when_out_of_memory(_raise_refusal)


def _raise_refusal(*_: Any) -> None:
    if why := _C.mem_pool_refusal():
        raise torch.OutOfMemoryError(why)


def _cupy_pool(heap: CudaHeap | None, device: torch.device) -> Any:
    cupy = sys.modules.get("cupy")
    if cupy is None:
        raise ValueError('library must have been imported, got "cupy": import cupy first')
    if heap is None:
        return cupy.cuda.MemoryPool()
    ranges, parts = heap.ranges, heap.parts

    def malloc(nbytes: int, index: int) -> int:
        if index != device.index:
            raise ValueError(f"CuPy's current device must be the group's, {device}, got {index}")
        may_wait = not _captures(cupy, index)
        address = ranges.take(nbytes, may_wait)
        if not address:
            pool.free_all_blocks()
            address = ranges.take(nbytes, may_wait)
        if not address:
            raise MemoryError(ranges.refusal(nbytes))
        return address

    def free(address: int, _: int) -> None:
        assert parts  # they live as long as CuPy has blocks
        ranges.release(address)

    pool = cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)
    return pool


def _captures(cupy: Any, index: int) -> bool:
    """True if CuPy's current stream is captured, so that nothing may wait for the device."""
    handle = cupy.cuda.get_current_stream(index).ptr
    with torch.cuda.stream(stream_of(handle, index)):
        return torch.cuda.is_current_stream_capturing()


_POOLS = {"torch": _torch_pool, "cupy": _cupy_pool}


def mem_pool(library: str, side_of: Callable[[torch.device], CudaSide] | None) -> Any:
    """A pool of the library; see :meth:`pycomm.Group.mem_pool`.

    Args:
        library: the library's name.
        side_of: returns the group's CUDA side on a device; None if the group spans nodes.
    """
    if library not in _POOLS:
        raise ValueError(f"library must be one of {', '.join(_POOLS)}, got {library!r}")
    device = torch.device("cuda", torch.cuda.current_device())
    if side_of is None:
        return _POOLS[library](None, device)
    side = side_of(device)
    if library not in side.pools:
        side.pools[library] = _POOLS[library](side.heap, device)
    return side.pools[library]
