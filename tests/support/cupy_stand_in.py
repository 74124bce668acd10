"""A stand-in for CuPy: arrays on CUDA devices with a current stream that torch does not know.

Its arrays lie in torch's memory. As CuPy's, they are made, written and freed on CuPy's current
stream, and `__dlpack__()` makes the stream of the one who asks wait for it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

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
    default = torch.cuda.ExternalStream(0, device=number)
    return Stream(_current.get(number, default))


class ndarray:  # noqa: N801 - CuPy's name
    """Stands for cupy.ndarray."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
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
        get_current_stream=get_current_stream, Stream=Stream
    )
    sys.modules["cupy"] = module
    return module
