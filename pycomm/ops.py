"""torch.ops.pycomm: the operations for torch.compile, opcheck, export and autograd.

The kernels are in csrc/bind/ops.cpp, the fake kernels and gradient formulas here. Each operation
takes the name of a group (``group.name``). These return a new contiguous tensor and have gradients
(docs/gradients.md):

- ``all_reduce(tensor, op, algorithm, group) -> Tensor``
- ``reduce(tensor, dst, group) -> Tensor``: the sum on rank `dst`, zeros on other ranks
- ``reduce_scatter(input, op, group_size, group) -> Tensor``: rank r's part of the first dimension
- ``all_gather(input, group_size, group) -> Tensor``: joined along the first dimension
- ``all_to_all(input, group) -> Tensor``: block r of the first dimension goes to rank r
- ``broadcast(tensor, src, group) -> Tensor``

These write into a tensor and raise ValueError if a tensor requires grad, unless grad mode is off:

- ``all_reduce_(tensor, op, algorithm, group)``
- ``reduce_scatter_(output, input, op, group)``
- ``all_gather_(output, input, group)``
- ``broadcast_(tensor, src, group)``

``group_size`` is ``group.size``. Gradients exist for the reductions ``"sum"`` and ``"avg"``; the
others raise ValueError if the tensor requires grad.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from pycomm import _C  # noqa: F401 - registers the operations
from pycomm._inputs import check_no_gradient, has_tangent, needs_gradient
from pycomm._runtime.lifetime import open_groups
from pycomm._runtime.torch_private import after_autograd_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm.compression import Compression

_library = torch.library.Library("pycomm", "IMPL")
_ops = torch.ops.pycomm


def _nothing(*args: object) -> None:
    """The fake kernel of in-place operations, which change values only."""


def _same_shape(tensor: torch.Tensor, *args: object) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.register_fake("pycomm::reduce_scatter")
def _(input: torch.Tensor, op: str, group_size: int, group: str) -> torch.Tensor:  # noqa: A002, ARG001
    return input.new_empty(input.shape[0] // group_size, *input.shape[1:])


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
for _name, _transpose in _TRANSPOSES.items():
    _differentiate(_name, _transpose)
for _name in ("all_reduce", "reduce", "all_to_all", "broadcast"):
    torch.library.register_fake(f"pycomm::{_name}")(_same_shape)
for _name in ("all_reduce_", "reduce_scatter_", "all_gather_", "broadcast_"):
    torch.library.register_fake(f"pycomm::{_name}")(_nothing)
    refuse_gradients(_library, _name)

# torch.ops.pycomm: the compressed operations, with fake kernels.
#
# A compression is passed as text (:func:`pycomm.parse_compression`), a group as its ``group.name``:
#
# - ``compressed_all_reduce_(tensor, compression, residual, velocity, op, algorithm, step, offset,
#   strict, group)``, in place; residual and velocity may be None
# - ``encode(x, compression, step, offset) -> Tensor``
# - ``decode(wire, compression, n, dtype) -> Tensor``

_compressed_library = torch.library.Library("pycomm", "FRAGMENT")
_compressed_library.define(
    "compressed_all_reduce_(Tensor(a!) tensor, str compression, Tensor(b!)? residual, "
    "Tensor(c!)? velocity, str op, str algorithm, int step, int offset, bool strict, str group) "
    "-> ()"
)
_compressed_library.define("encode(Tensor x, str compression, int step, int offset) -> Tensor")
_compressed_library.define(
    "decode(Tensor wire, str compression, SymInt n, ScalarType dtype) -> Tensor"
)


def _compressed_all_reduce(
    tensor: torch.Tensor,
    compression: str,
    residual: torch.Tensor | None,
    velocity: torch.Tensor | None,
    op: str,
    algorithm: str,
    step: int,
    offset: int,
    strict: bool,
    group: str,
) -> None:
    from pycomm.compressed import compressed_all_reduce

    compressed_all_reduce(
        tensor,
        _parse(compression),
        residual=residual,
        velocity=velocity,
        op=op,
        algorithm=algorithm,
        step=step,
        offset=offset,
        strict=strict,
        group=open_groups.find(group),
    )


@functools.lru_cache
def _parse(compression: str) -> Compression:
    from pycomm.compression import parse_compression

    return parse_compression(compression)


def _encode(x: torch.Tensor, compression: str, step: int, offset: int) -> torch.Tensor:
    return _parse(compression).encode(x, step=step, offset=offset)


def _decode(wire: torch.Tensor, compression: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    return _parse(compression).decode(wire, n, dtype=dtype)


for _name, _kernel in (
    ("compressed_all_reduce_", _compressed_all_reduce),
    ("encode", _encode),
    ("decode", _decode),
):
    for _device in ("CPU", "CUDA"):
        _compressed_library.impl(_name, _kernel, _device)
    refuse_gradients(_compressed_library, _name)


@torch.library.register_fake("pycomm::compressed_all_reduce_", lib=_compressed_library)
def _(*args: object) -> None:
    """Does nothing: the operation changes values only."""


@torch.library.register_fake("pycomm::encode", lib=_compressed_library)
def _(x: torch.Tensor, compression: str, step: int, offset: int) -> torch.Tensor:  # noqa: ARG001
    nbytes = _parse(compression).encoded_bytes(x.numel(), x.dtype, step=step)
    return x.new_empty(nbytes, dtype=torch.uint8)


@torch.library.register_fake("pycomm::decode", lib=_compressed_library)
def _(wire: torch.Tensor, compression: str, n: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    return wire.new_empty(n, dtype=dtype)
