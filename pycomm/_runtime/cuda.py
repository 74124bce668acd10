"""A rank's CUDA side: its windows, the kernels on them, and host memory for exchanges."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from pycomm import _C
from pycomm._inputs import CODECS, operation_of
from pycomm._runtime import host
from pycomm._runtime.arrays import check_not_captured, stream_of
from pycomm._runtime.log import cuda_made, fallback
from pycomm._runtime.topology import device_id
from pycomm._runtime.torch_private import (
    backward_id,
    environment,
    run_backward,
    storage_at,
    symmetric_handle,
    symmetric_tensor,
)
from pycomm._runtime.turns import locked
from pycomm.errors import PycommError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pycomm._runtime.lifetime import Member


@atexit.register
def _await_autograd() -> None:
    """Waits until autograd's thread of each GPU in use has released the last backward.

    When backward has returned, the thread may still hold Python objects of it. If it releases them
    while the interpreter ends, Python up to 3.13 ends the thread inside of a destructor, and C++
    aborts the process. A thread releases one backward before it takes the next.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    with contextlib.suppress(RuntimeError):  # the device has failed
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_stats(index).get("reserved_bytes.all.current", 0) > 0:
                one = torch.ones((), dtype=torch.float32, device=torch.device("cuda", index))
                root = torch.zeros_like(one, requires_grad=True).clone()
                run_backward((root,), (one,), False, False, (), True, accumulate_grad=True)


