"""CUDA devices for programs on a machine without a GPU: in host memory, with kernels as fibers.

``make emulator`` builds the module that ``PYCOMM_EMULATOR`` names. It holds `pycomm._C` with the
kernels (tests/cpp/device), and registers the devices with torch (device.cpp, operators.cpp). Here,
what torch.cuda does in Python is replaced. torch must be a build without CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, ClassVar

PATH = os.environ.get("PYCOMM_EMULATOR", "")
PROCESSORS = 2  # of a device
MEMORY = 1 << 40  # bytes of a device


def _load(name: str) -> types.ModuleType:
    """One of the modules in the file."""
    spec = importlib.util.spec_from_file_location(
        name, PATH, loader=ExtensionFileLoader(name, PATH)
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _load("_emulator")  # before torch, which asks once for its devices

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._symmetric_memory  # noqa: E402


class Stream(torch.Stream):
    """Stands for torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **handle: int) -> Stream:
        if handle:
            return super().__new__(cls, **handle)
        return super().__new__(cls, device=_device(device), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class ExternalStream(Stream):
    """Stands for torch.cuda.ExternalStream."""

    def __new__(cls, stream_ptr: int, device: Any = None, **_: Any) -> ExternalStream:
        of = _device(device)
        if stream_ptr == 0:  # as torch does
            return super().__new__(cls, of)
        return super().__new__(cls, stream_id=stream_ptr, device_index=of.index, device_type=1)


class Event(torch.Event):
    """Stands for torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        self.recorded_at = time.monotonic()  # work is done when it is enqueued
        super().record(current_stream() if stream is None else stream)

    @property
    def cuda_event(self) -> int:
        return self.event_id

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.recorded_at - self.recorded_at)


def _device(device: Any) -> torch.device:
    if isinstance(device, int):
        return torch.device("cuda", device)
    device = torch.device("cuda" if device is None else device)
    return device if device.index is not None else torch.device("cuda", current_device())


def _visible() -> list[int]:
    """The numbers of the devices that this process may use."""
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [int(n) for n in numbers.split(",")] if numbers else list(range(device.devices))


def current_device() -> int:
    return device.current_device()


def exchange_device(to: int) -> int:
    before = device.current_device()
    if to >= 0:
        device.set_device(to)
    return before


def current_stream(of: Any = None) -> Stream:
    found = torch.accelerator.current_stream(_device(of))
    return Stream(
        stream_id=found.stream_id,
        device_index=found.device_index,
        device_type=found.device_type,
    )


def default_stream(of: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_device(of).index, device_type=1)


def get_device_properties(of: Any = None) -> Any:
    number = _visible()[_device(of).index]
    return types.SimpleNamespace(
        name="emulated",
        major=9,
        minor=0,
        multi_processor_count=PROCESSORS,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        L2_cache_size=0,
        uuid=uuid.UUID(int=(number + 1) << 100),
    )


def memory_stats(_: Any = None) -> dict[str, int]:
    """The bytes that all devices together have allocated; memory of graphs does not count."""
    held, peak = device.memory()
    return {
        "allocated_bytes.all.current": held,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": held,
        "reserved_bytes.all.peak": peak,
    }


def mem_get_info(_: Any = None) -> tuple[int, int]:
    windows = sum(nbytes for _, nbytes in SymmetricMemory.files.values())
    return MEMORY - device.memory()[0] - windows, MEMORY


class CUDAGraph:
    """Stands for torch.cuda.CUDAGraph."""

    _graph = 0

    def capture_begin(self, *_: Any, **__: Any) -> None:
        device.begin_capture()

    def capture_end(self) -> None:
        self._graph = device.end_capture()

    def replay(self) -> None:
        device.launch_graph(self._graph)

    def reset(self) -> None:
        if self._graph:
            device.destroy_graph(self._graph)
        self._graph = 0

    def __del__(self) -> None:
        self.reset()


class Runtime:
    """Stands for torch.cuda.cudart()."""

    pinned: ClassVar[dict[int, int]] = {}  # bytes, by address
    most_pinned: ClassVar[int] = 1 << 40

    @classmethod
    def cudaHostRegister(cls, address: int, size: int, flags: int) -> int:  # noqa: ARG003, N802
        if sum(cls.pinned.values()) + size > cls.most_pinned:
            return 2  # cudaErrorMemoryAllocation
        if address in cls.pinned:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        cls.pinned[address] = size
        return 0

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:  # noqa: N802
        return 713 if cls.pinned.pop(address, None) is None else 0


class CUDAPluggableAllocator:
    """Stands for torch.cuda.memory.CUDAPluggableAllocator."""

    def __init__(self, path: str, *names: str) -> None:
        library = ctypes.CDLL(path)
        found = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names)
        self._functions = tuple(found)

    def allocator(self) -> tuple[int | None, ...]:
        return self._functions


class MemPool:
    """Stands for torch.cuda.MemPool. It keeps no memory: each tensor is a segment."""

    def __init__(self, functions: tuple[int, int] = (0, 0)) -> None:
        self.functions = functions


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, _: Any = None) -> Iterator[None]:
    before = device.exchange_pool(*pool.functions)
    try:
        yield
    finally:
        device.exchange_pool(*before)


REPLACED = {
    "CUDAGraph": CUDAGraph,
    "MemPool": MemPool,
    "use_mem_pool": use_mem_pool,
    "Stream": Stream,
    "ExternalStream": ExternalStream,
    "Event": Event,
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": lambda to: exchange_device(to),  # torch.compile tells them apart
    "_lazy_init": lambda: None,
    "_sleep": lambda _cycles: device.sleep(),
    "can_device_access_peer": lambda *_: True,
    "current_device": current_device,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "cudart": Runtime,
    "empty_cache": lambda: None,
    "device_count": lambda: len(_visible()),
    "get_device_properties": get_device_properties,
    "host_memory_stats": dict,  # its pinned memory is ordinary memory
    "mem_get_info": mem_get_info,
    "memory_stats": memory_stats,
    "reset_peak_host_memory_stats": lambda: None,
    "reset_peak_memory_stats": lambda _=None: device.reset_peak(),
    "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),  # it has no generator
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: device.is_captured(),
    "is_initialized": lambda: True,
    "set_sync_debug_mode": lambda mode: device.let_wait(mode != "error"),
    "set_device": lambda to: device.set_device(_device(to).index),
    "set_rng_state": lambda *_: None,
    "set_stream": torch.accelerator.set_stream,
    "synchronize": lambda of=None: torch.accelerator.synchronize(_device(of)),
}


class SymmetricMemory:
    """Stands for torch's symmetric memory: files without names, mapped by every rank."""

    files: ClassVar[dict[int, tuple[int, int]]] = {}  # descriptor and size, by address
    mappings: ClassVar[list[mmap.mmap]] = []

    @classmethod
    def map(cls, descriptor: int, nbytes: int) -> int:
        """The address at which this process now has a file."""
        mapping = mmap.mmap(descriptor, nbytes)
        cls.mappings.append(mapping)
        return ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    @classmethod
    def empty_strided_p2p(
        cls, shape: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert dtype is torch.uint8
        assert stride == (1,)
        descriptor = os.memfd_create("emulator")
        os.truncate(descriptor, shape[0])
        address = cls.map(descriptor, shape[0])
        cls.files[address] = descriptor, shape[0]
        return torch.ops.emulator.bytes_at(address, shape[0], device)

    def __init__(self, memory: torch.Tensor, process_group: Any) -> None:
        every: list[Any] = [None] * dist.get_world_size(process_group)
        mine = os.getpid(), *self.files[memory.data_ptr()]
        dist.all_gather_object(every, mine, group=process_group)
        own = dist.get_rank(process_group)
        self.buffer_ptrs = [
            memory.data_ptr() if rank == own else self.map_of(*of) for rank, of in enumerate(every)
        ]
        off = os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        self.multicast_ptr = 0 if off else device.make_multicast(self.buffer_ptrs)
        dist.barrier(process_group)  # nobody ends while others open its file

    @classmethod
    def map_of(cls, pid: int, descriptor: int, nbytes: int) -> int:
        """The address at which this process now has a file of another one."""
        with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b") as file:
            return cls.map(file.fileno(), nbytes)


for name, value in REPLACED.items():
    setattr(torch.cuda, name, value)
torch.cuda.memory.CUDAPluggableAllocator = CUDAPluggableAllocator
torch._C._host_emptyCache = lambda: None
torch._C._cuda_attach_out_of_memory_observer = device.when_out_of_memory
torch._C._cuda_getDevice = device.current_device  # torch.compile asks for it
torch._C._distributed_c10d._SymmetricMemory = SymmetricMemory
torch.distributed._symmetric_memory.rendezvous = SymmetricMemory
sys.modules["pycomm._C"] = _load("pycomm._C")

import pycomm  # noqa: E402

pycomm._C = sys.modules["pycomm._C"]

from pycomm._runtime.cuda import Codecs, CudaSide  # noqa: E402
from pycomm.optim._cuda_executors import OnCuda  # noqa: E402
from pycomm.optim._shard_executors import OnCudaShards  # noqa: E402

Given = tuple[Any, ...]


def announce(kind: type, name: str, uses: Callable[[Any, Given], None]) -> None:
    """Calls `uses` with an object and arguments before a method of it enqueues kernels."""
    method = getattr(kind, name)

    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        uses(self, args)
        return method(self, *args, **kwargs)

    setattr(kind, name, announced)


def of_bucket(_: CudaSide, given: Given) -> None:
    for tensor in given[1]:
        torch.ops.emulator.kernel_uses(tensor, True)


def of_encoding(_: Codecs, given: Given) -> None:
    _codec, _dtype, x, _n, wire, *_others = given
    device.kernel_uses_addresses([x], [wire])


def of_decoding(_: Codecs, given: Given) -> None:
    _codec, wire, _nbytes, _n, _dtype, output, *_others = given
    device.kernel_uses_addresses([wire], [output])


def of_step(executor: OnCuda | OnCudaShards, _: Given) -> None:
    for _group, words in executor._tables:
        device.kernel_uses_addresses([], list(words))


def of_table(executor: OnCuda, given: Given) -> None:
    number, *_others = given
    device.kernel_uses_addresses([], list(executor._tables[number][1]))


announce(CudaSide, "run_bucket", of_bucket)
announce(Codecs, "encode", of_encoding)
announce(Codecs, "decode", of_decoding)
announce(OnCuda, "measure", of_step)
announce(OnCuda, "step_table", of_table)
announce(OnCudaShards, "run", of_step)
