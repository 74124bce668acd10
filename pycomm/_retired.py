"""Names and options that pycomm has no more, and what replaces each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# By the module or function, and the name.
_RETIRED = {
    ("pycomm", "suggest_batches"): (
        "give each rank samples in proportion to those that it had over stats.ranks[rank].own"
    ),
    ("pycomm", "plot_step"): "open the file that pycomm.trace writes in https://ui.perfetto.dev",
    ("DataParallel", "overlap_params"): (
        "leave it out, a step waits until parameters have arrived from other nodes"
    ),
}


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module does not have, with the replacement if it had."""
    message = f"module {module!r} has no attribute {name!r}"
    if replacement := _RETIRED.get((module, name)):
        message += f" any more: {replacement}"
    return AttributeError(message, name=name, obj=sys.modules[module])


def check_retired(where: str, options: Iterable[str]) -> None:
    """Raises TypeError with the replacement if an option of a function is retired.

    Args:
        where: the function's name.
        options: the names of given options; ``name=value`` if only a value is retired.
    """
    for option in options:
        replacement = _RETIRED.get((where, option))
        if replacement is not None:
            raise TypeError(f"{where}() has no {option} any more: {replacement}")


def refuse_retired(where: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function call :func:`check_retired` before it looks at its options."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_retired(where, kwargs)
            return function(*args, **kwargs)

        return call

    return decorate
