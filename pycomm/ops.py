"""torch.ops.pycomm: the operations for torch.compile, opcheck, export and autograd.

They take CPU and CUDA tensors; on CUDA they are enqueued on the current stream. Each takes the name
of a group (``group.name``). These return a new contiguous tensor and have gradients
(docs/reference/gradients.md):

- ``all_reduce(tensor, op, algorithm, group) -> Tensor``
- ``reduce(tensor, dst, group) -> Tensor``: the sum on rank `dst`, zeros on other ranks
- ``reduce_scatter(input, op, group_size, group) -> Tensor``: rank r's part of the first dimension
- ``all_gather(input, group_size, group) -> Tensor``: joined along the first dimension
- ``all_to_all(input, group) -> Tensor``: block r of the first dimension goes to rank r
- ``broadcast(tensor, src, group) -> Tensor``

These write into contiguous tensors:

- ``all_reduce_(tensor, op, algorithm, group)``
- ``reduce_scatter_(output, input, op, group)``
- ``all_gather_(output, input, group)``
- ``broadcast_(tensor, src, group)``

These compress, and take a compression as text (:func:`pycomm.parse_compression`). `residual` and
`velocity` may be None; the operations that return a tensor have neither:

- ``compressed_all_reduce(tensor, compression, op, algorithm, step, offset, strict, group) ->
  Tensor``
- ``compressed_all_reduce_(tensor, compression, residual, velocity, op, algorithm, step, offset,
  strict, group)``
- ``compressed_reduce_scatter(input, compression, op, step, offset, strict, group_size, group) ->
  Tensor``: rank r's part of the first dimension
- ``compressed_reduce_scatter_(output, input, compression, residual, op, step, offset, strict,
  group)``
- ``encode(x, compression, step, offset) -> Tensor``
- ``decode(wire, compression, n, dtype) -> Tensor``

``group_size`` is ``group.size``. Gradients exist for the reductions ``"sum"`` and ``"avg"``. Other
reductions, and operations without a gradient, raise ValueError if a tensor requires grad, unless
grad mode is off. Errors have the classes of pycomm's functions, also in compiled programs.

The kernels are in csrc/bind/ops.cpp and pycomm/_kernels.py, the fake kernels and gradient formulas
here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from pycomm import _C  # noqa: F401 - registers the operations
from pycomm._inputs import check_no_gradient, has_tangent, needs_gradient
from pycomm._runtime.torch_private import after_autograd_keys

if TYPE_CHECKING:
    from collections.abc import Callable

_library = torch.library.Library("pycomm", "IMPL")
_ops = torch.ops.pycomm


def _kernel(name: str) -> Callable[..., Any]:
    """A kernel of pycomm/_kernels.py, which its first call imports."""

    def kernel(*arguments: Any) -> Any:
        return getattr(import_module("pycomm._kernels"), name)(*arguments)

    return kernel


def _nothing(*args: object) -> None:
    """The fake kernel of in-place operations, which change values only."""


def _same_shape(tensor: torch.Tensor, *args: object) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _part(whole: torch.Tensor, size: int) -> torch.Tensor:
    """A rank's part of the first dimension."""
    return whole.new_empty(whole.shape[0] // size, *whole.shape[1:])


@torch.library.register_fake("pycomm::reduce_scatter")
def _(input: torch.Tensor, op: str, group_size: int, group: str) -> torch.Tensor:  # noqa: A002, ARG001
    return _part(input, group_size)


@torch.library.register_fake("pycomm::all_gather")
def _(input: torch.Tensor, group_size: int, group: str) -> torch.Tensor:  # noqa: A002, ARG001
    return input.new_empty(input.shape[0] * group_size, *input.shape[1:])


def refuse_gradients(library: torch.library.Library, name: str) -> None:
    """Gives an operation an autograd kernel that raises an error if a tensor requires grad.

    Without it, autograd ignores the operation: the gradient would be None or, for in-place
    operations, that of the unchanged tensor. The kernel also tells autograd which tensors have
    changed.
    """
    operation = getattr(_ops, name).default
    arguments = operation._schema.arguments
    names = [(i, a.name) for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]

    def kernel(keys: torch.DispatchKeySet, *values: Any) -> Any:
        for i, argument in names:
            if values[i] is not None:
                check_no_gradient(argument, values[i])
        result = operation.redispatch(keys & after_autograd_keys, *values)
        increment_version([values[i] for i in written if values[i] is not None])
        return result

    library.impl(name, kernel, "Autograd", with_keyset=True)


def _differentiate(name: str, transpose: Callable[..., torch.Tensor]) -> None:
    """Gives an operation, which is linear in its tensor, the gradient `transpose`.

    `transpose` takes the gradient of the output and the operation's other arguments. It consists of
    operations that have gradients, so that gradients can be differentiated again.
    """
    operation = getattr(_ops, name).default
    argument, *others = (a.name for a in operation._schema.arguments)
    reduces = "op" in others  # then it comes first

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, keys: torch.DispatchKeySet, tensor: torch.Tensor, *constants: Any
        ) -> Any:
            ctx.constants = constants
            return operation.redispatch(keys & after_autograd_keys, tensor, *constants)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return None, transpose(gradient, *ctx.constants), *(None for _ in ctx.constants)

        @staticmethod
        def jvp(ctx: Any, _: None, tangent: torch.Tensor, *rest: None) -> Any:  # noqa: ARG004
            return operation(tangent, *ctx.constants)

    def kernel(keys: torch.DispatchKeySet, tensor: torch.Tensor, *constants: Any) -> Any:
        if not needs_gradient(tensor) and not has_tangent(tensor):
            return operation.redispatch(keys & after_autograd_keys, tensor, *constants)
        if reduces and constants[0] not in ("sum", "avg"):
            raise ValueError(
                f"op must be sum or avg if {argument} requires grad: {name} has no gradient for "
                f"{constants[0]}; pass {argument}.detach(), or call under torch.no_grad()"
            )
        return Linear.apply(keys, tensor, *constants)

    _library.impl(name, kernel, "Autograd", with_keyset=True)


