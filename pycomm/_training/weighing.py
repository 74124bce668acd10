"""Weights of ranks in a mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pycomm._work import Work
from pycomm.collectives import all_reduce

if TYPE_CHECKING:
    from pycomm.group import Group


class Weighing:
    """Exchanges the sum of all ranks' weights, and applies this rank's weight."""

    def __init__(self, weight: float, active: bool, group: Group) -> None:
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"weight must be finite and not negative, got {weight}")
        self._weight = float(weight)
        self._size = group.size
        self._sums = torch.tensor([self._weight, active], dtype=torch.float64, device="cpu")
        self._work: Work = all_reduce(self._sums, "sum", group=group, async_op=True)

    @property
    def is_zero(self) -> bool:
        """True if this rank does not count."""
        return self._weight == 0

    def active_ranks(self) -> int:
        """The number of ranks that still have batches."""
        self._work.wait()
        return int(self._sums[1])

    def scale(self, gradients: torch.Tensor) -> None:
        """Scales gradients so that the plain mean is weighted. Weight 0 makes any values zero."""
        self._work.wait()
        total = float(self._sums[0])
        if total == 0:
            raise ValueError("weight must be positive on some rank, got 0 on all")
        if self.is_zero:
            gradients.zero_()
        else:
            gradients.mul_(self._weight * self._size / total)
