"""pycomm.DataParallel with the options of its sharding and of its state side by side.

Tests vary them in one dict.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import pycomm

_STATE = ("exclude", "feedback", "warmup_steps")
_SHARDING = {"replicas": "replicas", "publish": "publish", "shard_group": "group"}


def data_parallel(module: nn.Module, **options: Any) -> pycomm.DataParallel:
    """Wraps a module.

    Args:
        module: the module.
        options: those of pycomm.DataParallel, pycomm.Sharding (its group is `shard_group`) and
            pycomm.hooks.CommState.
    """
    sharding = {_SHARDING[name]: options.pop(name) for name in _SHARDING if name in options}
    if sharding and options.get("shard") is not None:
        options["shard"] = pycomm.Sharding(options["shard"], **sharding)
    own = {name: options.pop(name) for name in _STATE if name in options}
    if own:
        own |= {n: options.pop(n) for n in ("group", "grad_scaler") if n in options}
        compression = options.pop("compression", None)
        options["state"] = pycomm.hooks.CommState(compression, module.named_parameters(), **own)
    return pycomm.DataParallel(module, **options)
