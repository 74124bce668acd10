"""The optimizers that change parameters between two exchanges of local SGD."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from pycomm._training.parameters import Parameters


class Watcher(Protocol):
    """An object that hears of steps."""

    def before_step(self, number: int) -> None:
        """Runs before each step of the optimizer with this number."""


class InnerOptimizers:
    """Optimizers of the same model.

    Args:
        given: an optimizer, or several. Wrappers of accelerate and Lightning count as what they
            wrap.

    Raises:
        TypeError: `given` is something else.
    """

    def __init__(self, given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
        several: Iterable[object] = given if isinstance(given, Iterable) else (given,)
        self._optimizers = [_unwrapped(each) for each in several]
        self._owner: dict[int, torch.optim.Optimizer] = {}  # by the parameter's id
        if not self._optimizers:
            raise TypeError("optimizer must be an optimizer or several, got none")

    def check(self, parameters: Parameters) -> None:
        """Checks that they change just these parameters, each of them one.

        Raises:
            ValueError: they do not.
        """
        owner: dict[int, torch.optim.Optimizer] = {}
        for optimizer in self._optimizers:
            for param in _params_of(optimizer):
                if id(param) not in parameters.entries and param.requires_grad:
                    raise ValueError(
                        "params must name every parameter that the optimizer changes; one of shape "
                        f"{tuple(param.shape)} is not among them"
                    )
                if id(param) in owner:
                    name = parameters[param].name
                    raise ValueError(f"optimizer must be one for each parameter, got two of {name}")
                owner[id(param)] = optimizer
        for param in parameters.tensors:
            if id(param) not in owner and param.requires_grad:
                raise ValueError(
                    f"optimizer must change all of params, but does not have "
                    f"{parameters[param].name}: pass all optimizers of the model as a list"
                )
        self._owner = owner

    def watch(self, watcher: Watcher) -> None:
        """Tells `watcher`, while it lives, before each step."""
        me = weakref.ref(watcher)
        for number, optimizer in enumerate(self._optimizers):
            optimizer.register_step_pre_hook(_teller(me, number))

    def weights_of(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter's weights at its optimizer's full precision; not a copy."""
        optimizer = self._of(param)
        if hasattr(optimizer, "full_weights"):
            weights: torch.Tensor = optimizer.full_weights(param)
            return weights
        return param.detach()

    def set_weights_of(self, param: torch.Tensor, weights: torch.Tensor) -> None:
        """Sets a parameter, and its optimizer's full-precision weights of it, to `weights`."""
        optimizer = self._of(param)
        if hasattr(optimizer, "set_full_weights"):
            optimizer.set_full_weights(param, weights)
        else:
            param.detach().copy_(weights)

    def _of(self, param: torch.Tensor) -> torch.optim.Optimizer:
        """The optimizer that changes a parameter; the first one if it is frozen."""
        return self._owner.get(id(param), self._optimizers[0])

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without ids, which differ for other objects."""
        return {**vars(self), "_owner": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._owner = {id(p): each for each in self._optimizers for p in _params_of(each)}


def _params_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _unwrapped(given: Any) -> torch.optim.Optimizer:
    optimizer = given
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {given!r}")
    return optimizer


def _teller(watcher: weakref.ref[Watcher], number: int) -> Callable[..., None]:
    def tell(*_: Any) -> None:
        if (alive := watcher()) is not None:
            alive.before_step(number)

    return tell
