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
from pycomm._training.flat import kind_of, room

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from pycomm.group import Group

ROUNDING = 512  # bytes; more than what each block is rounded up by


def wishes_of_gradients(group: Group, parameters: Sequence[torch.Tensor]) -> HeapWishes:
    """Wishes for these parameters' gradients."""
    wishes = HeapWishes(next(p.device for p in parameters if p.is_cuda))
    wishes.add(group, gradient_bytes(parameters))
    return wishes


def wish_for_ddp(
    wishes: HeapWishes | None,
    group: Group,
    model: DistributedDataParallel,
    parameters: Sequence[torch.Tensor],
) -> HeapWishes:
    """Wishes for the buckets of a model with these parameters, too."""
    needed = gradient_bytes(parameters)
    # Gradients that are views keep up to two old buckets when DDP makes new ones.
    old = 2 * int(model.bucket_bytes_cap) if model.gradient_as_bucket_view else 0
    wishes = wishes or HeapWishes(parameters[0].device)
    wishes.add(group, needed + min(old, needed))
    return wishes


def make_room(
    wishes: HeapWishes | None,
    group: Group,
    bucket: torch.Tensor,
    parameters: Sequence[torch.Tensor],
) -> None:
    """Makes room when a state gets its first bucket; a collective call.

    Args:
        wishes: the state's. If it was not registered in this group, it has wished for nothing.
        group: the ranks.
        bucket: the first bucket.
        parameters: the parameters that the state knows.
    """
    if wishes is None or not wishes.of(group):
        wishes = HeapWishes(bucket.device)
        wishes.add(group, gradient_bytes(parameters))
    side = group._cuda
    wishes.fulfil(take_memory is not None and (side is None or side.path_of(bucket) == "staged"))


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """The bytes of gradients, in at most as many blocks as there are parameters."""
    return sum(room(p) * kind_of(p).grad_dtype.itemsize + ROUNDING for p in parameters)
