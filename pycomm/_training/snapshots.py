"""Gradients as a backward or an exchange has left them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import TensorWeakRef


class Snapshot(NamedTuple):
    """A gradient with its count of writes and its address at a time."""

    gradient: TensorWeakRef
    version: int
    address: int

    def is_still(self, gradient: torch.Tensor) -> bool:
        """True if it is this gradient, and torch has not written to it or moved it since."""
        return (
            self.gradient() is gradient
            and self.version == gradient._version
            and self.address == gradient.data_ptr()
        )


def take_snapshots(parameters: Iterable[torch.Tensor]) -> dict[int, Snapshot]:
    """Snapshots of the gradients that are there, by the parameters' ids."""
    return {
        id(p): Snapshot(TensorWeakRef(p.grad), p.grad._version, p.grad.data_ptr())
        for p in parameters
        if p.grad is not None
    }
