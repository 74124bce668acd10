"""torch.ops.pycomm: the compressed operations, with fake kernels.

A compression is passed as text (:func:`pycomm.parse_compression`), a group as its ``group.name``:

- ``compressed_all_reduce_(tensor, compression, residual, velocity, op, algorithm, step, offset,
  strict, group)``, in place; residual and velocity may be None
- ``encode(x, compression, step, offset) -> Tensor``
- ``decode(wire, compression, n, dtype) -> Tensor``
"""

from __future__ import annotations

import torch

from pycomm._names import parse_compression
from pycomm.compressed import compressed_all_reduce
from pycomm.group import find_group
from pycomm.ops import refuse_gradients

_library = torch.library.Library("pycomm", "FRAGMENT")
_library.define(
    "compressed_all_reduce_(Tensor(a!) tensor, str compression, Tensor(b!)? residual, "
    "Tensor(c!)? velocity, str op, str algorithm, int step, int offset, bool strict, str group) "
    "-> ()"
)
_library.define("encode(Tensor x, str compression, int step, int offset) -> Tensor")
_library.define("decode(Tensor wire, str compression, SymInt n, ScalarType dtype) -> Tensor")


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
    compressed_all_reduce(
        tensor,
        parse_compression(compression),
        residual=residual,
        velocity=velocity,
        op=op,
        algorithm=algorithm,
        step=step,
        offset=offset,
        strict=strict,
        group=find_group(group),
    )


def _encode(x: torch.Tensor, compression: str, step: int, offset: int) -> torch.Tensor:
    return parse_compression(compression).encode(x, step=step, offset=offset)


def _decode(wire: torch.Tensor, compression: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    return parse_compression(compression).decode(wire, n, dtype=dtype)


for _name, _kernel in (
    ("compressed_all_reduce_", _compressed_all_reduce),
    ("encode", _encode),
    ("decode", _decode),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    refuse_gradients(_library, _name)


@torch.library.register_fake("pycomm::compressed_all_reduce_", lib=_library)
def _(*args: object) -> None:
    """Does nothing: the operation changes values only."""


@torch.library.register_fake("pycomm::encode", lib=_library)
def _(x: torch.Tensor, compression: str, step: int, offset: int) -> torch.Tensor:  # noqa: ARG001
    nbytes = parse_compression(compression).encoded_bytes(x.numel(), x.dtype, step=step)
    return x.new_empty(nbytes, dtype=torch.uint8)


@torch.library.register_fake("pycomm::decode", lib=_library)
def _(wire: torch.Tensor, compression: str, n: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001
    return wire.new_empty(n, dtype=dtype)
