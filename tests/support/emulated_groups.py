"""Operations of torch.distributed on emulated devices, whose memory is the host's.

The group's backend for CPU tensors runs them, on the same memory, at once: the streams of emulated
devices do their work when it is enqueued.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

OPERATIONS = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allreduce_",
    "barrier",
    "broadcast_",
    "recv_",
    "scatter_",
    "send",
)
_library = torch.library.Library("c10d", "IMPL")  # its implementations go when it does


def serve_cuda_tensors() -> None:
    """From now on, this process's groups take CUDA tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once")  # of operations that are replaced
        for name in OPERATIONS:
            operation = getattr(torch.ops.c10d, name).default
            run = functools.partial(_run, operation)
            _library.impl(name, run, "CUDA", allow_override=True)
    # The devices lack generators, whose states pipelines keep.
    mock.patch.object(torch.cuda, "get_rng_state").start()
    mock.patch.object(torch.cuda, "set_rng_state").start()


def _run(operation: Any, *args: Any) -> Any:
    given = {}

    def on_host(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return value
        torch.ops.emulator.kernel_uses(value, True)
        alias = _alias(value)
        given[id(alias)] = alias, value
        return alias

    results = operation(*pytree.tree_map(on_host, args))
    return pytree.tree_map(lambda value: given.get(id(value), (value, value))[1], results)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for the host."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=tensor.dtype)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
