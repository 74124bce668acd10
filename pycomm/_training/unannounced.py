"""Gradients of backwards that no forward of a wrapper has announced.

``wrapper.module(x).sum().backward()`` adds to this rank's gradients only, as in
DistributedDataParallel. A program that wants to look at gradients does so, and zeroes them. The
next exchange averages what is left. A step before that would give each rank other parameters, so
it raises an error.

Where ranks divide the optimizer's states, the same goes for backwards inside of no_sync(): each
rank would update its share with its own gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
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

    def counts(self, gradient: torch.Tensor | None) -> bool:
        """True unless it has been replaced or zeroed; clipping, for example, leaves it."""
        if gradient is None or self.gradient() is not gradient:
            return False
        return self.is_still(gradient) or bool(gradient.any())


_ELSEWHERE = (
    "a backward has added to it that did not begin in the outputs of the wrapper's forward, or "
    "whose forward was inside of no_sync(). Call the wrapper instead of its module, or zero the "
    "gradients; to step on each rank's own, run the backward, too, inside of no_sync()"
)
_NOT_SENT = (
    "the last backward was inside of no_sync(), and with shard= no rank can step on its own "
    "gradients: run the last backward before each step outside of no_sync(), call "
    "reduce_gradients() of the wrapper, or zero the gradients"
)

# Snapshots by parameter, and why they are no averages.
_noted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()  # as ranks may be threads
_watch: RemovableHandle | None = None  # of optimizers, while there are any


def note(parameter: torch.Tensor, inside_no_sync: bool = False) -> None:
    """Records that the parameter's gradient is not the ranks' average any more."""
    global _watch
    if parameter.grad is None:  # another hook has dropped it
        return
    with _lock:
        _noted[parameter] = Snapshot.of(parameter.grad), _NOT_SENT if inside_no_sync else _ELSEWHERE
        if _watch is None:
            _watch = register_optimizer_step_pre_hook(check)


def forget(parameters: Iterable[torch.Tensor]) -> None:
    """Records an exchange of the parameters' gradients."""
    global _watch
    if _watch is None:
        return
    with _lock:
        for parameter in parameters:
            _noted.pop(parameter, None)  # type: ignore[no-untyped-call]
        if _watch is not None and not len(_noted):
            _watch.remove()
            _watch = None


def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises RuntimeError if a gradient of the optimizer's parameters is not the ranks' average."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            noted: tuple[Snapshot, str] | None = _noted.get(parameter)  # type: ignore[no-untyped-call]
            if noted is not None and noted[0].counts(parameter.grad):
                raise RuntimeError(
                    f"gradient of a parameter of shape {tuple(parameter.shape)} is not the ranks' "
                    f"average: {noted[1]}"
                )
