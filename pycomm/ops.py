"""torch.ops.pycomm: fake kernels, so that torch.compile, opcheck and export know the operations.

The real ones are in csrc/bind/ops.cpp. Each takes the name of a group (``group.name``):

- ``all_reduce(tensor, op, algorithm, group) -> Tensor`` and in place ``all_reduce_``
- ``reduce_scatter_(output, input, op, group)``
- ``all_gather_(output, input, group)``
- ``broadcast_(tensor, src, group)``
"""

from __future__ import annotations

import torch

from pycomm import _C  # noqa: F401 - registers the operations


@torch.library.register_fake("pycomm::all_reduce")
def _all_reduce(tensor: torch.Tensor, op: str, algorithm: str, group: str) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(tensor)


def _nothing(*args: object) -> None:
    """In-place operations change values only."""


for _name in ("all_reduce_", "reduce_scatter_", "all_gather_", "broadcast_"):
    torch.library.register_fake(f"pycomm::{_name}")(_nothing)
