"""A stand-in for CuPy: arrays on CUDA devices with a current stream that torch does not know.

Its arrays lie in torch's memory. As CuPy's, they are made, written and freed on CuPy's current
stream, and `__dlpack__()` makes the stream of the one who asks wait for it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pycomm._runtime.torch_private import storage_at

_current: dict[int, torch.cuda.Stream] = {}
asked: list[Any] = []  # the streams that have asked for arrays


class Stream:
    """Stands for cupy.cuda.Stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.torch = stream

    @property
    def ptr(self) -> int:
        """The handle of the stream."""
        return self.torch.cuda_stream

    def use(self) -> None:
        """Makes this stream CuPy's current one on its device."""
        _current[self.torch.device.index] = self.torch


def get_current_stream(device_id: int = -1) -> Stream:
    """CuPy's current stream; the default stream at first."""
    number = torch.cuda.current_device() if device_id < 0 else device_id
    default = torch.cuda.default_stream(number)
    return Stream(_current.get(number, default))


class Block:
    """Stands for memory of cupy.cuda.PythonFunctionAllocator."""

    def __init__(self, size: int, malloc: Callable[..., int], free: Callable[..., None]) -> None:
        self.size, self._free, self._device = size, free, torch.cuda.current_device()
        self.ptr = malloc(size, self._device)

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self._free(self.ptr, self._device)


class PythonFunctionAllocator:
    """Stands for cupy.cuda.PythonFunctionAllocator."""

    def __init__(self, malloc: Callable[..., int], free: Callable[..., None]) -> None:
        self._functions = malloc, free

    def malloc(self, size: int) -> Block:
        """New memory."""
        return Block(size, *self._functions)


class PooledBlock:
    """Memory of a pool, which takes it back at once."""

    def __init__(self, block: Block, free: list[Block]) -> None:
        self.ptr, self._block, self._free_blocks = block.ptr, block, free

    def __del__(self) -> None:
        self._free_blocks.append(self._block)


class MemoryPool:
    """Stands for cupy.cuda.MemoryPool: blocks that are free are used again on their stream."""

    def __init__(self, allocator: Callable[[int], Block]) -> None:
        self._allocator = allocator
        self._free: dict[tuple[int, int], list[Block]] = {}  # by stream and size

    def malloc(self, size: int) -> PooledBlock:
        """Memory for an array."""
        free = self._free.setdefault((get_current_stream().ptr, size), [])
        return PooledBlock(free.pop() if free else self._allocator(size), free)

    def free_all_blocks(self) -> None:
        """Gives all free blocks back."""
        for free in self._free.values():
            free.clear()


_allocators: list[Callable[[int], Any]] = []


@contextlib.contextmanager
def using_allocator(allocator: Callable[[int], Any]) -> Iterator[None]:
    """Arrays take their memory from this allocator."""
    _allocators.append(allocator)
    try:
        yield
    finally:
        _allocators.pop()


class ndarray:  # noqa: N801 - CuPy's name
    """Stands for cupy.ndarray."""

    def __init__(self, data: torch.Tensor, memory: Any = None) -> None:
        self.data, self.memory = data, memory
        self.device = types.SimpleNamespace(id=data.device.index)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of kernels that use the array."""
        return get_current_stream(self.device.id).torch

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        asked.append(stream)
        handle = 0 if stream in (None, 1) else stream
        if handle != self.stream.cuda_stream:
            torch.cuda.ExternalStream(handle, device=self.device.id).wait_stream(self.stream)
        return self.data.__dlpack__(stream=-1, **options)

    def fill(self, value: float) -> None:
        """A kernel that writes the array."""
        with torch.cuda.stream(self.stream):
            self.data.fill_(value)

    def get(self) -> list[float]:
        """The elements, after the stream's work."""
        with torch.cuda.stream(self.stream):
            return self.data.clone().cpu().tolist()


def full(count: int, value: float, dtype: torch.dtype = torch.float32) -> ndarray:
    """A new array."""
    with torch.cuda.stream(get_current_stream().torch):
        if _allocators:
            nbytes, device = (
                count * dtype.itemsize,
                torch.device("cuda", torch.cuda.current_device()),
            )
            memory = _allocators[-1](nbytes)
            data = torch.empty(0, dtype=dtype, device=device)
            storage = storage_at(memory.ptr, device, nbytes)
            return ndarray(data.set_(storage, 0, (count,)).fill_(value), memory)
        return ndarray(torch.full((count,), value, dtype=dtype, device="cuda"))


def from_dlpack(array: Any) -> ndarray:
    """An array that shares the memory of another library's."""
    stream = get_current_stream().torch
    capsule = array.__dlpack__(stream=stream.cuda_stream or 1)
    return ndarray(torch.from_dlpack(capsule))


def install() -> types.ModuleType:
    """Makes this module the one that ``import cupy`` gives."""
    module = types.ModuleType("cupy")
    ndarray.__module__ = "cupy"
    module.__dict__.update(ndarray=ndarray, from_dlpack=from_dlpack, full=full)
    module.__dict__["cuda"] = types.SimpleNamespace(
        get_current_stream=get_current_stream,
        Stream=Stream,
        MemoryPool=MemoryPool,
        PythonFunctionAllocator=PythonFunctionAllocator,
        using_allocator=using_allocator,
    )
    sys.modules["cupy"] = module
    return module
