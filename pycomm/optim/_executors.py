"""Executors of optimizer steps: on this process's threads, or on a CUDA device."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pycomm import _C
from pycomm._training.shards import Shards
from pycomm._training.spanning_shards import SpanningShards
from pycomm._work import launch
from pycomm.optim._options import Group

# A group and its segments, as integers.
Table = tuple[Group, "array[int]"]
# Addresses of the gradients' scale, of the flag that one is not finite, and of the clip factor;
# 0 for a missing one.
Control = tuple[int, int, int]

WORDS = 14  # in a segment: struct Segment of csrc/core/optim/segment.h
SHARD_WORDS = WORDS + 2  # struct Shard of csrc/cpu/optim/sharded_step.h


class Step(NamedTuple):
    """What an executor does with its tables.

    Attributes:
        settings: those of each table.
        control: the numbers that it reads and fills in.
        max_norm: bound of the norm of all gradients together; None for no bound.
        sets_found: look for gradients that are not finite.
        params: the parameters of all tables.
    """

    settings: Sequence[_C.OptimizerSettings]
    control: Control
    max_norm: float | None
    sets_found: bool
    params: Sequence[torch.Tensor]

    @property
    def bound(self) -> float:
        """`max_norm` as the extension has it: 0 for no bound."""
        return self.max_norm or 0.0

    @property
    def measures(self) -> bool:
        """True if it reads all gradients before it changes anything."""
        return self.max_norm is not None or self.sets_found


class OnCpu:
    """Steps on torch's threads."""

    def __init__(self, tables: list[Table]) -> None:
        self._tables = tables

    def scalar(self) -> torch.Tensor:
        """Memory for a number that run() fills in."""
        return torch.zeros(())

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings."""
        return float(lr.item() if isinstance(lr, torch.Tensor) else lr)

    def run(self, step: Step) -> torch.Tensor | None:
        """Steps all tables, and fills in what `step.control` points to.

        Returns:
            The norm of all gradients together, if it was needed.
        """
        norm = None
        if step.measures:
            value = _C.optimizer_grad_norm(_joined(self._tables), *step.control, step.bound)
            norm = torch.tensor(value, dtype=torch.float64)
        for one, (_, words) in zip(step.settings, self._tables, strict=True):
            _C.optimizer_step(one, words, *step.control)
        return norm


class OnShards(OnCpu):
    """Steps on torch's threads, together with the other ranks of a wrapper's shards.

    A row of a table is a segment of this rank's part of a parameter, followed by the parameter's
    number of elements and whether its gradient has been averaged.
    """

    def __init__(self, tables: list[Table], shards: Shards) -> None:
        super().__init__(tables)
        self._shards = shards

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`. All ranks must call this alike."""
        shards, sharded = self._shards, self._prepare(step)
        core, label = shards.group._core, self._label(step)
        try:
            value = sharded.run(core, *step.control, step.bound, step.measures, label)
        finally:
            if sharded.half_done:
                shards.guard.step_failed()
        return torch.tensor(value, dtype=torch.float64) if step.measures else None

    def _prepare(self, step: Step) -> _C.ShardedStep:
        """The tables, for the extension."""
        shards, arena = self._shards, self._shards.arena
        shards.guard.check()
        sharded = _C.ShardedStep(arena.data_ptr(), arena.nbytes, shards.sums.data_ptr())
        for one, (_, words) in zip(step.settings, self._tables, strict=True):
            sharded.add(one, words)
        return sharded

    def _label(self, step: Step) -> str:
        """What ranks must agree on, for messages; the extension adds a hash of the rest."""
        rates = "/".join(f"{float(group['lr']):g}" for group, _ in self._tables) or "none"
        count = sum(len(words) for _, words in self._tables) // SHARD_WORDS
        scale, found, _ = step.control
        return (
            f"lr={rates}, max_norm={step.max_norm}, {count} gradients, scaled={scale != 0}, "
            f"found_inf={'sought' if step.sets_found else 'given' if found else 'no'}"
        )


