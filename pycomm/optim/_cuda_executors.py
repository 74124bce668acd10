"""Optimizer steps on a CUDA device."""

from __future__ import annotations

import itertools

import torch

from pycomm import _C
from pycomm.optim._executors import Control, Step, Table, is_capturing, joined


class OnCuda:
    """Steps on a device, on one stream, without ever waiting for it.

    A table in device memory holds the segments of all groups. Before each step, only the entries
    that have changed since the last step are written.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self._stream = stream
        self._device = device
        self._table = _C.DeviceTable()
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._tables: list[Table] = []
        self._first: list[int] = []  # the number of each table's first segment
        self._edition = 0  # of the tables

    def is_for(self, device: torch.device, stream: int) -> bool:
        """True if it runs on a stream of a device; the default streams of all devices are 0."""
        return (self._device, self._stream) == (device, stream)

    def hold(self, tables: list[Table], edition: int = 0) -> None:
        """Prepares for a step of these tables; another edition of them has other words."""
        if self._tables is tables and self._edition == edition:
            return
        self._tables, self._edition = tables, edition
        counts = (len(words) // _C.segment_words for _, words in tables)
        self._first = list(itertools.accumulate(counts, initial=0))
        if not tables:
            return
        size = self._table.set(joined(tables))
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._table.upload(self._memory.data_ptr(), self._device.index, self._stream)

    def scalar(self) -> torch.Tensor:
        """Memory for a number that run() fills in."""
        return torch.empty((), dtype=torch.float32, device=self._device)

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings; one on the device is read there."""
        return rate_for(lr, self._device)

    def squares(self) -> torch.Tensor:
        """The sum of the squares of all gradients, as they are."""
        norm = torch.empty((), dtype=torch.float64, device=self._device)
        self._table.grad_norm(0, 0, 0, 0.0, False, norm.data_ptr())
        return norm.square()

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`."""
        norm = self.measure(step)
        for number, settings in enumerate(step.settings):
            self.step_table(number, settings, step.control)
        return norm

    def measure(self, step: Step) -> torch.Tensor | None:
        """Fills in what `step.control` points to; returns the norm, if it was needed."""
        if not step.measures:
            return None
        norm = torch.empty((), dtype=torch.float64, device=self._device)
        self._table.grad_norm(*step.control, step.bound, step.sets_found, norm.data_ptr())
        return norm

    def step_table(self, number: int, settings: _C.OptimizerSettings, control: Control) -> None:
        """Steps one of the tables."""
        group, words = self._tables[number]
        rate = rate_on_device(group["lr"])
        self._table.step(
            settings,
            self._first[number],
            len(words) // _C.segment_words,
            *control,
            0 if rate is None else rate.data_ptr(),
            rate is not None and rate.dtype == torch.float64,
        )


def rate_for(lr: float | torch.Tensor, device: torch.device) -> float:
    """A learning rate for the settings of a step on a device; 0 if it lies there."""
    if not isinstance(lr, torch.Tensor):
        return float(lr)
    if not lr.is_cuda:
        return float(lr.item())
    if lr.device != device:
        raise ValueError(f"lr must lie on {device} or the CPU, got {lr.device}")
    return 0.0


def rate_on_device(lr: float | torch.Tensor | None) -> torch.Tensor | None:
    """A learning rate on the device as a float or double; None if it is on the host."""
    if not (isinstance(lr, torch.Tensor) and lr.is_cuda):
        return None
    return lr if lr.dtype in (torch.float32, torch.float64) else lr.double()


def executor(device: torch.device, tables: list[Table], last: object, edition: int = 0) -> OnCuda:
    """The executor for these tables; it reuses `last`, from the last step, if possible."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if type(last) is not OnCuda or not last.is_for(device, stream) or is_capturing(device):
        # A captured graph writes its own table in each replay, which no later step can change.
        last = OnCuda(device, stream)
    last.hold(tables, edition)
    return last
