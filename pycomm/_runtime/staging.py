"""Host memory for CUDA tensors in groups that span nodes, in which the CPU exchanges.

A call waits until the current stream has copied its tensors into pinned memory, so that operations
reach the group in the order of the calls, which is the same on every rank. Results are copied back
on the stream that is current when they are waited for. Memory for a single call comes from torch's
allocator, which keeps pinned memory and reuses it when its copies have ended.
"""

from __future__ import annotations

import torch


class StandIn:
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
        if self._copied_back is not None:  # that copy may still read the memory, on another stream
            torch.cuda.current_stream(self.tensor.device).wait_event(self._copied_back)
        self.host.copy_(self.tensor, non_blocking=True)


def fetch(*stand_ins: StandIn) -> None:
    """Copies tensors, all on one device, to their stand-ins, after the current stream's work."""
    for stand_in in stand_ins:
        stand_in.copy()
    if stand_ins and stand_ins[0].tensor.is_cuda:
        torch.cuda.current_stream(stand_ins[0].tensor.device).synchronize()
