"""Executors of optimizer steps: on this process's threads, or on a CUDA device."""

from __future__ import annotations

from array import array

import torch

from pycomm import _C
from pycomm.optim._options import Group

# A group and its segments, as integers.
Table = tuple[Group, "array[int]"]
# Addresses of the gradients' scale, of the flag that one is not finite, and of the clip factor;
# 0 for a missing one.
Control = tuple[int, int, int]

WORDS = 13  # in a segment: struct Segment of csrc/core/optim/segment.h


class OnCpu:
    """Steps on torch's threads."""

    def __init__(self, tables: list[Table]) -> None:
        self._tables = tables

    def scalar(self) -> torch.Tensor:
        """Memory for a number that grad_norm() fills in."""
        return torch.zeros(())

    def grad_norm(self, control: Control, max_norm: float, sets_found: bool) -> torch.Tensor:  # noqa: ARG002
        """The norm of all gradients together; also fills in what `control` points to."""
        norm = _C.optimizer_grad_norm(_joined(self._tables), *control, max_norm)
        return torch.tensor(norm, dtype=torch.float64)

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings."""
        return float(lr.item() if isinstance(lr, torch.Tensor) else lr)

    def step(self, number: int, settings: _C.OptimizerSettings, control: Control) -> None:
        """Steps one of the tables."""
        _C.optimizer_step(settings, self._tables[number][1], *control)


class OnCuda:
    """Steps on a device, on one stream, without ever waiting for it.

    A table in device memory holds the segments of all groups. Before each step, only the entries
    that have changed since the last step are written.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self.stream = stream
        self._device = device
        self._table = _C.DeviceTable()
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._tables: list[Table] = []

    def hold(self, tables: list[Table]) -> None:
        """Prepares for a step of these tables."""
        self._tables = tables
        size = self._table.set(_joined(tables))
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._table.upload(self._memory.data_ptr(), self._device.index, self.stream)

    def scalar(self) -> torch.Tensor:
        """Memory for a number that grad_norm() fills in."""
        return torch.empty((), device=self._device)

    def grad_norm(self, control: Control, max_norm: float, sets_found: bool) -> torch.Tensor:
        """The norm of all gradients together; also fills in what `control` points to."""
        norm = torch.empty((), dtype=torch.float64, device=self._device)
        self._table.grad_norm(*control, max_norm, sets_found, norm.data_ptr())
        return norm

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings; one on the device is read there."""
        if not isinstance(lr, torch.Tensor):
            return float(lr)
        if not lr.is_cuda:
            return float(lr.item())
        if lr.device != self._device:
            raise ValueError(f"lr must lie on {self._device} or the CPU, got {lr.device}")
        return 0.0

    def step(self, number: int, settings: _C.OptimizerSettings, control: Control) -> None:
        """Steps one of the tables."""
        first = sum(len(words) for _, words in self._tables[:number]) // WORDS
        group, words = self._tables[number]
        lr = group["lr"]
        if not (isinstance(lr, torch.Tensor) and lr.is_cuda):
            lr = None
        elif lr.dtype not in (torch.float32, torch.float64):
            lr = lr.double()
        self._table.step(
            settings,
            first,
            len(words) // WORDS,
            *control,
            0 if lr is None else lr.data_ptr(),
            lr is not None and lr.dtype == torch.float64,
        )


def executor(device: torch.device, tables: list[Table], last: OnCuda | None) -> OnCpu | OnCuda:
    """The executor for these tables. `last`, of the last step, is used again if possible."""
    if device.type == "cpu":
        return OnCpu(tables)
    stream = torch.cuda.current_stream(device).cuda_stream
    if last is None or last.stream != stream or is_capturing(device):
        # A captured graph writes its own table in each replay, which no later step can change.
        last = OnCuda(device, stream)
    last.hold(tables)
    return last


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a device is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _joined(tables: list[Table]) -> array[int]:
    words = array("q")
    for _, part in tables:
        words += part
    return words


def control_of(
    scale: torch.Tensor | None, found: torch.Tensor | None, clip: torch.Tensor | None
) -> Control:
    """Where the numbers lie; the tensors must live until the step has been enqueued."""
    return (
        0 if scale is None else scale.data_ptr(),
        0 if found is None else found.data_ptr(),
        0 if clip is None else clip.data_ptr(),
    )
