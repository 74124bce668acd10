"""Gradients of backwards that no forward of a wrapper has announced.

``wrapper.module(x).sum().backward()`` adds to this rank's gradients only, as in
DistributedDataParallel. Whoever does so to look at gradients zeroes them. The next exchange
averages what is left. A step before that would move each rank's parameters elsewhere, so it
raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary


class Snapshot(NamedTuple):
    """A gradient with its count of writes and its address."""

    gradient: TensorWeakRef
    version: int
    address: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Snapshot:
        """Takes one."""
        return cls(TensorWeakRef(gradient), gradient._version, gradient.data_ptr())

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """True if it is this gradient, and torch has not written to it or moved it since."""
        return (
            gradient is not None
            and self.gradient() is gradient
            and self.version == gradient._version
            and self.address == gradient.data_ptr()
        )


_noted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # snapshots by parameter
_watches_optimizers = False


def note(parameter: torch.Tensor) -> None:
    """Records that the parameter's gradient is not the ranks' average any more."""
    global _watches_optimizers
    assert parameter.grad is not None
    _noted[parameter] = Snapshot.of(parameter.grad)
    if not _watches_optimizers:
        _watches_optimizers = True
        register_optimizer_step_pre_hook(_check)


def forget(parameters: Iterable[torch.Tensor]) -> None:
    """Records an exchange of the parameters' gradients."""
    for parameter in parameters if len(_noted) else ():
        _noted.pop(parameter, None)  # type: ignore[no-untyped-call]


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not len(_noted):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            noted: Snapshot | None = _noted.get(parameter)  # type: ignore[no-untyped-call]
            if noted is not None and noted.is_still(parameter.grad):
                raise RuntimeError(
                    f"gradient of a parameter of shape {tuple(parameter.shape)} is not the ranks' "
                    "average: a backward that did not begin in a forward of the wrapper has added "
                    "to it. Call the wrapper instead of its module, or zero the gradients; to step "
                    "on each rank's own gradients, use no_sync()"
                )
