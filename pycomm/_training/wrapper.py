"""A module around another module, with the other's names and checkpoints.

The wrapper shares the dictionaries that hold the module's parameters, buffers and children. So
``named_modules``, ``get_parameter``, ``torch.func.functional_call`` or ``torch.export`` find the
module's own names, also where the wrapper is a part of another module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

# The prefix of names in DistributedDataParallel's checkpoints.

_PREFIX = "module."


def without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The state dict with the module's own names, if all its names have DDP's prefix."""
    if not state_dict or not all(name.startswith(_PREFIX) for name in state_dict):
        return state_dict
    if not module.state_dict().keys().isdisjoint(state_dict):  # the module has a child `module`
        return state_dict
    plain = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        plain._metadata = state_dict._metadata.copy()  # type: ignore[attr-defined]
    consume_prefix_in_state_dict_if_present(plain, _PREFIX)
    return plain


def drop_prefix(state_dict: dict[str, Any], path: str, module: nn.Module) -> None:
    """Drops DDP's prefix after `path`, from the names of a module inside another module."""
    keys = [key for key in state_dict if key.startswith(path)]
    own = {key.removeprefix(path): state_dict.pop(key) for key in keys}
    for key, value in without_prefix(own, module).items():
        state_dict[path + key] = value


# The module around another module.

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class ModuleProxy(nn.Module):
    """A module around another module.

    Args:
        module: the wrapped module.

    Attributes:
        module: the wrapped module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_load_state_dict_post_hook(_call_post_hooks)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            # Not a child: the module's children are the wrapper's.
            vars(self).update({each: getattr(value, each) for each in _SHARED}, module=value)
        else:
            super().__setattr__(name, value)

    def _follow_module(self) -> None:
        """Shares dictionaries that the module has replaced, as nn.Sequential does in ``del``."""
        if any(vars(self)[each] is not getattr(self.module, each) for each in _SHARED):
            self.module = self.module

    @property
    def training(self) -> bool:
        """The module's mode."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):  # nn.Module sets the mode first
            self.module.training = mode

    def train(self, mode: bool = True) -> ModuleProxy:
        """Sets the mode of the module and its children."""
        self.module.train(mode)
        return self

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and all modules inside of the module, by the module's names."""
        self._follow_module()
        yield from super().named_modules(*args, **kwargs)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """The wrapper, the module, and all modules inside of it."""
        yield self
        yield from self.module.modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's children."""
        self._follow_module()
        return super().named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> ModuleProxy:
        """Calls a function with every child of the module and with the module."""
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> ModuleProxy:
        """For ``to()`` and the like. Modules such as nn.LSTM override it."""
        self.module._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``state_dict``."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a ``state_dict`` of the module, saved with or without DistributedDataParallel."""
        own = without_prefix(state_dict, self.module)
        return self.module.load_state_dict(own, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads the module's own tensors, when a module around the wrapper loads all its parts."""
        self._follow_module()
        drop_prefix(state_dict, prefix, self.module)
        self.module._load_from_state_dict(state_dict, prefix, *args)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint that a child `module` is in :attr:`_wrapped`."""
        return {"module": "_wrapped"}

    @property
    def _wrapped(self) -> nn.Module:
        return self.module

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying."""
        own = {name: value for name, value in vars(self).items() if name not in _SHARED}
        return {**own, "_compiled_call_impl": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.module = state["module"]


def _call_post_hooks(wrapper: ModuleProxy, incompatible_keys: Any) -> None:
    """Calls the module's own hooks, when a module around the wrapper loads all its parts."""
    for hook in wrapper.module._load_state_dict_post_hooks.values():
        hook(wrapper.module, incompatible_keys)
