"""Parameters whose new values are on their way: whatever uses one of them waits for it.

A pending parameter is an instance of a subclass of its class, so that torch calls the subclass's
``__torch_function__`` for every operation and attribute. This waits for the values, makes the
parameter an ordinary one again, and repeats the call. So nobody needs to know where a module uses
its parameters.

Extensions in C++, scripted and compiled modules do not call it. So as long as there are pending
parameters, every module also waits for its own before its forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from pycomm._runtime.torch_private import call_itself, is_compiled, unwrapped


class Arrivals(Protocol):
    """Knows when values arrive."""

    def arrive(self, number: int) -> None:
        """Waits for these values, and settles their parameters."""


_T: Any = torch.Tensor
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "names", "nbytes", "itemsize", "_version"),
    *("grad", "grad_dtype", "grad_fn", "requires_grad", "is_leaf"),
    *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "__hash__"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)
# What needs no values, as torch calls it.
_HARMLESS = {
    *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS),
    *(_T.grad.__set__, _T.grad.__delete__, _T._backward_hooks.__set__),
}


class _Arrival:
    """When a parameter's values arrive; the hook of all modules lasts as long as any of these."""

    def __init__(self, arrivals: Arrivals, number: int) -> None:
        self._arrivals, self._number = arrivals, number
        _count(1)
        weakref.finalize(self, _count, -1).atexit = False

    def wait(self) -> None:
        """Waits for the values."""
        self._arrivals.arrive(self._number)


class _Pending(nn.Parameter):
    """A parameter that waits for its values."""

    arrival: _Arrival

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """For those who make a parameter of the same type as another one."""
        return nn.Parameter(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for(self)
        return nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            return call_itself(func, args, kwargs)
        for parameter in _pending_in((args, kwargs)):
            _wait_for(parameter)
        return func(*args, **kwargs)


def _pending_in(values: object) -> Iterator[_Pending]:
    """The pending parameters among arguments."""
    if type(values) is _Pending:
        yield values
    elif isinstance(values, dict):
        yield from _pending_in(tuple(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _pending_in(value)


def _wait_for(parameter: _Pending) -> None:
    """Waits for a parameter's values, unless another thread has seen them arrive by now."""
    arrival: _Arrival | None = vars(parameter).get("arrival")
    if arrival is not None:
        arrival.wait()


def expect(parameter: torch.Tensor, arrivals: Arrivals, number: int) -> bool:
    """Makes a parameter pending until ``arrivals.arrive(number)`` settles it.

    Returns:
        False if it cannot be pending because it is of a class of its own.
    """
    if type(parameter) is not nn.Parameter:
        return False
    parameter.__class__ = _Pending
    parameter.arrival = _Arrival(arrivals, number)  # type: ignore[attr-defined]
    return True


def settle(parameter: torch.Tensor) -> None:
    """Makes a parameter an ordinary one again."""
    if type(parameter) is _Pending:
        del parameter.arrival
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


_lock = threading.RLock()  # a garbage collection may come while it is held
_arrivals = 0  # the number of arrivals
_hook: RemovableHandle | None = None  # of all modules, while there are any


def _count(change: int) -> None:
    global _arrivals, _hook
    with _lock:
        _arrivals += change
        if _arrivals and _hook is None:
            _hook = register_module_forward_pre_hook(_wait_in_forward)
        elif not _arrivals and _hook is not None:
            _hook.remove()
            _hook = None


def _wait_in_forward(module: nn.Module, _inputs: object) -> None:
    members = module.parameters() if is_compiled(module) else module._parameters.values()
    for member in members:
        # torch.func may have wrapped it, and dynamo cannot trace how to unwrap it.
        parameter = unwrapped(member) if type(member) is torch.Tensor else member
        if type(parameter) is _Pending:
            _wait_for(parameter)
