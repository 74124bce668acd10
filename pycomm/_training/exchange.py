"""One bucket's exchange: what is called for its parameters.

All of a bucket's operations are handed over in one call, and the group's worker (or on CUDA a
stream of its own) runs them while backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pycomm import _C
from pycomm._inputs.dtypes import ALGORITHMS, COLLECTIVES, OPS
from pycomm._runtime.staging import StandIn, fetch
from pycomm.collectives import Work

if TYPE_CHECKING:
    from pycomm.group import Group


@dataclass(frozen=True)
class Part:
    """One operation: an average in place.

    Attributes:
        call: the operation.
        codec: of the compression; None sends gradients as they are.
        tensor: the gradients.
        kept: what is read and written beside them, by name.
        wire_bytes: that this rank reads from its peers, or receives from other nodes, at most.
    """

    call: _C.Call
    codec: _C.Codec | None
    tensor: torch.Tensor
    kept: dict[str, torch.Tensor]
    wire_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that must live until it has run."""
        return self.tensor, *self.kept.values()


class BucketExchange:
    """A bucket's operations, to be run at every step.

    Args:
        parts: in their order.
        stand_in: for the bucket, where the group stages.

    Attributes:
        wire_bytes: of all parts.
        stand_in: for the bucket, where the group stages.
    """

    def __init__(self, parts: Sequence[Part], stand_in: StandIn | None) -> None:
        self._parts = parts
        self.stand_in = stand_in
        self.wire_bytes = sum(part.wire_bytes for part in parts)

    def __len__(self) -> int:
        return len(self._parts)

    @cached_property
    def _core(self) -> _C.Exchange:
        return _C.Exchange([part.call for part in self._parts])

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for part in self._parts for tensor in part.tensors)

    def submit(self, step: int, group: Group) -> Work:
        """Hands it to the group's worker."""
        if self.stand_in is None:
            return Work(self._core.submit(group._core, step), self._tensors)
        fetch(self.stand_in)
        return Work(self._core.submit(group._core, step), self._tensors, self.stand_in.put_back)

    def enqueue(self, step: int, group: Group, device: torch.device) -> None:
        """Enqueues it on the current stream."""
        side, auto = group._cuda_side(device), ALGORITHMS["auto"]
        for part in self._parts:
            x = part.tensor
            if part.codec is None:
                side.run(COLLECTIVES["all_reduce"], auto, OPS["avg"], 0, x.numel(), x, x)
            else:
                part.call.set_step(step)
                side.run_compressed(part.call, part.codec, x.numel(), part.tensors, None)

    def give_back(self) -> None:
        """Adds the means to this rank's residuals, after an exchange whose result is dropped."""
        for part in self._parts:
            residual, scale = part.kept.get("residual"), part.kept.get("scale")
            # With an overflow there may be no number to add, and residuals were left alone.
            if residual is not None and bool(part.tensor.isfinite().all()):
                residual.add_(part.tensor if scale is None else part.tensor.float() / scale)


def dense_wire_bytes(nbytes: int, group: Group) -> int:
    """Bytes that a rank reads from its peers in an uncompressed two-shot all-reduce.

    If the group spans nodes, what the carrier of a stripe receives from other nodes.
    """
    ranks, stripes = parties(group)
    return 2 * (ranks - 1) * nbytes // ranks // stripes


def parties(group: Group) -> tuple[int, int]:
    """How many take part in this rank's exchange, and how many such exchanges share the work."""
    if not group.stripes:
        return group.size, 1
    node = next(ranks for ranks in group.nodes if group.rank in ranks)
    carries = node.index(group.rank) < group.stripes
    return (len(group.nodes), group.stripes) if carries else (1, 1)
