"""What models need in a group's CUDA window.

A window is made at the group's first operation on CUDA, in one piece. So a wrapper says before how
much memory its buckets and shards will take there, and a hook's state that of the buckets of
DistributedDataParallel. All that a rank wishes is added up; the largest sum of all ranks counts, up
to a part of the device (pycomm/_runtime/cuda.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from pycomm._training.flat import kind_of, room

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from pycomm.group import Group

ROUNDING = 512  # bytes; more than what each block is rounded up by


def wish_for_ddp(
    group: Group, model: DistributedDataParallel, parameters: Iterable[torch.Tensor]
) -> None:
    """Wishes for the buckets of a model with these parameters."""
    needed = gradient_bytes(parameters)
    # Gradients that are views keep up to two old buckets when DDP makes new ones.
    old = 2 * int(model.bucket_bytes_cap) if model.gradient_as_bucket_view else 0
    group._heap_wish += needed + min(old, needed)


def wish_for_buckets(group: Group, parameters: Iterable[torch.Tensor]) -> None:
    """Wishes for buckets with these parameters' gradients, if nobody has wished for anything."""
    if group._cuda is None and group._heap_wish == 0:
        group._heap_wish = gradient_bytes(parameters)


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """The bytes of gradients, in at most as many blocks as there are parameters."""
    return sum(room(p) * kind_of(p).grad_dtype.itemsize + ROUNDING for p in parameters)
