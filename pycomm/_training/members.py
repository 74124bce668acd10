"""The parameters that a wrapper averages, and checks that they are still its own.

They are those that require gradients when it is made. One that is frozen later stays: its gradient
counts as zeros, as if the model did not use it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from pycomm._training.parameters import common_parameters


class Members:
    """The parameters of a wrapper.

    A parameter belongs to the wrapper that was made last. An older wrapper must not average the
    same gradient, and raises an error.

    Args:
        module: the wrapped module.
        parameters: the parameters.
        arrived: called with a parameter whose gradient is ready, as long as it belongs here.
    """

    _module: nn.Module | None

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        self._names: dict[int, str] = {}
        self._lost: str | None = None
        chosen = set(map(id, parameters))
        for name, parameter in module.named_parameters():
            if id(parameter) in chosen:
                self._names[id(parameter)] = name
                self._claim(parameter, arrived)
        self._look(module)
        self._module = None  # so that the first forward checks

    def check(self, module: nn.Module) -> None:
        """Raises ValueError if other parameters of the module would get gradients."""
        self.check_owned()
        same = module is self._module and list(map(id, self._parts())) == self._ids
        if same and not any(parameter.requires_grad for parameter in self._frozen):
            return
        for name, parameter in common_parameters(module):
            gets_gradients = parameter.requires_grad and parameter.is_leaf
            if gets_gradients and id(parameter) not in self._names:
                raise ValueError(
                    f"module must keep the parameters that it was wrapped with, but {name!r} is "
                    "new, or began to require grad since: wrap it anew"
                )
        self._look(module)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of one of the parameters."""
        return self._names[id(parameter)]

    def check_owned(self) -> None:
        """Raises ValueError if a later wrapper has taken one of the parameters."""
        if self._lost is not None:
            raise ValueError(
                f"module must not share its parameter {self._lost!r} with a pycomm.DataParallel "
                "that was made later and averages it now: use that one, or wrap one module that "
                "holds both"
            )

    def _look(self, module: nn.Module) -> None:
        """Records the modules and parameters, so that a change is detected quickly."""
        self._module = module
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._registries = [d for m in module.modules() for d in (m._parameters, m._modules)]
        self._held = list(self._parts())  # kept alive, so that their ids stay theirs
        self._ids = list(map(id, self._held))

    def _parts(self) -> Iterable[object]:
        """All modules and parameters in the module."""
        return itertools.chain.from_iterable(registry.values() for registry in self._registries)

    def _claim(self, parameter: torch.Tensor, arrived: Callable[[torch.Tensor], None]) -> None:
        before: _Claim | None = _claims.get(parameter)  # type: ignore[no-untyped-call]
        if before is not None:
            before.hook.remove()
            if (owner := before.owner()) is not None:
                owner._lost = owner._lost or owner._names[id(parameter)]
        frozen = not parameter.requires_grad
        parameter.requires_grad_()  # else torch takes no hook
        hook = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(not frozen)
        _claims[parameter] = _Claim(weakref.ref(self), hook)


class _Claim(NamedTuple):
    """The owner of a parameter, and the hook that calls it."""

    owner: weakref.ref[Members]
    hook: RemovableHandle


_claims: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # no value refers to a parameter
