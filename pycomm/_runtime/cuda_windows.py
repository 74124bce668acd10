"""Connects ranks on CUDA: allocates their windows, and maps each rank's window on the others.

This happens at a group's first operation on a CUDA tensor, so all ranks must start that operation
together. Windows are

- device memory in one address space, if the ranks are threads;
- torch's symmetric memory, if the ranks are processes and it works on all of them;
- pinned host memory in the group's window, on all ranks, if it does not.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._inputs import host
from pycomm._inputs.dtypes import operation_of
from pycomm._runtime.cuda import CudaSide
from pycomm._runtime.environment import environment
from pycomm._runtime.log import fallback
from pycomm._runtime.torch_private import symmetric_handle, symmetric_tensor
from pycomm._runtime.turns import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pycomm._runtime.member import Member

DEFAULT_MAX_BLOCKS = 32
STAGING_BYTES = 32 << 20  # per rank, at least

# What torch reads when it makes symmetric memory. Multicast is not used here, and on some machines
# setting it up fails or hangs. And torch takes GPUs of one number for one GPU, but the numbers
# depend on each process's CUDA_VISIBLE_DEVICES.
SYMMETRIC_MEMORY = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def _lanes(max_blocks: int, device: torch.device, ranks_here: int) -> int:
    """Blocks per rank: at most `max_blocks`, and as many as fit beside the other ranks' blocks."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(max_blocks, processors // ranks_here))


def _staging_bytes(lanes: int, group: Member) -> int:
    """Staging bytes per rank: at least as many as the group has on the CPU (8 slots)."""
    asked = 8 * group._core.slot_bytes
    return max(STAGING_BYTES, asked, _C.cuda_least_staging_bytes(group.size, lanes))


def _run(
    group: Member, collective: str, mine: torch.Tensor, result: torch.Tensor, op: str = "sum"
) -> None:
    """Runs a small collective of CPU tensors."""
    group._core.run(
        operation_of(collective, "auto", mine.dtype, op),
        mine.numel(),
        mine.data_ptr(),
        result.data_ptr(),
    )


def _barrier(group: Member) -> None:
    nothing = host.empty(0, dtype=torch.uint8)
    _run(group, "barrier", nothing, nothing)


def _all_agree(group: Member, flag: bool) -> bool:
    """True if the flag holds on every rank."""
    value = host.tensor([int(flag)], dtype=torch.int32)
    _run(group, "all_reduce", value, value, op="min")
    return bool(value.item())


def _gather(group: Member, number: int) -> list[int]:
    """Every rank's number."""
    mine = host.tensor([number])
    every = host.empty(group.size, dtype=torch.int64)
    _run(group, "all_gather", mine, every)
    return [int(n) for n in every]


