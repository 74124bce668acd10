"""The parameters that a wrapper averages, and whether they are still its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary


class Members:
    """The parameters of a module that get gradients, as they were when it was wrapped.

    A parameter belongs to the wrapper that was made last: it takes it from an older one, which must
    not average the same gradient and refuses to go on.

    Args:
        module: what is wrapped.
        arrived: called with a parameter that has got its gradient, as long as it belongs here.
    """

    def __init__(self, module: nn.Module, arrived: Callable[[torch.Tensor], None]) -> None:
        self._names: dict[int, str] = {}
        self._frozen: list[torch.Tensor] = []
        self._lost: str | None = None
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._names[id(parameter)] = name
                self._claim(parameter, arrived)
            else:
                self._frozen.append(parameter)

    def check(self) -> None:
        """Refuses to go on if the parameters are not what they were."""
        self.check_owned()
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ValueError(
                "module must not have parameters that began to require grad when it was wrapped "
                "already: wrap it anew"
            )

    def check_owned(self) -> None:
        """Refuses to go on if another wrapper has one of the parameters."""
        if self._lost is not None:
            raise ValueError(
                f"module must not share its parameter {self._lost!r} with a pycomm.DataParallel "
                "that was made later and averages it now: use that one, or wrap one module that "
                "holds both"
            )

    def _claim(self, parameter: torch.Tensor, arrived: Callable[[torch.Tensor], None]) -> None:
        before: _Claim | None = _claims.get(parameter)  # type: ignore[no-untyped-call]
        if before is not None:
            before.hook.remove()
            if (owner := before.owner()) is not None:
                owner._lost = owner._lost or owner._names[id(parameter)]
        hook = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        _claims[parameter] = _Claim(weakref.ref(self), hook)


class _Claim(NamedTuple):
    """Whose a parameter is, and what calls the owner."""

    owner: weakref.ref[Members]
    hook: RemovableHandle


_claims: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # no value holds a parameter
