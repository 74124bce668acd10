"""The short way of collectives: functions in C run the usual calls (csrc/bind/fast_call.h)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from pycomm import _C, _init
from pycomm._inputs import ALGORITHMS, OPS, TORCH_OPS, on_stream_of_arrays
from pycomm._runtime.c10d import tensor_reader
from pycomm._runtime.log import DEBUG
from pycomm._work import Work
from pycomm.group import Group

_Function = TypeVar("_Function", bound=Callable[..., Any])

_C.set_up_short_way(
    Group,
    vars(_init),
    OPS | {torchs: OPS[name] for name, torchs in TORCH_OPS.items()},
    ALGORITHMS,
    Work,
)
_C.set_tensor_reader(tensor_reader)


def short_way_first(function: _Function) -> _Function:
    """A function in C that runs the usual calls of `function` itself, and `function` for the rest.

    For `inspect` and `help`, it has the signature of `function`, without annotations.
    """
    function = on_stream_of_arrays(function)
    if DEBUG:  # calls are logged
        return function
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = signature.replace(parameters=bare, return_annotation=signature.empty)
    doc = f"{function.__name__}{text}\n--\n\n{function.__doc__}"
    return _C.short_way_first(function, doc)
