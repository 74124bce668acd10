"""Guards steps against gradients that no exchange has averaged, and parameters that differ."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from pycomm._training.agree import differ
from pycomm._training.parameters import ParamRecord, known_of, record_of
from pycomm.errors import PycommError

if TYPE_CHECKING:
    from pycomm.group import Group

# Gradients of backwards that no forward of a wrapper has announced.
#
# ``wrapper.module(x).sum().backward()`` adds to this rank's gradients only, as in
# DistributedDataParallel. A program may look at these gradients and zero them. Otherwise the next
# exchange averages them. A step before that would give each rank other parameters, so it raises an
# error.
#
# If ranks divide the optimizer's states, the same is true of backwards inside of no_sync(): each
# rank would update its share with its own gradients.


class Snapshot(NamedTuple):
    """A gradient with its version and its address."""

    gradient: TensorWeakRef
    version: int
    address: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Snapshot:
        """Takes a snapshot of a gradient."""
        return cls(TensorWeakRef(gradient), gradient._version, gradient.data_ptr())

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """True if it is the same tensor, and torch has not written to it or moved it since."""
        return (
            gradient is not None
            and self.gradient() is gradient
            and self.version == gradient._version
            and self.address == gradient.data_ptr()
        )

    def counts(self, gradient: torch.Tensor | None) -> bool:
        """True unless the gradient has been replaced or zeroed; a clipped one still counts."""
        if gradient is None or self.gradient() is not gradient:
            return False
        return self.is_still(gradient) or bool(gradient.any())


_ELSEWHERE = (
    "a backward has added to the gradient without an exchange, because it did not begin in the "
    "outputs of the wrapper's forward, or because the forward was inside of no_sync(). Call the "
    "wrapper instead of its module, or reduce_gradients() of the wrapper before the step, or zero "
    "the gradients; to step on each rank's own gradients, run the backward inside of no_sync(), too"
)
_NOT_SENT = (
    "the last backward was inside of no_sync(), and with shard= no rank can step on its own "
    "gradients: run the last backward before each step outside of no_sync(), call "
    "reduce_gradients() of the wrapper, or zero the gradients"
)

_noted: weakref.WeakSet[ParamRecord] = weakref.WeakSet()  # with a local gradient
_lock = threading.Lock()  # as ranks may be threads
_watch: tuple[RemovableHandle, ...] = ()  # checks steps, while there are any


def note(parameter: torch.Tensor, inside_no_sync: bool = False) -> None:
    """Records that the parameter's gradient is no longer the ranks' average."""
    global _watch
    if parameter.grad is None:  # another hook has dropped it
        return
    with _lock:
        why = _NOT_SENT if inside_no_sync else _ELSEWHERE
        record = record_of(parameter)
        record.local_gradient = Snapshot.of(parameter.grad), why
        _noted.add(record)
        if not _watch:  # inside of a closure, only the second one comes in time for its step
            before = optimizer.register_optimizer_step_pre_hook(_before_step)
            _watch = before, optimizer.register_optimizer_step_post_hook(_after_step)


def forget(parameters: Iterable[torch.Tensor]) -> None:
    """Records an exchange of the parameters' gradients."""
    global _watch
    if not _watch:
        return
    with _lock:
        for parameter in parameters:
            if (record := known_of(parameter)).local_gradient is not None:
                record.local_gradient = None
                _noted.discard(record)
        if not len(_noted):
            for handle in _watch:
                handle.remove()
            _watch = ()


