"""A compressed operation that spans nodes, and what ranks find out before they send anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pycomm import _C
from pycomm._inputs.dtypes import DTYPES, OPS
from pycomm._spanning.between import Between
from pycomm._spanning.collectives import Exchange
from pycomm.compression import Compression, TopK

# Such as all_reduce() on a call: whether a value was not finite; None if that is not asked for.
Flow = Callable[[Between, bool], torch.Tensor | None]


@dataclass(frozen=True)
class CodedCall:
    """A compressed all-reduce of flat tensors.

    Attributes:
        source: this rank's gradient.
        result: receives the sum or mean; may be the same tensor.
        compression: the compression.
        op: ``"sum"`` or ``"avg"``.
        step: the training step, for random bits.
        offset: the index of the first element in a larger whole.
        residual: what this rank has not sent yet, in fp32; or None.
        velocity: the same, for momentum correction.
        scale: the loss scale of the gradient; residual and velocity are unscaled. Or None.
        hold_unused: keep residuals if the gradient is zero on all ranks.
        residual_before: receives a copy of the old residual; or None.
        velocity_before: the same of the velocity.
        density_step: the step that a density depends on; by default `step`.
    """

    source: torch.Tensor
    result: torch.Tensor
    compression: Compression
    op: str
    step: int = 0
    offset: int = 0
    residual: torch.Tensor | None = None
    velocity: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    hold_unused: bool = False
    residual_before: torch.Tensor | None = None
    velocity_before: torch.Tensor | None = None
    density_step: int | None = None

    @property
    def codec(self) -> _C.Codec:
        """The codec of the whole tensor."""
        return self.compression.codec(self.source.numel(), self.source.dtype, self._density_step)

    @property
    def k(self) -> int:
        """The number of elements that top-k sends of the whole tensor; otherwise 0."""
        if not isinstance(self.compression, TopK):
            return 0
        return self.compression.count(self.source.numel(), self._density_step)

    @property
    def _density_step(self) -> int:
        return self.step if self.density_step is None else self.density_step

    def largest(self, between: Between) -> float:
        """The largest contribution of a node with which all sums are finite."""
        dtype, op = DTYPES[self.source.dtype], OPS[self.op]
        return _C.largest_safe(self.codec, dtype, op, between.nodes, between.world)

    def divisor(self, between: Between) -> int:
        """What sums are divided by."""
        return between.world if self.op == "avg" else 1


@dataclass(frozen=True)
class Found:
    """What ranks have found out about all contributions before they send them.

    The flags are on the device, and the host does not read them.

    Attributes:
        overflow: a sum might not be finite. Residuals stay as they are.
        unused: all gradients are zero. Nothing is sent, and residuals stay as they are. None if
            that makes no difference.
    """

    overflow: torch.Tensor
    unused: torch.Tensor | None

    @property
    def keeps(self) -> torch.Tensor:
        """True if residuals change."""
        stays = self.overflow if self.unused is None else self.overflow | self.unused
        return stays.logical_not()


def findings(
    between: Between, call: CodedCall, value: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Two flags of a contribution: an overflow, and a gradient that is used."""
    flags = torch.zeros(2, dtype=torch.uint8, device=value.device)
    if value.numel() and call.residual is not None:
        flags[0] = (value.abs().amax() <= call.largest(between)).logical_not()  # also for NaNs
        flags[1] = gradient.any() if call.hold_unused else 1
    return flags


def agree(between: Between, call: CodedCall, flags: torch.Tensor | None) -> Found | None:
    """What all ranks have found; None without residuals."""
    if call.residual is None:
        return None
    if flags is None:
        flags = torch.zeros(2, dtype=torch.uint8, device=call.source.device)
    Exchange(between, flags, flags, "bor", 0).all_reduce()
    overflow, used = flags.bool()
    return Found(overflow, used.logical_not() if call.hold_unused else None)


def sendable(
    between: Between, call: CodedCall, value: torch.Tensor, found: Found | None
) -> torch.Tensor:
    """A contribution that is limited after an overflow, and zero if it is not used."""
    if found is None:
        return value
    largest = call.largest(between)
    limited = value.masked_fill(value > largest, math.inf)
    limited.masked_fill_(value < -largest, -math.inf)
    value = torch.where(found.overflow, limited, value)
    if found.unused is not None:
        value = torch.where(found.unused, torch.zeros_like(value), value)
    return value


def divided(sums: torch.Tensor, divisor: int) -> torch.Tensor:
    """Sums as means."""
    if divisor == 1:
        return sums
    # A tensor: by a number, CUDA would multiply with the inverse.
    return sums / torch.full((), divisor, dtype=torch.float32, device=sums.device)


def nonfinite(result: torch.Tensor) -> torch.Tensor:
    """True if a value is not finite."""
    return result.isfinite().all().logical_not()
