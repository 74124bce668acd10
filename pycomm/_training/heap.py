"""What models need in a group's CUDA window.

A wrapper says how much memory its buckets and shards will take there, and a hook's state that of
the buckets of DistributedDataParallel. A window is made at the group's first operation on CUDA. All
that a rank has wished for by then is added up, and the largest sum of all ranks counts, up to a
part of the device. All ranks meet where a model begins. If the window has no room for what is still
to be taken, it grows there (pycomm/_runtime/cuda.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm._runtime.c10d import take_memory
from pycomm._runtime.cuda import HeapWishes
from pycomm._training.buckets import bucket_limit
from pycomm._training.flat import kind_of, room

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from pycomm._training.comm_state import CommState
    from pycomm._training.hook_state import HookState
    from pycomm._training.sharding import Sharding
    from pycomm.group import Group

ROUNDING = 512  # bytes; more than what each block is rounded up by


def wishes_of_wrapper(
    group: Group,
    parameters: Sequence[torch.Tensor],
    state: HookState,
    sharding: Sharding | None,
    bucket_bytes: float,
) -> HeapWishes:
    """Wishes for what a wrapper exchanges in place, with shards or without."""
    wishes = HeapWishes(next(p.device for p in parameters if p.is_cuda))
    if sharding is None:
        if state.exchanges_in_place(parameters):
            wishes.add(group, gradient_bytes(parameters))
    elif not state.averages_parameters:
        _wish_for_shards(wishes, group, parameters, state, sharding, bucket_bytes)
    return wishes


def _wish_for_shards(
    wishes: HeapWishes,
    group: Group,
    parameters: Sequence[torch.Tensor],
    state: HookState,
    sharding: Sharding,
    bucket_bytes: float,
) -> None:
    """Wishes for the shards, and for what of the gradients lies in windows."""
    from pycomm._training.grad_shards import slots_bytes
    from pycomm._training.shards import plan_arena

    divides = group if sharding.group is None else sharding.group
    parameters = list(reversed(parameters))  # as the wrapper cuts them into buckets
    limit = bucket_limit(parameters, bucket_bytes)
    in_place = state.exchanges_in_place(parameters)
    averages = sharding.stage == "optimizer" and divides is group and in_place
    arena = plan_arena(parameters, divides.size, limit, averages)
    wishes.add(divides, arena.nbytes + ROUNDING)
    if sharding.stage == "gradients":
        wishes.add(divides, slots_bytes(int(limit), divides.size) + ROUNDING)
    elif not averages and in_place:
        wishes.add(group, gradient_bytes(parameters))


def wish_for_ddp(
    state: HookState, model: DistributedDataParallel, parameters: Sequence[torch.Tensor]
) -> None:
    """Wishes for the buckets of a model with these parameters."""
    needed = gradient_bytes(parameters)
    # Gradients that are views keep up to two old buckets when DDP makes new ones.
    old = 2 * int(model.bucket_bytes_cap) if model.gradient_as_bucket_view else 0
    state._wishes = state._wishes or HeapWishes(parameters[0].device)
    state._wishes.add(state.group, needed + min(old, needed))


def make_room_for_buckets(
    state: CommState, bucket: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> None:
    """Makes room when a state gets its first bucket; a collective call.

    A state that was not registered in this group has wished for nothing there.
    """
    group, wishes, state._wishes = state.group, state._wishes, None
    if wishes is None or not wishes.of(group):
        wishes = HeapWishes(bucket.device)
        wishes.add(group, gradient_bytes(state._parameters.tensors or parameters))
    side = group._cuda
    wishes.fulfil(take_memory is not None and (side is None or side.path_of(bucket) == "staged"))


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """The bytes of gradients, in at most as many blocks as there are parameters."""
    return sum(room(p) * kind_of(p).grad_dtype.itemsize + ROUNDING for p in parameters)
