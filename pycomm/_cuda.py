"""A group's CUDA side: where its windows live, and how its operations reach the kernels.

Made at a group's first operation on a CUDA tensor, which all ranks therefore enter together.
Windows are

- device memory, all of it in one address space, where the ranks are threads;
- torch's symmetric memory, where they are processes and every pair of GPUs has peer access;
- pinned host memory, carved from the group's own shared window, on all ranks as soon as one pair
  has not.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._dtypes import DTYPES

if TYPE_CHECKING:
    from pycomm.group import Group

DEFAULT_MAX_BLOCKS = 32
STAGING_BYTES = 32 << 20


class CudaSide:
    """One rank's kernels.

    Attributes:
        device: where this rank's tensors must lie.
        transport: ``"threads"``, ``"peer memory"`` or ``"pinned host memory"``.
        lanes: blocks per rank.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        transport: str,
        endpoint: _C.CudaEndpoint,
        shared: _C.CudaSharedLaunch | None,
        lanes: int,
        heap: torch.Tensor | None,
        keep: Any,
    ) -> None:
        self.device = device
        self.transport = transport
        self.lanes = lanes
        self._heap = heap
        self._heap_used = 0
        self._keep = keep  # the memory behind the windows
        self._core = _C.CudaGroup(group._core, endpoint, shared)

    def run(
        self,
        collective: int,
        algorithm: int,
        op: int,
        root: int,
        count: int,
        source: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """Enqueues an operation on the current stream."""
        stream = torch.cuda.current_stream(self.device)
        for tensor in {id(source): source, id(result): result}.values():
            tensor.record_stream(stream)
        self._core.run(
            collective,
            algorithm,
            DTYPES[source.dtype],
            op,
            root,
            count,
            source.data_ptr(),
            result.data_ptr(),
            stream.cuda_stream,
        )

    def check(self) -> None:
        """Raises what went wrong in kernels that have been enqueued so far and have ended."""
        self._core.check()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the window's heap; its memory goes back with the group."""
        if self.transport == "threads":
            return torch.empty(shape, dtype=dtype, device=self.device)
        nbytes = shape.numel() * dtype.itemsize
        room = 0 if self._heap is None else self._heap.numel()
        begin = -(-self._heap_used // 256) * 256
        if self._heap is None or begin + nbytes > room:
            raise MemoryError(
                f"the CUDA window's heap has {max(room - begin, 0)} of {room} bytes, needed are "
                f"{nbytes}: make the group with a larger cuda_heap_bytes"
            )
        self._heap_used = begin + nbytes
        return self._heap[begin : begin + nbytes].view(dtype).view(shape)


def _lanes(max_blocks: int, device: torch.device, ranks_here: int) -> int:
    """Blocks per rank: at most what was asked for, and what fits beside the other ranks' blocks."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(max_blocks, processors // ranks_here))


def _all_agree(group: Group, flag: bool) -> bool:
    """Whether the flag holds on every rank."""
    value = torch.tensor([int(flag)], dtype=torch.int32)
    group._core.run(0, 1, DTYPES[torch.int32], 2, 0, 1, value.data_ptr(), value.data_ptr())
    return bool(value.item())


def _gather(group: Group, number: int) -> list[int]:
    """Every rank's number."""
    mine = torch.tensor([number], dtype=torch.int64)
    every = torch.empty(group.size, dtype=torch.int64)
    group._core.run(2, 2, DTYPES[torch.int64], 0, 0, 1, mine.data_ptr(), every.data_ptr())
    return [int(n) for n in every]


def _device_id(device: torch.device) -> int:
    """The same number for the same physical device in every process."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return int(uuid.replace("-", "")[:15], 16)


def _sees_all_peers(group: Group, device: torch.device) -> bool:
    """Whether this rank's device can use the memory of every other rank's."""
    visible = {
        _device_id(torch.device("cuda", i)): torch.device("cuda", i)
        for i in range(torch.cuda.device_count())
    }
    for number in _gather(group, _device_id(device)):
        peer = visible.get(number)
        if peer is None:
            return False
        if peer != device and not torch.cuda.can_device_access_peer(device, peer):
            return False
    return True


def join_processes(
    group: Group, device: torch.device, process_group: Any, max_blocks: int, heap_bytes: int
) -> CudaSide:
    """The CUDA side of a group of processes; a collective call."""
    lanes = min(_gather(group, _lanes(max_blocks, device, 1)))
    window_bytes = _C.cuda_window_bytes(group.size, lanes, STAGING_BYTES, heap_bytes)
    keep: Any
    heap: torch.Tensor | None = None
    if _all_agree(group, _sees_all_peers(group, device)):
        transport = "peer memory"
        windows, memory, keep = _symmetric_windows(window_bytes, device, process_group)
        heap = memory[_C.cuda_heap_begin(group.size, lanes, STAGING_BYTES) :]
    else:
        transport = "pinned host memory"
        windows, keep = _pinned_windows(group, window_bytes - heap_bytes)
        window_bytes -= heap_bytes
    group._core.run(4, 1, 0, 0, 0, 0, 0, 0)  # a barrier: every window is zero
    endpoint = _C.CudaEndpoint(
        device.index,
        group.rank,
        group.size,
        lanes,
        STAGING_BYTES,
        window_bytes,
        group.timeout,
        windows,
        False,
    )
    return CudaSide(group, device, transport, endpoint, None, lanes, heap, keep)


def _symmetric_windows(
    window_bytes: int, device: torch.device, process_group: Any
) -> tuple[list[int], torch.Tensor, Any]:
    """The one place that touches torch's symmetric memory (alpha)."""
    # Several ranks on one GPU are slow, and fine for tests.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(window_bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(memory, process_group)
    return [int(pointer) for pointer in handle.buffer_ptrs], memory, (memory, handle)


def _pinned_windows(group: Group, window_bytes: int) -> tuple[list[int], Any]:
    """Windows in the group's shared host memory, registered with this rank's device."""
    memory = group.empty(window_bytes, dtype=torch.uint8)
    memory.zero_()
    offsets = _gather(group, group._core.offset_of(memory.data_ptr()))
    addresses = [group._core.address(rank, offset) for rank, offset in enumerate(offsets)]
    return [_C.cuda_register_host(address, window_bytes) for address in addresses], memory


class LocalDevices:
    """The CUDA sides of ranks that are threads; each says where it is, then one connects all."""

    def __init__(self, groups: list[Group], max_blocks: int) -> None:
        self._groups = groups
        self._max_blocks = max_blocks
        self._devices: list[torch.device | None] = [None] * len(groups)
        self._sides: list[CudaSide] = []
        self._lock = threading.Lock()

    def side(self, rank: int, device: torch.device) -> CudaSide:
        """This rank's side; a collective call."""
        self._devices[rank] = device
        barrier = (4, 1, 0, 0, 0, 0, 0, 0)
        self._groups[rank]._core.run(*barrier)
        with self._lock:
            if not self._sides:
                self._sides = self._connect([d for d in self._devices if d is not None])
        return self._sides[rank]

    def _connect(self, devices: list[torch.device]) -> list[CudaSide]:
        size = len(self._groups)
        together = len(set(devices)) == 1
        if not together and len(set(devices)) != size:
            raise ValueError(
                f"the ranks' tensors must lie all on one GPU or each on its own, got {devices}"
            )
        lanes = min(_lanes(self._max_blocks, d, size if together else 1) for d in devices)
        window_bytes = _C.cuda_window_bytes(size, lanes, STAGING_BYTES, 0)
        memory = [torch.zeros(window_bytes, dtype=torch.uint8, device=d) for d in devices]
        for device in devices:
            torch.cuda.synchronize(device)
        windows = [m.data_ptr() for m in memory]
        endpoints = [
            _C.CudaEndpoint(
                device.index,
                rank,
                size,
                lanes,
                STAGING_BYTES,
                window_bytes,
                self._groups[rank].timeout,
                windows,
                True,
            )
            for rank, device in enumerate(devices)
        ]
        shared = _C.CudaSharedLaunch(endpoints) if together else None
        return [
            CudaSide(group, device, "threads", endpoint, shared, lanes, None, memory)
            for group, device, endpoint in zip(self._groups, devices, endpoints, strict=True)
        ]
