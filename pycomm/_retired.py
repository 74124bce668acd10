"""Names and options that pycomm has no more, and what replaces each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_OF_STATE = (
    "give it to the state, as in state=pycomm.hooks.Int8State(model.named_parameters(), ...)"
)
_OF_SHARDING = 'give it to the sharding, as in shard=pycomm.Sharding("optimizer", ...)'

# By the module or function, and the name; or by an option with a value.
_RETIRED = {
    ("pycomm", "suggest_batches"): (
        "give each rank samples in proportion to those that it had over stats.ranks[rank].own"
    ),
    ("pycomm", "plot_step"): "open the file that pycomm.trace writes in https://ui.perfetto.dev",
    (
        "pycomm",
        "compressed_ops",
    ): "import pycomm registers the operators, and pycomm.ops lists them",
    ("init", 'transport="process_group"'): (
        'CUDA tensors take NCCL with "auto", and CPU tensors take Gloo in any case'
    ),
    ("DataParallel", "overlap_params"): (
        "leave it out, a step waits until parameters have arrived from other nodes"
    ),
    ("DataParallel", "local_sgd"): "give the LocalSGDState as state",
    ("DataParallel", "exclude"): _OF_STATE,
    ("DataParallel", "feedback"): _OF_STATE,
    ("DataParallel", "warmup_steps"): _OF_STATE,
    ("DataParallel", "replicas"): _OF_SHARDING,
    ("DataParallel", "publish"): _OF_SHARDING,
    ("DataParallel", "shard_group"): "give it as group of shard=pycomm.Sharding(...)",
}


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module does not have, with the replacement if it had."""
    message = f"module {module!r} has no attribute {name!r}"
    if replacement := _RETIRED.get((module, name)):
        message += f" any more: {replacement}"
    return AttributeError(message, name=name, obj=sys.modules[module])


def refuse_retired(where: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse retired options and values; the TypeError names the replacement."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for option, value in kwargs.items():
                for name in (option, f'{option}="{value}"' if isinstance(value, str) else ""):
                    if replacement := _RETIRED.get((where, name)):
                        raise TypeError(f"{where}() has no {name} any more: {replacement}")
            return function(*args, **kwargs)

        return call

    return decorate
