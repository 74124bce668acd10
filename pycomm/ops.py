"""torch.ops.pycomm: the operations for torch.compile, opcheck, export and autograd.

The kernels are in csrc/bind/ops.cpp, the fake kernels here. Operations have no gradient formulas
yet, so they refuse tensors that require grad. Each takes the name of a group (``group.name``):

- ``all_reduce(tensor, op, algorithm, group) -> Tensor`` and in place ``all_reduce_``
- ``reduce_scatter_(output, input, op, group)``
- ``all_gather_(output, input, group)``
- ``broadcast_(tensor, src, group)``
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from pycomm import _C  # noqa: F401 - registers the operations
from pycomm._inputs.tensors import check_no_gradient
from pycomm._runtime.torch_private import after_autograd_keys

_library = torch.library.Library("pycomm", "IMPL")


@torch.library.register_fake("pycomm::all_reduce")
def _all_reduce(tensor: torch.Tensor, op: str, algorithm: str, group: str) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(tensor)


def _nothing(*args: object) -> None:
    """The fake kernel of in-place operations, which change values only."""


def register_autograd(library: torch.library.Library, name: str) -> None:
    """Gives an operation an autograd kernel that raises an error if a tensor requires grad.

    Without it, autograd ignores the operation: the gradient would be None or, for in-place
    operations, that of the unchanged tensor. The kernel also tells autograd which tensors have
    changed.
    """
    operation = getattr(torch.ops.pycomm, name).default
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


for _name in ("all_reduce_", "reduce_scatter_", "all_gather_", "broadcast_"):
    torch.library.register_fake(f"pycomm::{_name}")(_nothing)
    register_autograd(_library, _name)
register_autograd(_library, "all_reduce")