def _before_step(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Checks the gradients of a step: of ``step(closure)`` those that the closure leaves.

    Returns:
        None, or the step's arguments with a closure that checks.
    """
    named = kwargs.get("closure")
    closure = named if len(args) < 2 or named is not None else args[1]
    if not callable(closure):  # None, or another argument of an optimizer of the program
        check(stepped)
        return None

    def checked() -> Any:
        loss = closure()
        check(stepped)
        return loss

    if named is not None:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs


def _after_step(stepped: torch.optim.Optimizer, *_: Any) -> None:
    check(stepped, ". The step has been taken, so parameters differ between ranks")


def check(stepped: torch.optim.Optimizer, then: str = "") -> None:
    """Raises RuntimeError if a gradient of the optimizer's parameters is not the ranks' average."""
    for group in stepped.param_groups:
        for parameter in group["params"]:
            noted = known_of(parameter).local_gradient
            if noted is not None and noted[0].counts(parameter.grad):
                raise RuntimeError(
                    f"gradient of a parameter of shape {tuple(parameter.shape)} is not the ranks' "
                    f"average: {noted[1]}{then}"
                )


# Finds parameters that differ between ranks because not all have taken the same step.


class StepGuard:
    """Watches the parameters of a sharded wrapper between steps.

    Args:
        parameters: the parameters.
        group: the ranks that must have equal parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: Group) -> None:
        self._parameters = list(map(TensorWeakRef, parameters))
        self._group = group
        self._half_new: list[tuple[TensorWeakRef, int]] = []  # with versions
        # Versions of parameters after a backward whose gradients wait for a step.
        self.awaiting: dict[int, int] = {}
        self._enqueued: torch.cuda.Event | None = None  # after a step that may not have run yet

    def note_enqueued(self, event: torch.cuda.Event) -> None:
        """Records a step on CUDA; `event` comes after it on its stream."""
        self._enqueued = event

    def step_failed(self) -> None:
        """Records that a failed step may have changed some of the parameters."""
        alive = [(ref, p) for ref in self._parameters if (p := ref()) is not None]
        self._half_new = [(ref, parameter._version) for ref, parameter in alive]

    def step_undone(self) -> None:
        """Records that all parameters have their values from before the failed step."""
        self._half_new = []

    def check(self) -> None:
        """Raises RuntimeError after a failed step, until all parameters have been written.

        Also raises the error of a step on CUDA that has failed since.
        """
        self._look_at_enqueued()
        if self.is_broken():
            raise RuntimeError(
                "parameters are partly those of a step that has failed: load a checkpoint of the "
                "model and the optimizer; with replicas=2, regroup() undoes the step"
            )

    def is_broken(self) -> bool:
        """True after a failed step, until all parameters have been written."""
        self._half_new = [
            (ref, version)
            for ref, version in self._half_new
            if (parameter := ref()) is not None and parameter._version == version
        ]
        return bool(self._half_new)

    def _look_at_enqueued(self) -> None:
        if self._enqueued is None:
            return
        has_run = self._enqueued.query()  # type: ignore[no-untyped-call]
        try:
            self._group.check()
        except PycommError:  # it is not known how far other ranks have come
            self._enqueued = None
            self.step_failed()
            raise
        if has_run:
            self._enqueued = None

    def await_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records parameters that only a step of a fused optimizer may change now."""
        self.awaiting = {id(p): p._version for p in parameters if p.grad is not None}

    def note_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Records a step of these parameters, or that their gradients have become averages."""
        for parameter in parameters:
            self.awaiting.pop(id(parameter), None)

    def sees_change(self) -> bool:
        """True if anything but a step has changed parameters of this rank."""
        alive = [parameter for ref in self._parameters if (parameter := ref()) is not None]
        return any(self.awaiting.get(id(p), p._version) != p._version for p in alive)

    def compare(self, buffers: Sequence[torch.Tensor], takes_nan: bool) -> None:
        """Compares the ranks' parameters; all ranks must call this.

        Args:
            buffers: the memory of all parameters.
            takes_nan: False refuses parameters with a NaN, too.

        Raises:
            RuntimeError: the parameters differ; on all ranks.
        """
        has_nan = not takes_nan and any(bool(buffer.isnan().any()) for buffer in buffers)
        if differ(buffers, self._group) or has_nan:
            raise RuntimeError(
                "parameters differ between ranks or are NaN, as after a step with gradients that "
                "are not whole: use an optimizer of pycomm.optim, or call reduce_gradients() of "
                "the wrapper before the step"
            )