def _device_id(device: torch.device) -> int:
    """The same number for the same physical device in every process."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return int(uuid.replace("-", "")[:15], 16)


def _denied(device: torch.device, devices: list[int]) -> str:
    """Names a GPU whose memory a device cannot use, or returns an empty string.

    A GPU that this process cannot see may still be within reach; only the attempt tells.
    """
    numbers = set(devices)
    for i in range(torch.cuda.device_count()):
        peer = torch.device("cuda", i)
        if peer == device or _device_id(peer) not in numbers:
            continue
        if not torch.cuda.can_device_access_peer(device, peer):
            return f"{device} has no peer access to {peer}"
    return ""


def join_processes(
    group: Member,
    device: torch.device,
    process_group: Callable[[], Any],
    max_blocks: int,
    heap_bytes: int,
) -> CudaSide:
    """Makes the CUDA side of a group of processes; a collective call.

    `process_group` returns torch's process group of these ranks, or raises RuntimeError.
    """
    if group.size == 1:
        return LocalDevices([group], max_blocks, stage_always=False).side(0, device)
    devices = _gather(group, _device_id(device))
    crowd = devices.count(devices[group.rank])
    lanes = min(_gather(group, _lanes(max_blocks, device, crowd)))
    staging = _staging_bytes(lanes, group)
    window_bytes = _C.cuda_window_bytes(group.size, lanes, staging, heap_bytes)
    keep: Any
    heap = None
    symmetric, why = _symmetric_windows(group, device, devices, process_group, window_bytes)
    if symmetric is not None:
        transport = "peer memory"
        windows, memory, handle = symmetric
        keep = (memory, handle)
        heap = memory[_C.cuda_heap_begin(group.size, lanes, staging) :]
        if crowd > 1:
            fallback(group, "%d processes share %s: their kernels take turns", crowd, device)
    else:
        transport = "pinned host memory"
        window_bytes -= heap_bytes
        windows, keep = _pinned_windows(group, device, window_bytes)
        fallback(group, "CUDA tensors go through host memory, which is slow: %s", why)
    _barrier(group)  # every window is zero
    endpoint = _C.CudaEndpoint(
        device.index,
        group.rank,
        group.size,
        lanes,
        staging,
        window_bytes,
        group.timeout,
        windows,
        one_address_space=False,
        stage_always=False,
    )
    return CudaSide(group, device, transport, endpoint, None, lanes, heap, keep)


def _symmetric_windows(
    group: Member,
    device: torch.device,
    devices: list[int],
    process_group: Callable[[], Any],
    nbytes: int,
) -> tuple[tuple[list[int], torch.Tensor, Any] | None, str]:
    """The address of every rank's window in this process, this rank's memory, and its handle.

    All ranks get them, or None and the reason; a collective call.
    """
    elsewhere = "another rank's GPU cannot use all windows, see its log"
    why = _denied(device, devices)
    if not _all_agree(group, not why):
        return None, why or elsewhere
    memory = handle = None
    with environment(SYMMETRIC_MEMORY):
        try:
            memory = symmetric_tensor(nbytes, device)
            memory.zero_()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            why = f"torch's symmetric memory failed: {error}"
        if not _all_agree(group, memory is not None and not why):
            return None, why or elsewhere
        assert memory is not None
        try:
            handle = symmetric_handle(memory, process_group())
        except RuntimeError as error:
            why = f"torch's symmetric memory failed: {error}"
    windows: list[int] = []
    if handle is not None:
        windows = [int(pointer) + getattr(handle, "offset", 0) for pointer in handle.buffer_ptrs]
        if windows[group.rank] != memory.data_ptr():
            why = "torch's symmetric memory is not where its handle says"
    if not _all_agree(group, not why):
        return None, why or elsewhere
    return (windows, memory, handle), ""


def _pinned_windows(
    group: Member, device: torch.device, window_bytes: int
) -> tuple[list[int], list[_C.CudaHostRegistration]]:
    """Windows in the group's shared host memory, pinned for this rank's device.

    A rank may leave while another one's kernel still reads what it has staged, so the memory stays
    until all ranks have left.
    """
    offset = group._core.offset_of(group._core.allocate_for_good(window_bytes))
    registrations = [
        _C.CudaHostRegistration(device.index, group._core, rank, offset, window_bytes)
        for rank, offset in enumerate(_gather(group, offset))
    ]
    return [each.address for each in registrations], registrations


class LocalDevices:
    """Makes the CUDA sides of ranks that are threads; one thread connects all of them."""

    def __init__(
        self, groups: Sequence[Member | None], max_blocks: int, stage_always: bool
    ) -> None:
        self._groups = groups
        self._max_blocks = max_blocks
        self._stage_always = stage_always
        self._devices: list[torch.device | None] = [None] * len(groups)
        self._sides: list[CudaSide | None] = []
        self._lock = threading.Lock()
        self._survivors: list[Member | None] = []
        self._smaller: LocalDevices | None = None

    def shrunk_to(self, group: Member) -> LocalDevices:
        """Makes the sides of the smaller group; each of its ranks passes its membership."""
        with self._lock:
            if self._smaller is None:
                self._survivors = [None] * group.size
                self._smaller = LocalDevices(self._survivors, self._max_blocks, self._stage_always)
            self._survivors[group.rank] = group
            return self._smaller

    def side(self, rank: int, device: torch.device) -> CudaSide:
        """This rank's side; a collective call."""
        self._devices[rank] = device
        group = self._groups[rank]
        assert group is not None
        _barrier(group)
        with locked(self._lock):
            if not self._sides:
                self._sides = self._connect([d for d in self._devices if d is not None])
            side, self._sides[rank] = self._sides[rank], None  # the group owns it from now on
        assert side is not None
        return side

    def _connect(self, devices: list[torch.device]) -> list[CudaSide | None]:
        groups = [group for group in self._groups if group is not None]
        size = len(groups)
        together = size > 1 and len(set(devices)) == 1
        if not together and len(set(devices)) != size:
            raise ValueError(
                f"the ranks' tensors must lie all on one GPU or each on its own, got {devices}"
            )
        lanes = min(_lanes(self._max_blocks, d, size if together else 1) for d in devices)
        staging = _staging_bytes(lanes, groups[0])
        window_bytes = _C.cuda_window_bytes(size, lanes, staging, 0)
        if not together:
            _grant_access(devices)
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
                staging,
                window_bytes,
                groups[rank].timeout,
                windows,
                one_address_space=True,
                stage_always=self._stage_always,
            )
            for rank, device in enumerate(devices)
        ]
        shared = _C.CudaSharedLaunch(endpoints) if together else None
        return [
            CudaSide(group, device, "threads", endpoint, shared, lanes, None, memory)
            for group, device, endpoint in zip(groups, devices, endpoints, strict=True)
        ]


def _grant_access(devices: list[torch.device]) -> None:
    """Makes torch's allocators give every device access to the memory of every other."""
    for source in devices:
        for target in devices:
            if source != target:
                if not torch.cuda.can_device_access_peer(target, source):
                    raise ValueError(f"ranks that are threads need peer access, {target} lacks it")
                torch.empty(1, dtype=torch.uint8, device=source).to(target)