class CudaSide:
    """One rank's kernels.

    Attributes:
        device: the device of this rank's tensors.
        devices: the number of every rank's device (pycomm/_runtime/topology.py).
        transport: ``"threads"``, ``"peer memory"`` or ``"pinned host memory"``.
        lanes: the number of blocks per rank.
        shares_device: True if the ranks are several threads on one GPU, with a launch or with one
            each.
        pools: memory pools in the window's heap, by library.
    """

    def __init__(
        self,
        group: Member,
        device: torch.device,
        devices: Sequence[int],
        transport: str,
        endpoint: _C.CudaEndpoint,
        shared: _C.CudaSharedLaunch | None,
        lanes: int,
        heap: CudaHeap | None,
        keep: Any,
    ) -> None:
        self.device, self.devices = device, devices
        self.transport = transport
        self.lanes = lanes
        self.shares_device = transport == "threads" and len(set(devices)) < group.size
        self._size = group.size
        self._core = _C.CudaGroup(group._core, endpoint, shared)
        # What C enqueues operations with; None if Python has to look at each.
        self._short_way = self._core if len(group.nodes) == 1 else None
        self._heap = heap
        self._keep = keep  # the memory behind the windows
        self.pools: dict[str, Any] = {}
        cuda_made(group, device, transport, lanes)

    def close(self) -> None:
        """Waits for all enqueued work. The windows live as long as this object.

        The group's last messages use them.
        """
        self._short_way = None
        if self._heap is not None:
            self._heap.ranges.close()
        self._core.close()
        self._heap = None
        self.pools.clear()

    def run(
        self,
        operation: _C.Operation,
        count: int,
        source: torch.Tensor,
        result: torch.Tensor,
        shape: torch.Size | None = None,
        label: str = "",
    ) -> None:
        """Enqueues an operation on the current stream; ranks compare shape and label."""
        self._check_thread()
        stream = torch.cuda.current_stream(self.device)
        for tensor in {id(source): source, id(result): result}.values():
            tensor.record_stream(stream)
        self._core.run(
            operation,
            count,
            source.data_ptr(),
            result.data_ptr(),
            stream.cuda_stream,
            shape,
            label,
        )

    def run_bucket(
        self,
        calls: Sequence[_C.Call],
        tensors: Iterable[torch.Tensor],
        flag: NonfiniteFlag | None = None,
    ) -> None:
        """Enqueues all-reduces, which use `tensors`; compressed ones share kernel launches."""
        self._check_thread()
        stream = torch.cuda.current_stream(self.device)
        nbytes = _C.cuda_bucket_workspace_bytes(calls, self._size)
        workspace = _workspace(nbytes, self.device)
        for tensor in tensors:
            tensor.record_stream(stream)
        word = 0 if flag is None else flag.word.data_ptr()
        self._core.run_bucket(calls, word, workspace.data_ptr(), stream.cuda_stream)
        if flag is not None:
            flag.event.record(stream)

    def _check_thread(self) -> None:
        """Raises ValueError in a backward if ranks share a device.

        One may wait on the host for another, but autograd has one thread per device.
        """
        if self.shares_device and backward_id() >= 0:
            raise ValueError(
                "ranks that are threads must have a GPU each to exchange in backward, got "
                f"{self.device} for all: autograd has one thread per device"
            )

    def path_of(self, tensor: torch.Tensor) -> str:
        """How other ranks get at an uncompressed tensor; see :class:`pycomm.ExchangePlan`."""
        if self.transport == "pinned host memory":
            return self.transport
        in_heap = self._heap is not None and tensor in self._heap
        return "in place" if in_heap or self.transport == "threads" else "staged"

    def check(self) -> None:
        """Raises the error of kernels that have run so far, if there is one."""
        self._core.check()

    def check_operation(self, operation: _C.Operation) -> None:
        """Raises ValueError if kernels cannot run the operation."""
        self._core.check_operation(operation)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor in the window's heap."""
        if self.transport == "threads":
            return torch.empty(shape, dtype=dtype, device=self.device)
        try:
            return self._present_heap().empty(shape, dtype)
        except MemoryError:
            self._core.check()  # after a failure, memory of tensors that are gone is not free
            raise

    @property
    def heap(self) -> CudaHeap | None:
        """The window's heap; None if ranks are threads, which need none."""
        return None if self.transport == "threads" else self._present_heap()

    def _present_heap(self) -> CudaHeap:
        if self._heap is None:
            raise MemoryError(
                "the CUDA window has no heap, because CUDA tensors go through pinned host memory"
            )
        return self._heap

    def take_in(self, tensor: torch.Tensor) -> None:
        """Moves a tensor that other ranks cannot get at into the window's heap, with its views.

        It must have its storage for itself. A graph has its address, so a capture moves nothing.

        Raises:
            MemoryError: the heap has no room.
        """
        if self.path_of(tensor) == "staged" and not torch.cuda.is_current_stream_capturing():
            self._present_heap().take_in(tensor)

    def grow_heap(self, group: Member, wish: int) -> None:
        """Makes the heap larger if it has no free block of `wish` bytes; a collective call.

        It grows on all ranks or on none, which the log tells. In a capture, it does not grow.
        """
        if self._heap is not None:
            try:
                self._heap.grow(group, wish, self.devices)
            except PycommError:  # on all ranks
                raise
            except BaseException:
                group._core.abort()  # so that other ranks do not wait for this one
                raise

    def place_of(self, tensor: torch.Tensor) -> int:
        """The place of a tensor in the window's heap; -1 if it lies elsewhere."""
        return -1 if self._heap is None else self._heap.place_of(tensor)

    def at(self, rank: int, place: int) -> tuple[int, Any]:
        """The address of a place in a rank's heap, and what keeps it mapped."""
        heap = self._present_heap()
        return heap.endpoint.address_of(rank, place), heap.parts

    def lend(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor in the heap for good."""
        self._present_heap().lent.append(tensor.untyped_storage())


class CudaHeap:
    """The part of a window that tensors lie in. Memory of tensors that are gone is used again.

    Each operation announces where each rank's tensors lie, so ranks may free and make tensors in
    different orders. An operation ends on a rank when no other rank uses the rank's tensors any
    more. So no rank needs to ask others before it uses memory again, but it waits for its own
    device, because the program's kernels may still use the memory, on any stream.

    Args:
        memory: the bytes of the heap, in the window.
        handle: what keeps the other ranks' windows mapped.
        endpoint: this rank's kernels.
        host: the group on the host.
        process_group: returns torch's process group of the ranks, or raises RuntimeError.

    Attributes:
        parts: the bytes of the heap, in one piece or more, and what keeps those of other ranks
            mapped. Parts stay until nobody uses the heap: graphs may have their addresses.
        endpoint: this rank's kernels.
        ranges: which bytes are free.
        lent: storages that other ranks may use without an operation.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        handle: Any,
        endpoint: _C.CudaEndpoint,
        host: _C.Group,
        process_group: Callable[[], Any],
    ) -> None:
        self.parts: list[tuple[torch.Tensor, Any]] = [(memory, handle)]
        self.endpoint = endpoint
        self.ranges = _C.DeviceHeap(memory.data_ptr(), memory.numel(), endpoint, host)
        self.lent: list[torch.UntypedStorage] = []
        self._device, self._process_group = memory.device, process_group

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.place_of(tensor) >= 0

    def place_of(self, tensor: torch.Tensor) -> int:
        """The place of a tensor, a number that all ranks know it by; -1 if it lies elsewhere."""
        return self.endpoint.place_of(tensor.data_ptr(), 1)

    def grow(self, group: Member, wish: int, devices: Sequence[int]) -> None:
        """Adds as much as the largest wish, if a rank has no free block for its own.

        Args:
            group: this rank's membership.
            wish: the block that this rank needs.
            devices: the number of every rank's device.
        """
        captures = torch.cuda.is_current_stream_capturing()
        lacks = -1 if captures else 0 if self.ranges.has_room(wish) else wish
        every = _gather(group, lacks)
        if -1 in every or not any(every):
            return
        if why := self._extend(group, max(every), devices):
            fallback(group, "the CUDA window's heap cannot grow: %s", why)

    def _extend(self, group: Member, nbytes: int, devices: Sequence[int]) -> str:
        """Adds bytes on all ranks, or on none and returns why; a collective call."""
        free, _ = torch.cuda.mem_get_info(self._device)
        crowd = devices.count(devices[group.rank])
        if nbytes > (most := min(_gather(group, free // (2 * crowd)))):
            return (
                f"models need {nbytes} bytes, half of a GPU's free memory is {most} for each rank"
            )
        made, why = _symmetric_memory(group, self._device, devices, self._process_group, nbytes)
        if made is None:
            return why
        region, memory, handle = made
        self.parts.append((memory, handle))  # also after an error, because kernels may know of it
        try:
            self.endpoint.extend(region)
        except RuntimeError as error:
            why = f"the device refuses it: {error}"
        if not _all_agree(group, not why):  # no rank uses it before all ranks reach it
            return why or ELSEWHERE
        self.ranges.extend(memory.data_ptr(), nbytes)
        return ""

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Makes an uninitialised tensor. One made in a capture keeps its memory, for the graph."""
        made = self._take(shape, dtype)
        self._release_with(made)
        return made

    def take_in(self, tensor: torch.Tensor) -> None:
        """Moves a tensor, which has its storage for itself, and its views to the heap."""
        from pycomm._runtime.c10d import take_memory

        made = self._take(tensor.shape, tensor.dtype)
        tensor.record_stream(torch.cuda.current_stream(tensor.device))  # which reads it here
        take_memory(tensor, made.copy_(tensor))
        self._release_with(tensor)

    def _take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor whose memory is in use for good."""
        nbytes = shape.numel() * dtype.itemsize
        may_wait = not torch.cuda.is_current_stream_capturing()
        address = self.ranges.take(nbytes, may_wait=may_wait)
        if not address:
            raise MemoryError(self.ranges.refusal(nbytes))
        device = self._device
        storage = storage_at(address, device, nbytes)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]

    def _release_with(self, tensor: torch.Tensor) -> None:
        """Releases a tensor's memory once its storage is gone; in a capture, never."""
        ranges = None if torch.cuda.is_current_stream_capturing() else self.ranges
        kept = self.parts, ranges, tensor.untyped_storage().data_ptr()  # also if it is empty
        weakref.finalize(tensor.untyped_storage(), _release, *kept).atexit = False


def _release(
    parts: list[Any],  # noqa: ARG001 - they live as long as the last block
    ranges: _C.DeviceHeap | None,
    address: int,
) -> None:
    if ranges is not None:
        ranges.release(address)


class HeapWishes:
    """What one model will need in the heaps of groups' windows, until it takes it or is gone.

    Args:
        device: the model's device.
    """

    _every: ClassVar[weakref.WeakSet[HeapWishes]] = weakref.WeakSet()
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wishes: dict[Any, int] = {}  # bytes, by group
        with self._lock:
            self._every.add(self)

    def add(self, group: Member, nbytes: int) -> None:
        """Wishes for more memory in a group's window."""
        self._wishes[group] = self.of(group) + nbytes

    def of(self, group: Member) -> int:
        """The wish for a group's window."""
        return self._wishes.get(group, 0)

    @classmethod
    def total(cls, group: Member) -> int:
        """What all models of this rank will still need in a group's window."""
        with cls._lock:  # ranks may be threads
            every = list(cls._every)
        return sum(wishes.of(group) for wishes in every)

    def fulfil(self, needed: bool = True) -> None:
        """Makes room, before the model takes its memory; a collective call of the groups' ranks.

        Args:
            needed: False on a rank that turns out not to need any.
        """
        for group, nbytes in self._wishes.items():
            if len(group.nodes) == 1:
                wish = self.total(group) - (0 if needed else nbytes)
                group._cuda_side(self._device).grow_heap(group, wish)
        self._wishes.clear()


class NonfiniteFlag:
    """Reports if a compressed operation has met an infinity or a NaN.

    Args:
        device: the device of the operation.
        check: raises the error of an operation that has failed.
    """

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=device)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._check = check

    def set(self, found: torch.Tensor) -> None:
        """Sets the flag on the current stream."""
        self.word.copy_(found)
        self.event.record()

    def read(self) -> bool:
        """Waits on the host until the operation has run, and raises its error if it failed."""
        self.event.synchronize()
        self._check()
        return bool(self.word.item())


def current_stream(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of a tensor's device, and the handle of its current stream."""
    return tensor.get_device(), torch.cuda.current_stream(tensor.device).cuda_stream


def follow(device: int, handle: int) -> None:
    """Makes the current stream of a device wait for another one, unless that is the current one."""
    current = torch.cuda.current_stream(device)
    if current.cuda_stream != handle:
        current.wait_stream(stream_of(handle, device))


class ExchangeStream:
    """A stream for the exchanges of gradients, with times for which backwards wait for them there.

    Args:
        device: the device.

    Attributes:
        stream: the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: list[_Ends] = []  # of the last step
        self._before: list[_Ends] = []  # of earlier steps, not counted yet

    @contextlib.contextmanager
    def follow(self) -> Iterator[torch.cuda.Stream]:
        """Makes it the current stream, after what the current one has to do so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield self.stream

    def note_end(self) -> None:
        """Records the ends of a backward and of its exchanges; in a capture it does nothing."""
        if torch.cuda.is_current_stream_capturing():
            return
        ends = _Ends(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[no-untyped-call]
        ends.backward.record(torch.cuda.current_stream(self.stream.device))
        ends.exchanges.record(self.stream)
        self._last.append(ends)

    def count(self) -> float:
        """Begins a step; seconds of earlier steps that have ended, each counted once."""
        self._before += self._last
        self._last = []
        seconds = 0.0
        if not torch.cuda.is_current_stream_capturing():
            while self._before and self._before[0].have_come():
                seconds += self._before.pop(0).seconds()
        return seconds

    def waits(self) -> tuple[float, float]:
        """Seconds of the last step, and of earlier ones that are not counted yet. Waits."""
        for ends in (*self._before, *self._last):
            ends.backward.synchronize()
            ends.exchanges.synchronize()
        return sum(map(_Ends.seconds, self._last)), sum(map(_Ends.seconds, self._before))


class _Ends(NamedTuple):
    backward: torch.cuda.Event
    exchanges: torch.cuda.Event

    def have_come(self) -> bool:
        """True once both have come; nothing says which one comes first."""
        return all(end.query() for end in self)  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """How long work after the backward waits for the exchanges."""
        return max(float(self.backward.elapsed_time(self.exchanges)), 0.0) / 1e3


class Codecs:
    """Encoding and decoding on a device's current stream, as in ``_C``, also for parts of a tensor.

    Args:
        device: the device.
        checks: check the bytes before decoding them; this waits for the stream.
    """

    def __init__(self, device: torch.device, *, checks: bool = True) -> None:
        self._device, self._checks = device, checks
        self._place = (device.index, torch.cuda.current_stream(device).cuda_stream)

    def encode(
        self,
        codec: _C.Codec,
        dtype: int,
        x: int,
        n: int,
        wire: int,
        seed: int,
        step: int,
        offset: int,
        stream: int = 0,
        run: int = 0,
        stride: int = 0,
    ) -> None:
        """Enqueues the encoding."""
        space = _workspace(_C.cuda_workspace_bytes(codec, n), self._device)
        _C.cuda_encode(
            *self._place, space.data_ptr(), codec, dtype, x, n, wire, seed, step, offset, stream,
            run, stride,
        )  # fmt: skip

    def decode(
        self, codec: _C.Codec, wire: int, nbytes: int, n: int, dtype: int, output: int, add: bool
    ) -> None:
        """Decodes. With `checks`, it waits for the stream."""
        space = _workspace(4, self._device)
        _C.cuda_decode(
            *self._place, space.data_ptr(), codec, wire, nbytes, n, dtype, output, add,
            self._checks,
        )  # fmt: skip

    def select(self, dtype: int, x: int, n: int, k: int, indices: int, values: int) -> int:
        """Selects, and waits for the stream to return the number of elements."""
        codec = _C.Codec(CODECS["topk"], k=k)
        space = _workspace(_C.cuda_workspace_bytes(codec, n), self._device)
        return _C.cuda_select(*self._place, space.data_ptr(), codec, dtype, x, n, indices, values)


def _workspace(nbytes: int, device: torch.device) -> torch.Tensor:
    check_not_captured()
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


# Host memory for CUDA tensors of operations that the CPU runs: in groups that span nodes, and where
# there is no kernel.
#
# A call waits until the current stream has copied its tensors into pinned memory, so that
# operations reach the group in the order of the calls, which is the same on every rank. The wait
# for a result copies it back on the current stream. Memory for a single call comes from torch's
# allocator, which keeps pinned memory and reuses it after its copies.


class HostMirror:
    """Contiguous host memory that stands in for a tensor.

    Attributes:
        tensor: the tensor.
        host: host memory of its shape and dtype, uninitialised.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.host = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )
        self._copied_back: torch.cuda.Event | None = None

    def put_back(self) -> None:
        """Copies from host memory to the tensor, on the current stream."""
        self.tensor.copy_(self.host, non_blocking=True)
        if self.tensor.is_cuda:
            stream = torch.cuda.current_stream(self.tensor.device)
            self.tensor.record_stream(stream)
            self._copied_back = stream.record_event()

    def copy(self) -> None:
        """Copies from the tensor to host memory, on the current stream; the host must wait."""
        if self._copied_back is not None:  # another stream may still read the memory
            torch.cuda.current_stream(self.tensor.device).wait_event(self._copied_back)
        self.host.copy_(self.tensor, non_blocking=True)


def fetch(*stand_ins: HostMirror) -> None:
    """Copies tensors of one device to their stand-ins, after the current stream's work."""
    for stand_in in stand_ins:
        stand_in.copy()
    if stand_ins and stand_ins[0].tensor.is_cuda:
        torch.cuda.current_stream(stand_ins[0].tensor.device).synchronize()


class DeviceReceive:
    """Where a message for a tensor on this rank's device may arrive.

    Attributes:
        host: for one from host memory. Memory that is never written takes none.
        memory: for one from a device, and not in use: the tensor itself, or memory that is copied
            to it; None if there is none.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = host.empty(*tensor.shape, dtype=tensor.dtype)
        self._tensor = tensor
        stream = torch.cuda.current_stream(tensor.device)
        is_idle = tensor.is_contiguous() and stream.query()
        self.memory = tensor if is_idle else _idle_memory(tensor)

    def finish(self, on_device: bool) -> None:
        """Copies the message to the tensor on the current stream, if it is not there."""
        source = self.memory if on_device else self.host
        if source is None or source is self._tensor:
            return
        self._tensor.copy_(source, non_blocking=True)
        stream = torch.cuda.current_stream(self._tensor.device)
        for used in (self._tensor, self.memory):
            if used is not None:
                used.record_stream(stream)


def _idle_memory(like: torch.Tensor) -> torch.Tensor | None:
    """Memory that no stream uses any more; None if that is not certain.

    A tensor's memory may be in use by earlier work of the stream that it was made on. Nothing works
    on this one, unless torch has given it to somebody else, too.
    """
    device = like.device
    side = _idle_streams.get(device)
    if side is None:
        side = _idle_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        memory = torch.empty(like.shape, dtype=like.dtype, device=device)
    return memory if side.query() else None


_idle_streams: dict[torch.device, torch.cuda.Stream] = {}


# Connects ranks on CUDA: allocates their windows, and maps each rank's window on the others.
#
# This happens at a group's first operation on a CUDA tensor, so all ranks must start that operation
# together. Windows are
#
# - device memory in one address space, if the ranks are threads;
# - torch's symmetric memory, if the ranks are processes and it works on all of them;
# - otherwise pinned host memory in the group's window, on all ranks.

STAGING_BYTES = 32 << 20  # per rank, at least
# Processes on one GPU take turns of milliseconds, and meet once per tile: they get larger tiles.
CROWDED_STAGING_BYTES = 256 << 20
MESSAGE_BYTES = 8 << 20  # per rank, for pieces of messages

# Variables that torch reads when it makes symmetric memory. The setup of multicast fails or hangs
# on some machines, so ranks must ask for it. Torch refuses two ranks on GPUs of the same number,
# but numbers depend on each process's CUDA_VISIBLE_DEVICES. Told to allow them, it sets up no
# multicast.
MULTICAST = "PYCOMM_MULTICAST"
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


def _crowded_staging_bytes(group: Member, device: torch.device, devices: list[int]) -> int:
    """Staging bytes per rank if processes share a GPU: at most 1/16 of what is free; else 0."""
    crowd = max(map(devices.count, devices))
    if crowd == 1:
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return min(CROWDED_STAGING_BYTES, *_gather(group, free // (16 * crowd)))


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
    return [row[0] for row in _gather_rows(group, [number])]


def _gather_rows(group: Member, row: list[int]) -> list[list[int]]:
    """Every rank's numbers; all have as many."""
    mine = host.tensor(row)
    every = host.empty(group.size, len(row), dtype=torch.int64)
    _run(group, "all_gather", mine, every)
    rows: list[list[int]] = every.tolist()
    return rows


def _denied(device: torch.device, devices: Sequence[int]) -> str:
    """Names a GPU whose memory a device cannot use, or returns an empty string.

    GPUs that this process cannot see are not checked: mapping their windows shows if it works.
    """
    numbers = set(devices)
    for i in range(torch.cuda.device_count()):
        peer = torch.device("cuda", i)
        if peer == device or device_id(peer) not in numbers:
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

    Args:
        group: this rank's membership.
        device: this rank's device.
        process_group: returns torch's process group of these ranks, or raises RuntimeError.
        max_blocks: the largest number of blocks of an operation.
        heap_bytes: the heap's size, the same on all ranks. It is as large as the largest wish of a
            rank, if that is more and at most half of every device's free memory.
    """
    if group.size == 1:
        return LocalDevices([group], max_blocks).side(0, device)
    devices = _gather(group, device_id(device))
    crowd = devices.count(devices[group.rank])
    lanes = min(_gather(group, _lanes(max_blocks, device, crowd)))
    usual = _staging_bytes(lanes, group)
    staging = max(usual, _crowded_staging_bytes(group, device, devices))
    if (wished := max(_gather(group, HeapWishes.total(group)))) > heap_bytes:
        free, _ = torch.cuda.mem_get_info(device)
        heap_bytes = max(heap_bytes, min(wished, *_gather(group, free // (2 * crowd))))
    window_bytes = _C.cuda_window_bytes(group.size, lanes, staging, MESSAGE_BYTES + heap_bytes)
    keep: Any
    symmetric, why = _symmetric_memory(
        group, device, devices, process_group, window_bytes, zeroed=True
    )
    if symmetric is not None:
        transport = "peer memory"
        window, memory, handle = symmetric
        if crowd > 1:
            fallback(group, "%d processes share %s: their kernels take turns", crowd, device)
    else:
        transport = "pinned host memory"
        staging = usual
        window_bytes = _C.cuda_window_bytes(group.size, lanes, staging, MESSAGE_BYTES)
        windows, keep = _pinned_windows(group, device, window_bytes)
        window = _C.CudaRegion(window_bytes, windows, _seen_by_all(group, windows))
        fallback(group, "CUDA tensors go through host memory, which is slow: %s", why)
    endpoint = _C.CudaEndpoint(
        device.index,
        group.rank,
        group.size,
        lanes,
        staging,
        group.timeout,
        window,
        one_address_space=False,
        stage_always=False,
        message_bytes=MESSAGE_BYTES,
    )
    heap = None
    if symmetric is not None:
        begin = _C.cuda_heap_begin(group.size, lanes, staging) + MESSAGE_BYTES
        heap = CudaHeap(memory[begin:], handle, endpoint, group._core, process_group)
        keep = (memory, handle, heap.parts)  # to which later ones are added
    endpoint.serve_messages(group._core)
    _barrier(group)  # every window is zero, and every rank takes messages from devices
    return CudaSide(group, device, devices, transport, endpoint, None, lanes, heap, keep)


ELSEWHERE = "another rank's GPU cannot use all windows, see its log"


def _symmetric_memory(
    group: Member,
    device: torch.device,
    devices: Sequence[int],
    process_group: Callable[[], Any],
    nbytes: int,
    *,
    zeroed: bool = False,
) -> tuple[tuple[_C.CudaRegion, torch.Tensor, Any] | None, str]:
    """New memory of all ranks that their kernels reach, this rank's own, and its handle.

    All ranks get this result, or all get None and the reason; a collective call.
    """
    why = _denied(device, devices)
    if not _all_agree(group, not why):
        return None, why or ELSEWHERE
    memory = handle = None
    asked = _gather(group, device.index if os.environ.get(MULTICAST) == "1" else -1)
    multicast = -1 not in asked and len(set(asked)) == group.size
    with environment(dict.fromkeys(SYMMETRIC_MEMORY, "0") if multicast else SYMMETRIC_MEMORY):
        try:
            memory = symmetric_tensor(nbytes, device)
            if zeroed:
                memory.zero_()
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            why = f"torch's symmetric memory failed: {error}"
        if not _all_agree(group, memory is not None and not why):
            return None, why or ELSEWHERE
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
        return None, why or ELSEWHERE
    assert handle is not None
    everywhere = handle.multicast_ptr if _all_agree(group, handle.multicast_ptr != 0) else 0
    region = _C.CudaRegion(nbytes, windows, _seen_by_all(group, windows), everywhere)
    return (region, memory, handle), ""


def _seen_by_all(group: Member, here: list[int]) -> list[int]:
    """The address of this rank's memory in every rank's process, from those of all ranks' here."""
    return [addresses[group.rank] for addresses in _gather_rows(group, here)]


def _pinned_windows(
    group: Member, device: torch.device, window_bytes: int
) -> tuple[list[int], list[_C.CudaHostRegistration]]:
    """Windows in the group's shared host memory, pinned for this rank's device.

    A rank may leave while another rank's kernel still reads the staged data, so the memory stays
    until all ranks have left.
    """
    offset = group._core.offset_of(group._core.allocate_for_good(window_bytes))
    registrations = [
        _C.CudaHostRegistration(device.index, group._core, rank, offset, window_bytes)
        for rank, offset in enumerate(_gather(group, offset))
    ]
    host.pinned[registrations[group.rank]] = window_bytes  # the others' windows are theirs
    return [each.address for each in registrations], registrations


class LocalDevices:
    """Makes the CUDA sides of ranks that are threads; one thread connects all of them."""

    def __init__(
        self,
        groups: Sequence[Member | None],
        max_blocks: int,
        stage_always: bool = False,
        separate_launches: bool = False,
    ) -> None:
        self._groups = groups
        self._options = max_blocks, stage_always, separate_launches
        self._devices: list[torch.device | None] = [None] * len(groups)
        self._streams: dict[int, int] = {}  # of ranks that launch their own kernels
        self._sides: list[CudaSide | None] = []
        self._lock = threading.Lock()
        self._survivors: list[Member | None] = []
        self._smaller: LocalDevices | None = None

    def shrunk_to(self, group: Member) -> LocalDevices:
        """Makes the sides of the smaller group; each of its ranks passes its membership."""
        with self._lock:
            if self._smaller is None:
                self._survivors = [None] * group.size
                self._smaller = LocalDevices(self._survivors, *self._options)
            self._survivors[group.rank] = group
            return self._smaller

    def side(self, rank: int, device: torch.device) -> CudaSide:
        """This rank's side; a collective call."""
        self._devices[rank] = device
        if self._options[-1]:
            self._streams[rank] = torch.cuda.current_stream(device).cuda_stream
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
        max_blocks, stage_always, separate = self._options
        size = len(groups)
        together = size > 1 and len(set(devices)) == 1
        if not together and len(set(devices)) != size:
            raise ValueError(
                f"the ranks' tensors must lie all on one GPU or each on its own, got {devices}"
            )
        if together and separate:
            _check_room(devices[0], size, len({*self._streams.values()}))
        lanes = min(_lanes(max_blocks, d, size if together else 1) for d in devices)
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
                groups[rank].timeout,
                _C.CudaRegion(window_bytes, windows, []),
                one_address_space=True,
                stage_always=stage_always,
                message_bytes=0,  # nothing is out of the other ranks' reach
            )
            for rank, device in enumerate(devices)
        ]
        for group, endpoint in zip(groups, endpoints, strict=True):
            endpoint.serve_messages(group._core)
        shared = _C.CudaSharedLaunch(endpoints) if together and not separate else None
        numbers = [device_id(device) for device in devices]
        return [
            CudaSide(group, device, numbers, "threads", endpoint, shared, lanes, None, memory)
            for group, device, endpoint in zip(groups, devices, endpoints, strict=True)
        ]


def _check_room(device: torch.device, ranks: int, streams: int) -> None:
    """Raises ValueError unless all ranks' launches can run at the same time."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if ranks > processors:
        raise ValueError(
            "separate_launches needs a multiprocessor for at least one block of each rank: "
            f"{device} has {processors}, got {ranks} ranks"
        )
    if streams < ranks:
        raise ValueError(
            "separate_launches needs a stream for each rank, which run() makes on the current "
            f"device: got {streams} on {device} for {ranks} ranks"
        )


def _grant_access(devices: list[torch.device]) -> None:
    """Makes torch's allocators give every device access to the memory of every other."""
    for source in devices:
        for target in devices:
            if source != target:
                if not torch.cuda.can_device_access_peer(target, source):
                    raise ValueError(f"ranks that are threads need peer access, {target} lacks it")
                torch.empty(1, dtype=torch.uint8, device=source).to(target)
