"""Executors of sharded optimizer steps: on this process's threads, or on a CUDA device.

A row of a table is a segment of this rank's part of a parameter, followed by the parameter's number
of elements and whether its gradient has been averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pycomm import _C
from pycomm._runtime import host
from pycomm._runtime.ranges import record_range
from pycomm._training.agree import tensor_checksum
from pycomm._training.shard_exchange import ParamAllGather
from pycomm._training.shards import Shards
from pycomm._work import launch
from pycomm.errors import PycommError
from pycomm.optim._cuda_executors import rate_for, rate_on_device
from pycomm.optim._executors import OnCpu, Step, Table, is_capturing


class OnCpuShards(OnCpu):
    """Steps on torch's threads, together with the other ranks of a wrapper's shards."""

    def __init__(self, tables: list[Table], shards: Shards) -> None:
        super().__init__(tables)
        self._shards = shards

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`. All ranks must call this alike."""
        shards, sharded = self._shards, self._prepare(step)
        core, label = shards.group._core, _label(self._tables, step, shards)
        try:
            with record_range(shards.group, "sharded_step"):
                value = sharded.run(core, *step.control, step.bound, step.measures, label)
        finally:
            if sharded.half_done:
                shards.guard.step_failed()
        return host.tensor(value, dtype=torch.float64) if step.measures else None

    def _prepare(self, step: Step) -> _C.ShardedStep:
        """The tables, for the extension."""
        shards, arena = self._shards, self._shards.arena
        shards.guard.check()
        sharded = _C.ShardedStep(arena.data_ptr(), arena.nbytes, shards.sums.data_ptr())
        for one, (_, words) in zip(step.settings, self._tables, strict=True):
            sharded.add(one, words)
        return sharded


class OnSpanningShards(OnCpuShards):
    """Steps of ranks on several nodes, which exchange sums and new parameters."""

    def __init__(self, tables: list[Table], shards: Shards, all_gather: ParamAllGather) -> None:
        super().__init__(tables, shards)
        self._group, self._all_gather = shards.group, all_gather

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`. All ranks must call this alike."""
        sharded, norm = self._prepare(step), None
        self._all_gather.forget_written()
        sharded.begin(*step.control, step.bound)
        found = host.tensor([sharded.skips()], dtype=torch.uint8)
        self._reduce(found, "max", sharded.compared(_label(self._tables, step, self._shards)))
        sharded.note_found(bool(found))
        count = sharded.sums
        if step.measures:
            self._sum_up(self._shards.sums[:count], sharded.measure)
            norm = host.tensor(sharded.conclude_norm(), dtype=torch.float64)
        if sharded.adapts():
            self._sum_up(self._shards.sums[count : 3 * count], sharded.measure_ratios)
            sharded.conclude_ratios()
        if not sharded.skips():
            self._update(sharded, step.params)
        return norm

    def _update(self, sharded: _C.ShardedStep, params: Sequence[torch.Tensor]) -> None:
        """Updates this rank's parameters and sends them to all ranks."""
        try:
            self._all_gather.begin(params)
            sharded.finish()
            self._all_gather.send()
        except BaseException:
            self._shards.guard.step_failed()
            raise

    def _sum_up(self, sums: torch.Tensor, measure: Callable[[], None]) -> None:
        """Fills in all ranks' sums. Each sum comes from one rank, and zeros do not change it."""
        sums.zero_()
        measure()
        self._reduce(sums, "sum", "sums of a step")

    def _reduce(self, tensor: torch.Tensor, op: str, label: str) -> None:
        launch(
            self._group, "all_reduce", tensor, tensor, tensor.shape, op, label=label, async_op=False
        )


class OnCudaShards:
    """Steps on a device, together with the other ranks of a wrapper's shards.

    A step is one launch. The host never waits for the device.
    """

    def __init__(self, device: torch.device, stream: int, shards: Shards) -> None:
        self.stream = stream
        self.shards = shards
        self._device = device
        self._step = _C.CudaShardedStep(
            shards.arena.data_ptr(), shards.arena.nbytes, shards.sums.data_ptr()
        )
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._tables: list[Table] = []

    def hold(self, tables: list[Table]) -> None:
        """Prepares for a step of these tables."""
        self._tables = tables

    def scalar(self) -> torch.Tensor:
        """Memory for a number that run() fills in."""
        return torch.zeros((), dtype=torch.float32, device=self._device)

    def rate(self, lr: float | torch.Tensor) -> float:
        """A learning rate for the settings; one on the device is read there."""
        return rate_for(lr, self._device)

    def run(self, step: Step) -> torch.Tensor | None:
        """See :meth:`OnCpu.run`. All ranks must call this alike."""
        shards, sharded, rates = self.shards, self._step, []
        shards.guard.check()
        side = shards.group._cuda_side(self._device)
        sharded.clear()
        for one, (group, words) in zip(step.settings, self._tables, strict=True):
            rate = rate_on_device(group["lr"])
            rates.append(rate)  # the tensor must live until the step has been enqueued
            in_double = rate is not None and rate.dtype == torch.float64
            sharded.add(one, words, 0 if rate is None else rate.data_ptr(), in_double)
        norm = None
        if step.measures:
            norm = torch.empty((), dtype=torch.float64, device=self._device)
        size = sharded.set(
            *step.control, step.bound, step.measures, 0 if norm is None else norm.data_ptr()
        )
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        label = _label(self._tables, step, shards)
        try:
            sharded.run(side._core, self._memory.data_ptr(), side.device.index, self.stream, label)
        except PycommError:  # it is not known how far other ranks have come
            shards.guard.step_failed()
            raise
        current = torch.cuda.current_stream(self._device)
        shards.guard.note_enqueued(current.record_event())
        return norm


def shard_executor(
    device: torch.device, tables: list[Table], shards: Shards, last: object
) -> OnCpuShards | OnCudaShards:
    """The executor for these tables; it reuses `last`, from the last step, if possible.

    Raises:
        RuntimeError: the current stream is being captured.
    """
    if shards.all_gather is not None:
        return OnSpanningShards(tables, shards, shards.all_gather)
    if device.type == "cpu":
        return OnCpuShards(tables, shards)
    if is_capturing(device):
        raise RuntimeError("a step of a model with shard= cannot be captured in a CUDA graph")
    stream = torch.cuda.current_stream(device).cuda_stream
    if not (isinstance(last, OnCudaShards) and (last.stream, last.shards) == (stream, shards)):
        last = OnCudaShards(device, stream, shards)
    last.hold(tables)
    return last


def _label(tables: Sequence[Table], step: Step, shards: Shards) -> str:
    """A text that ranks compare, for messages; the extension adds a hash of the rest.

    It has a checksum of gradients that the program has assigned. These gradients must be the same
    on all ranks, because each rank steps its part with its own.
    """
    pairs = zip(step.params, step.grads, strict=True)
    assigned = [grad for param, grad in pairs if shards.is_assigned(param)]
    told = (
        f"assigned gradients {tensor_checksum(assigned):08x}, must be averages, "
        if assigned
        else ""
    )
    rates = "/".join(_rate_in_words(group["lr"]) for group, _ in tables) or "none"
    count = sum(len(words) for _, words in tables) // _C.shard_words
    scale, found, _ = step.control
    return (
        f"{told}lr={rates}, max_norm={step.max_norm}, {count} gradients, scaled={scale != 0}, "
        f"found_inf={'sought' if step.sets_found else 'given' if found else 'no'}"
    )


def _rate_in_words(lr: float | torch.Tensor) -> str:
    return "on the device" if rate_on_device(lr) is not None else f"{float(lr):g}"