def _transposed_reduce_scatter(g: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    gathered: torch.Tensor = _ops.all_gather(g, size, group)
    return gathered / size if op == "avg" else gathered


_TRANSPOSES: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _ops.all_reduce,
    "reduce": _ops.broadcast,
    "reduce_scatter": _transposed_reduce_scatter,
    "all_gather": lambda g, size, group: _ops.reduce_scatter(g, "sum", size, group),
    "all_to_all": _ops.all_to_all,
    "broadcast": _ops.reduce,
}
_IN_PLACE = ("all_reduce_", "reduce_scatter_", "all_gather_", "broadcast_")
for _name, _transpose in _TRANSPOSES.items():
    _differentiate(_name, _transpose)
for _name in ("all_reduce", "reduce", "all_to_all", "broadcast"):
    torch.library.register_fake(f"pycomm::{_name}")(_same_shape)
for _name in _IN_PLACE:
    torch.library.register_fake(f"pycomm::{_name}")(_nothing)
    refuse_gradients(_library, _name)

for _name in (*_TRANSPOSES, *_IN_PLACE):
    _library.impl(_name, _kernel(_name), "CUDA")

# The compressed operations, whose kernels take tensors of both devices.

_STEP = "SymInt step, SymInt offset, bool strict"
_COMPRESSED = {
    "compressed_all_reduce_": "(Tensor(a!) tensor, str compression, Tensor(b!)? residual, "
    f"Tensor(c!)? velocity, str op, str algorithm, {_STEP}, str group) -> ()",
    "compressed_all_reduce": "(Tensor tensor, str compression, str op, str algorithm, "
    f"{_STEP}, str group) -> Tensor",
    "compressed_reduce_scatter_": "(Tensor(a!) output, Tensor input, str compression, "
    f"Tensor(b!)? residual, str op, {_STEP}, str group) -> ()",
    "compressed_reduce_scatter": "(Tensor input, str compression, str op, "
    f"{_STEP}, int group_size, str group) -> Tensor",
    "encode": "(Tensor x, str compression, int step, int offset) -> Tensor",
    "decode": "(Tensor wire, str compression, SymInt n, ScalarType dtype) -> Tensor",
}
_fragment = torch.library.Library("pycomm", "FRAGMENT")
for _name, _schema in _COMPRESSED.items():
    _fragment.define(_name + _schema)
    for _device in ("CPU", "CUDA"):
        _fragment.impl(_name, _kernel(_name), _device)
    refuse_gradients(_fragment, _name)
for _name in ("compressed_all_reduce_", "compressed_reduce_scatter_"):
    torch.library.register_fake(f"pycomm::{_name}", _nothing, lib=_fragment)
torch.library.register_fake("pycomm::compressed_all_reduce", _same_shape, lib=_fragment)


@torch.library.register_fake("pycomm::compressed_reduce_scatter", lib=_fragment)
def _(input: torch.Tensor, *rest: Any) -> torch.Tensor:  # noqa: A002
    *_, group_size, _group = rest
    return _part(input, group_size)


@torch.library.register_fake("pycomm::encode", lib=_fragment)
def _(x: torch.Tensor, compression: str, step: int, offset: int) -> torch.Tensor:  # noqa: ARG001
    from pycomm._kernels import parsed

    nbytes = parsed(compression).encoded_bytes(x.numel(), x.dtype, step=step)
    return x.new_empty(nbytes, dtype=torch.uint8)


@torch.library.register_fake("pycomm::decode", lib=_fragment)
def _(wire: torch.Tensor, compression: str, n: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    return wire.new_empty(n, dtype=dtype)
