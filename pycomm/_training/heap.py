"""What models need in a group's CUDA window.

A window is made at the group's first operation on CUDA, in one piece. So a wrapper says before how
much memory its buckets and shards will take there. All that a rank wishes is added up; the largest
sum of all ranks counts, up to a part of the device (pycomm/_runtime/cuda.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._training.buckets import bucket_limit
from pycomm._training.flat import kind_of, room

if TYPE_CHECKING:
    from pycomm._training.hook_state import HookState
    from pycomm._training.sharding import Sharding
    from pycomm.group import Group

_ROUNDING = 512  # bytes; more than what each block is rounded up by


def wish_for_model(
    group: Group,
    parameters: Sequence[torch.Tensor],
    state: HookState,
    sharding: Sharding | None,
    bucket_bytes: float,
) -> None:
    """Wishes for a wrapper's buckets and shards, if they will lie in the window."""
    if state.averages_parameters:
        return
    encodes = not all(state.sends_dense(parameter) for parameter in parameters)
    if sharding is None:
        if not encodes:
            group._heap_wish += _gradient_bytes(parameters)
        return
    from pycomm._training.grad_shards import slots_bytes
    from pycomm._training.shards import plan_arena

    divides = group if sharding.group is None else sharding.group
    parameters = list(reversed(parameters))  # as the wrapper cuts them into buckets
    limit = bucket_limit(parameters, bucket_bytes)
    averages = sharding.stage == "optimizer" and divides is group and not encodes
    divides._heap_wish += plan_arena(parameters, divides.size, limit, averages).nbytes + _ROUNDING
    if sharding.stage == "gradients":
        divides._heap_wish += slots_bytes(int(limit), divides.size) + _ROUNDING
    elif not averages and not encodes:
        group._heap_wish += _gradient_bytes(parameters)


def _gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """The bytes of gradients, in at most as many blocks as there are parameters."""
    return sum(room(p) * kind_of(p).grad_dtype.itemsize + _ROUNDING for p in parameters)
