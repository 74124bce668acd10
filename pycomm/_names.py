"""Names of the package: imported at their first use, or retired, with what replaces each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Names and options that pycomm has no more.

_OF_STATE = (
    "give it to the state, as in state=pycomm.hooks.Int8State(model.named_parameters(), ...)"
)
_OF_SHARDING = 'give it to the sharding, as in shard=pycomm.Sharding("optimizer", ...)'

# By the module or function, and the name; or by an option with a value.
_RETIRED = {
    ("pycomm", "suggest_batches"): (
        "divide each rank's number of samples by stats.ranks[rank].own, and share the samples out "
        "in these proportions"
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
    (
        "DataParallel",
        "shard_group",
    ): 'give it to the sharding, as in shard=pycomm.Sharding("optimizer", group=...)',
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


# Names that are imported at their first use.


def lazy_names(
    module: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a module.

    The first use of a name sets it in the module, so that later ones cost nothing. Several threads
    may be the first: they all find the same object. The module has its names in ``__all__``.

    Args:
        module: the module's name. If it is a package, its modules are attributes, too.
        homes: by another module's name, the names that it defines.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    variables = vars(sys.modules[module])

    def find(name: str) -> object:
        if name in home_of:
            found = getattr(import_module(home_of[name]), name)
        elif "__path__" in variables and name.isidentifier() and find_spec(f"{module}.{name}"):
            found = import_module(f"{module}.{name}")
        else:
            raise missing_attribute(module, name)
        variables[name] = found
        return found

    return find, lambda: sorted({*variables, *variables["__all__"]})
