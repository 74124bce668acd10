"""The prefix of names in DistributedDataParallel's checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

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
    """Drops DDP's prefix from the names of a module that is part of another, after its path."""
    keys = [key for key in state_dict if key.startswith(path)]
    own = {key.removeprefix(path): state_dict.pop(key) for key in keys}
    for key, value in without_prefix(own, module).items():
        state_dict[path + key] = value
