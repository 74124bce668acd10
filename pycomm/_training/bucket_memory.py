"""Moves the buckets of DistributedDataParallel into the window.

torch allocates them, so without this each exchange would copy them into the window and back.
"""

from __future__ import annotations

import torch

from pycomm._runtime.log import fallback
from pycomm._runtime.torch_module import take_memory
from pycomm.errors import PycommError
from pycomm.group import Group


def move_into_window(bucket: torch.Tensor, group: Group) -> None:
    """Gives a bucket, and all views of it, memory in the group's window, with the same content.

    NumPy arrays and DLPack tensors that were made of a view before are no longer valid. The bucket
    stays where it is if it is only a part of its storage or shared with other processes, if the
    group has one rank, or if the window has no memory left.
    """
    storage = bucket.untyped_storage()
    alone = storage.nbytes() == bucket.nbytes and not storage.is_shared()
    if take_memory is None or not bucket.is_cpu or not alone:
        return
    if group.size == 1 or group._core.offset_of(bucket.data_ptr()) >= 0:
        return
    try:
        memory = group.empty(bucket.numel(), dtype=bucket.dtype)
    except MemoryError:
        fallback(group, "no memory for DistributedDataParallel's buckets: exchanges copy them")
        return
    except PycommError:  # the exchange raises it
        return
    take_memory(bucket, memory.copy_(bucket))
