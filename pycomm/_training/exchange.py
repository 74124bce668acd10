"""One bucket's exchange: the operations for its parameters.

All operations of a bucket are handed over in one call. The group's worker (on CUDA, a separate
stream) runs them while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._runtime.staging import StandIn, fetch
from pycomm._spanning.between import Between
from pycomm._spanning.call import CodedCall
from pycomm._spanning.coded import all_reduce
from pycomm._spanning.collectives import Exchange
from pycomm._work import Work

if TYPE_CHECKING:
    from pycomm.group import Group


StepFlow = Callable[[Between, int], object]  # runs an operation over NCCL at a step


@dataclass(frozen=True)
class Part:
    """One operation: an average in place.

    Attributes:
        call: the operation; or, if it goes over NCCL between nodes, what runs it at a step.
        tensor: the gradients.
        kept: other tensors that the operation reads and writes, by name.
        wire_bytes: the most bytes that this rank reads from other ranks, or receives from other
            nodes.
    """

    call: _C.Call | StepFlow
    tensor: torch.Tensor
    kept: dict[str, torch.Tensor]
    wire_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that must stay alive until the operation has run."""
        return self.tensor, *self.kept.values()


class BucketExchange:
    """A bucket's operations, to be run at every step.

    Args:
        parts: the operations, in their order.
        stand_in: host memory for the bucket, if the group exchanges through it.

    Attributes:
        wire_bytes: the sum over all parts.
        stand_in: host memory for the bucket, if the group exchanges through it.
    """

    def __init__(self, parts: Sequence[Part], stand_in: StandIn | None) -> None:
        self._parts = parts
        self.stand_in = stand_in
        self.wire_bytes = sum(part.wire_bytes for part in parts)

    def __len__(self) -> int:
        return len(self._parts)

    @cached_property
    def _calls(self) -> list[_C.Call]:
        calls = [part.call for part in self._parts if isinstance(part.call, _C.Call)]
        assert len(calls) == len(self._parts)
        return calls

    @cached_property
    def _core(self) -> _C.Exchange:
        return _C.Exchange(self._calls)

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for part in self._parts for tensor in part.tensors)

    def submit(self, step: int, group: Group) -> Work:
        """Hands the operations to the group's worker."""
        if self.stand_in is None:
            return Work(self._core.submit(group._core, step), self._tensors)
        fetch(self.stand_in)
        return Work(self._core.submit(group._core, step), self._tensors, self.stand_in.put_back)

    def enqueue(self, step: int, group: Group, device: torch.device) -> None:
        """Enqueues the operations on the current stream."""
        if (span := group._span) is not None:
            span.enqueue(
                device, lambda: self._run_flows(Between(span, device), step), self._tensors
            )
            return
        for call in self._calls:
            call.set_step(step)
        group._cuda_side(device).run_bucket(self._calls, self._tensors)

    def _run_flows(self, between: Between, step: int) -> None:
        for part in self._parts:
            assert not isinstance(part.call, _C.Call)
            part.call(between, step)

    def give_back(self) -> None:
        """Adds the means to this rank's residuals, after an exchange whose result is dropped."""
        for part in self._parts:
            residual, scale = part.kept.get("residual"), part.kept.get("scale")
            # After an overflow the mean may not be finite, and residuals were not changed.
            if residual is not None and bool(part.tensor.isfinite().all()):
                residual.add_(part.tensor if scale is None else part.tensor.float() / scale)


def spanning_mean(tensor: torch.Tensor, between: Between, _: int) -> None:
    """Averages over NCCL; for :attr:`Part.call`."""
    Exchange(between, tensor, tensor, "avg", 0).all_reduce()


def spanning_coded_mean(call: CodedCall, between: Between, step: int) -> None:
    """Averages compressed over NCCL; for :attr:`Part.call`."""
    all_reduce(between, False, replace(call, step=step))


def dense_wire_bytes(nbytes: int, group: Group) -> int:
    """Bytes that a rank reads from other ranks in an uncompressed two-shot all-reduce.

    If the group spans nodes, the bytes that the carrier of a stripe receives from other nodes.
    """
    ranks, stripes = parties(group)
    return 2 * (ranks - 1) * nbytes // ranks // stripes


def parties(group: Group) -> tuple[int, int]:
    """The number of parties in this rank's exchange, and of exchanges that share the work."""
    if not group.stripes:
        return group.size, 1
    node = next(ranks for ranks in group.nodes if group.rank in ranks)
    carries = node.index(group.rank) < group.stripes
    return (len(group.nodes), group.stripes) if carries else (1, 1)