class OnSpanningShards(OnShards):
    """The same for ranks on several nodes, which exchange sums and new parameters."""

    def __init__(self, tables: list[Table], shards: SpanningShards) -> None:
        super().__init__(tables, shards)
        self._group, self._publication = shards.group, shards.publication

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`. All ranks must call this alike."""
        sharded, norm = self._prepare(step), None
        self._publication.forget_written()
        sharded.begin(*step.control, step.bound)
        found = torch.tensor([sharded.skips()]).byte()
        self._reduce(found, "max", sharded.compared(self._label(step)))
        sharded.note_found(bool(found))
        count = sharded.sums
        if step.measures:
            self._sum_up(self._shards.sums[:count], sharded.measure)
            norm = torch.tensor(sharded.conclude_norm(), dtype=torch.float64)
        if sharded.adapts():
            self._sum_up(self._shards.sums[count : 3 * count], sharded.measure_ratios)
            sharded.conclude_ratios()
        if not sharded.skips():
            self._update(sharded, step.params)
        return norm

    def _update(self, sharded: _C.ShardedStep, params: Sequence[torch.Tensor]) -> None:
        """Updates this rank's parameters and sends them to all ranks."""
        try:
            self._publication.begin(params)
            sharded.finish()
            self._publication.send()
        except BaseException:
            self._shards.guard.step_failed()
            raise

    def _sum_up(self, sums: torch.Tensor, measure: Callable[[], None]) -> None:
        """Fills in all ranks' sums. Each comes from one rank, so adding zeros leaves its bits."""
        sums.zero_()
        measure()
        self._reduce(sums, "sum", "sums of a step")

    def _reduce(self, tensor: torch.Tensor, op: str, label: str) -> None:
        launch(
            self._group, "all_reduce", tensor, tensor, tensor.shape, op, label=label, async_op=False
        )


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
        """Memory for a number that run() fills in."""
        return torch.empty((), device=self._device)

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings; one on the device is read there."""
        if not isinstance(lr, torch.Tensor):
            return float(lr)
        if not lr.is_cuda:
            return float(lr.item())
        if lr.device != self._device:
            raise ValueError(f"lr must lie on {self._device} or the CPU, got {lr.device}")
        return 0.0

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`."""
        norm = None
        if step.measures:
            norm = torch.empty((), dtype=torch.float64, device=self._device)
            self._table.grad_norm(*step.control, step.bound, step.sets_found, norm.data_ptr())
        first = 0
        for one, (group, words) in zip(step.settings, self._tables, strict=True):
            self._step(one, group["lr"], first, len(words) // WORDS, step.control)
            first += len(words) // WORDS
        return norm

    def _step(
        self,
        settings: _C.OptimizerSettings,
        lr: float | torch.Tensor | None,
        first: int,
        count: int,
        control: Control,
    ) -> None:
        """Steps some of the segments."""
        if not (isinstance(lr, torch.Tensor) and lr.is_cuda):
            lr = None
        elif lr.dtype not in (torch.float32, torch.float64):
            lr = lr.double()
        self._table.step(
            settings,
            first,
            count,
            *control,
            0 if lr is None else lr.data_ptr(),
            lr is not None and lr.dtype == torch.float64,
        )


def executor(
    device: torch.device, tables: list[Table], shards: Shards | None, last: OnCuda | None
) -> OnCpu | OnCuda:
    """The executor for these tables. `last`, of the last step, is used again if possible."""
    if isinstance(shards, SpanningShards):
        return OnSpanningShards(tables, shards)
    if shards is not None:
        return OnShards(tables, shards)
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


def attribute(
    optimizer: torch.optim.Optimizer, name: str, device: torch.device
) -> torch.Tensor | None:
    """A number that a GradScaler may have set as an attribute."""
    value = getattr(optimizer, name, None)
    if value is None:
        return None
    return torch.as_tensor(value, dtype=torch.float32, device=device)
