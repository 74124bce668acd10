"""A rank's CUDA side, which passes operations to the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C
from pycomm._inputs.dtypes import CODECS
from pycomm._runtime.log import cuda_made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pycomm._runtime.member import Member


class CudaSide:
    """One rank's kernels.

    Attributes:
        device: the device of this rank's tensors.
        transport: ``"threads"``, ``"peer memory"`` or ``"pinned host memory"``.
        lanes: the number of blocks per rank.
        shares_device: True if the ranks are several threads on one GPU.
    """

    def __init__(
        self,
        group: Member,
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
        self.shares_device = shared is not None
        self._size = group.size
        self._core = _C.CudaGroup(group._core, endpoint, shared)
        self._heap = heap
        self._heap_used = 0
        self._keep = keep  # the memory behind the windows
        cuda_made(group, device, transport, lanes)

    def close(self) -> None:
        """Waits for everything that was enqueued, then gives the windows up."""
        self._core.close()
        self._heap = self._keep = None

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
        stream = torch.cuda.current_stream(self.device)
        nbytes = _C.cuda_bucket_workspace_bytes(calls, self._size)
        workspace = _workspace(nbytes, self.device)
        for tensor in tensors:
            tensor.record_stream(stream)
        word = 0 if flag is None else flag.word.data_ptr()
        self._core.run_bucket(calls, word, workspace.data_ptr(), stream.cuda_stream)
        if flag is not None:
            flag.event.record(stream)

    def check(self) -> None:
        """Raises the error of kernels that have run so far, if there is one."""
        self._core.check()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor in the window's heap; its memory is freed together with the group."""
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


class NonfiniteFlag:
    """Reports if a compressed operation has met an infinity or a NaN.

    Args:
        device: where it runs.
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


class Codecs:
    """Encoding and decoding on a device's current stream: as ``_C``'s, and for parts of a tensor.

    Args:
        device: the device.
        checks: decode bytes that may be anything; that waits for the stream.
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
        """Decodes; if it checks the bytes, it waits for the stream."""
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
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
